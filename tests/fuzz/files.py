"""The parsers of files, of packed values that ranks send each other, and of what a notebook is sent."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from paceline.agree import capsule
from paceline.agree.exact_copy import UnknownKind, pack_exactly, unpack_exactly
from paceline.bench.messages import _MessageEncoder, message_in
from paceline.bench.processes import Order
from paceline.bench.spec import StepSpec
from paceline.checkpoint import Checkpointer, manifest
from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.checkpoint.joint import _said
from paceline.data.cursor import Cursor
from paceline.data.sample_log import SampleLog, SampleLogDamaged, SampleLogEntry, read_sample_log
from paceline.errors import CapsuleDamaged, Malformed
from paceline.notebook.rank_kernels.cell_run import _event, _shown_by_reply
from paceline.notebook.rank_kernels.connection import is_message
from paceline.notebook.values import pack as pack_for_notebook
from paceline.notebook.values import unpack as unpack_of_notebook
from paceline.stored.directory import FileRecord
from paceline.stored.packed import pack, unpack
from paceline.stored.tensor_file import TensorFile, file_parts
from paceline.train.config import ConfigError, TrainConfig, build, from_toml, to_toml
from paceline.train.run_folder import RunFolder
from tests.fuzz.frames import Frame
from tests.fuzz.parser import Parser

CPU = torch.device("cpu")
VALUE = {
    "step": 3, "name": "x", "w": torch.arange(6.0).view(2, 3), "t": (1, {2.5}, None, b"x"), "c": 1 + 2j, 7: [True],
    "dtype": torch.bfloat16, "size": torch.Size((2, 3)), "array": numpy.arange(4), "scalar": numpy.float32(1.5),
    "half": torch.ones(3, dtype=torch.bfloat16), "nan": float("nan"),
}  # fmt: skip


def rewrite(file: Path, content: bytes) -> None:
    """As a new file: to cut one off and fill it again makes some file systems wait for the disk."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def flat(frame: Frame) -> torch.Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8) if frame else torch.empty(0, dtype=torch.uint8)


def value_frames() -> Iterator[Parser]:
    """Values with tensors in them, as bytes."""
    head, body = file_parts({"w": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.int8)}, {"kind": "x"})
    tensors = b"".join([head, *body])
    refused = (Malformed,)
    yield Parser(
        "packed values", lambda frame: unpack(flat(frame)), (pack(VALUE, "x"), pack([1, 2], "x")), refused, share=2
    )
    yield Parser(
        "packed values: their tree", lambda frame: unpack(flat(frame)), tuple(_trees()), refused, 2, _with_tensors
    )
    exact = pack_exactly({"x": torch.arange(12.0).view(3, 4).t(), "y": VALUE["t"]}, "x")
    yield Parser(
        "microbatches of other ranks",
        lambda frame: unpack_exactly(flat(frame), CPU),
        (exact,),
        (*refused, UnknownKind),
        share=2,
    )
    tree = exact[8 : 8 + int.from_bytes(exact[:8], "little")]
    yield Parser(
        "microbatches: their tree",
        lambda frame: unpack_exactly(flat(frame), CPU),
        (tree,),
        (*refused, UnknownKind),
        2,
        _Retailed(exact).seal,
    )
    yield Parser("files of tensors", lambda frame: _all_of(TensorFile(flat(frame))), (tensors,), refused, share=2)
    length = 8 + int.from_bytes(tensors[:8], "little")
    yield Parser(
        "files of tensors: the header",
        lambda frame: _all_of(TensorFile(flat(frame))),
        (tensors[8:length],),
        refused,
        2,
        _Retailed(tensors).seal,
    )


def _trees() -> Iterator[Frame]:
    packed = pack(VALUE, "x")
    yield packed[8 : 8 + int.from_bytes(packed[:8], "little")]


def _with_tensors(tree: Frame) -> Frame:
    packed = pack(VALUE, "x")
    return len(tree).to_bytes(8, "little") + tree + packed[8 + int.from_bytes(packed[:8], "little") :]


class _Retailed:
    """Puts a text before what came behind the text of another frame."""

    def __init__(self, frame: Frame) -> None:
        self._rest = frame[8 + int.from_bytes(frame[:8], "little") :]

    def seal(self, text: Frame) -> Frame:
        return len(text).to_bytes(8, "little") + text + self._rest


def _all_of(file: TensorFile) -> None:
    for name in list(file._entries):
        file[name]


def run_frames(folder: Path) -> Iterator[Parser]:
    """The files of a run. `folder` is for frames that have to be files."""
    whole = b"".join(
        capsule._to_parts(capsule.Capsule("crash", 3, (1,), "boom", batch=[VALUE["w"]], settings={"a": 1}))
    )
    read = lambda frame: capsule._decoded(flat(frame), folder)  # noqa: E731
    yield Parser("failure capsules", read, (whole,), (CapsuleDamaged,))
    inner = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["capsule"].encode()
    yield Parser("failure capsules: their tree", read, (inner,), (CapsuleDamaged,), 1, _Capsule(whole).seal)
    yield Parser("sample logs", _SampleLog(folder).read, _sample_log(folder), (SampleLogDamaged,), share=0.2)
    record = json.dumps(
        {"files": {"model.safetensors": {"size": 3, "chunk": 4, "sha256": ["00"]}}, "problem": ""}
    ).encode()
    yield Parser("checkpoints: what a rank has written", lambda frame: _said(1, frame), (record,), (CheckpointError,))
    of = Snapshots(folder)
    yield Parser("checkpoints: the manifest", manifest.from_bytes, (of.manifest,), (Malformed,), 2, _hashed)
    for name, frame in of.files.items():
        yield Parser(f"checkpoints: {name}", partial(of.load, name), (frame,), (CheckpointError,), 0.02)
    yield Parser("checkpoints: a manifest on disk", of.load_manifest, (of.manifest,), (CheckpointError,), 0.02, _hashed)
    runs = _Run(folder)
    yield Parser("a run's configuration", runs.config, (to_toml(TrainConfig()).encode(),), (ConfigError,), share=0.1)
    yield Parser("a run's result", runs.result, (b'{"ended": "done", "steps": 3}',), (Malformed,), share=0.3)
    yield Parser(
        "a run's metrics",
        runs.metrics,
        (b'{"step": 1, "loss": 2.5}\n{"step": 2, "held_out": 2.5}\n',),
        (Malformed,),
        share=0.3,
    )


class _Capsule:
    def __init__(self, whole: Frame) -> None:
        length = 8 + int.from_bytes(whole[:8], "little")
        self._header, self._body = json.loads(whole[8:length]), whole[length:]

    def seal(self, tree: Frame) -> Frame:
        metadata = {**self._header["__metadata__"], "capsule": tree.decode(errors="replace"), "sha256": "0" * 64}
        text = json.dumps({**self._header, "__metadata__": metadata}, separators=(",", ":")).encode()
        head = len(text).to_bytes(8, "little") + text
        digest = sha256(head + self._body).hexdigest()
        return head.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest.encode()) + self._body


def _sample_log(folder: Path) -> tuple[Frame, ...]:
    log = SampleLog(folder / "written")
    log.begin(Cursor(1, 0, 0), 0, 1, resumed=False)
    log.record(SampleLogEntry(0, 0, 0, 0, 2, (5, 7)))
    log.close()
    (file,) = (folder / "written").iterdir()
    header, entry, _ = file.read_bytes().split(b"\n")
    return (header + b"\n" + entry + b"\n", header + b"\n")


class _SampleLog:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "samples"
        self._folder.mkdir()

    def read(self, frame: Frame) -> None:
        (self._folder / "session-000001-rank-00000.jsonl").write_bytes(frame)
        read_sample_log(self._folder).problems()
        with SampleLog(self._folder) as log:
            log.begin(Cursor(1, 0, 0), 1, 2, resumed=False)
        for path in self._folder.iterdir():
            path.unlink()


def _hashed(frame: Frame) -> Frame:
    """A manifest whose hash is right, whatever it says."""
    body = frame.partition(b'",\n "sha256": "')[0]
    return body + f'",\n "sha256": "{sha256(body).hexdigest()}"\n}}\n'.encode()


class Snapshots:
    """A snapshot of a small model, of which one file at a time is replaced, with the right hashes in its manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints"
        self._model = nn.Linear(3, 2)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._model(torch.ones(1, 3)).sum().backward()
        self._optimizer.step()
        with Checkpointer(self._folder) as checkpoints:
            checkpoints.save(1, model=self._model, optimizer=self._optimizer, note=VALUE)
        (self._path,) = self._folder.glob("step-*")
        self.manifest = (self._path / manifest.FILE).read_bytes()
        self._manifest = manifest.from_bytes(self.manifest)
        self.files = {name: (self._path / name).read_bytes() for name in self._manifest.files}

    def load(self, name: str, frame: Frame) -> None:
        record = FileRecord(len(frame), 4 << 20, (sha256(frame).hexdigest(),))
        changed = replace(self._manifest, files={**self._manifest.files, name: record})
        rewrite(self._path / name, frame)
        try:
            self.load_manifest(manifest.to_bytes(changed))
        finally:
            rewrite(self._path / name, self.files[name])

    def load_manifest(self, frame: Frame) -> None:
        rewrite(self._path / manifest.FILE, frame)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(self._folder) as checkpoints:
            checkpoints.load(model=model, optimizer=optimizer)


class _Run:
    def __init__(self, folder: Path) -> None:
        self._run = RunFolder(folder / "run")
        self._run.path.mkdir()

    def config(self, frame: Frame) -> object:
        rewrite(self._run.config_file, frame)
        return build(from_toml(self._run.config_file))

    def result(self, frame: Frame) -> object:
        rewrite(self._run.result_file, frame)
        return self._run.result()

    def metrics(self, frame: Frame) -> object:
        rewrite(self._run.metrics_file, frame)
        return self._run.metrics()


def bench_frames() -> Iterator[Parser]:
    """What a conductor and its workers send each other."""
    order = Order("torch", "step", "torch", StepSpec(steps=3), 2, 1, "cpu")
    load = json.dumps(_MessageEncoder().encode(("load", order))).encode()
    answer = json.dumps(_MessageEncoder().encode(("answer", {"seconds": [1.5], 3: (1, None)}))).encode()
    yield Parser("bench: orders", lambda frame: message_in(frame, settings=True), (load, answer), (Malformed,))
    yield Parser("bench: answers", message_in, (answer,), (Malformed,))


def notebook_frames() -> Iterator[Parser]:
    """What ranks of a notebook send to the user's kernel."""
    content, buffers = pack_for_notebook({"w": VALUE["w"], "a": numpy.arange(4), "t": (1, {2})}, "x")
    yield Parser(
        "notebook: values",
        lambda frame: unpack_of_notebook(json.loads(frame), buffers),
        (json.dumps(content).encode(),),
        (Malformed, ValueError, RecursionError),
        share=2,
    )
    array = json.dumps({"value": {"$": "array", "buffer": 0}})
    _, (plain,) = pack_for_notebook(numpy.ones((2, 3)), "x")
    _, (named,) = pack_for_notebook(numpy.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), "x")
    yield Parser(
        "notebook: arrays",
        lambda frame: unpack_of_notebook(json.loads(array), [frame]),
        (plain, named),
        (Malformed,),
        share=0.5,
    )
    parts = {"header": {}, "parent_header": {"msg_id": "c"}, "metadata": {}}
    messages = tuple(
        json.dumps({**parts, "msg_type": kind, "content": said}).encode()
        for kind, said in (
            ("stream", {"name": "stdout", "text": "x"}),
            ("display_data", {"data": {"text/plain": "x"}, "metadata": {}, "transient": {"display_id": "1"}}),
            ("error", {"ename": "ValueError", "evalue": "x", "traceback": ["a", "b"]}),
            ("clear_output", {"wait": True}),
            ("execute_reply", {"payload": [{"source": "page", "data": {"text/plain": "x"}}], "status": "ok"}),
        )
    )
    yield Parser("notebook: messages", _message, messages, share=2)


def _message(frame: Frame) -> None:
    try:
        found: Any = json.loads(frame)
    except (ValueError, RecursionError):  # the session of jupyter_client has seen its signature, and reads it
        return
    if isinstance(found, dict) and is_message(found):
        _event(0, found, "c")
        list(_shown_by_reply(0, found["content"]))
