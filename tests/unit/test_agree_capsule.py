"""A failure capsule holds what was put into it, or is refused."""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from paceline.agree.capsule import Capsule, read_capsule, write_capsule
from paceline.errors import CapsuleDamaged, UsageError


class Sample(NamedTuple):
    x: torch.Tensor
    label: str


def full() -> Capsule:
    return Capsule(
        kind="not-finite",
        step=17,
        ranks=(2,),
        error='w is NaN on rank 2\n"sha256":"' + "0" * 64 + '"',
        rank=2,
        world_size=4,
        lanes=(4, 5),
        seed=7,
        settings={"threads": 2, "deterministic": True, "matmul": "highest"},
        rng={"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()},
        batch=[(torch.ones(2, 3), {"y": torch.tensor([1, 2]), "length": 3, 5: None}), Sample(torch.zeros(1), "a")],
        state={"w": torch.randn(4, 4).t(), "h": torch.ones(3).bfloat16(), "c": torch.ones(2, dtype=torch.complex128)},
        collectives=("bucket 0 of step 17", "bucket 1 of step 17"),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    capsule = full()
    path = write_capsule(tmp_path / "new" / "step-17.capsule", capsule)
    again = read_capsule(path)
    for name in capsule.__dataclass_fields__:
        assert same(getattr(capsule, name), getattr(again, name)), name
    assert again.versions["torch"] == torch.__version__
    assert isinstance(again.batch[0], tuple)
    random.setstate(again.rng["python"] if again.rng else ())
    write_capsule(path, Capsule("crash", 1, (), "again"))
    assert read_capsule(path) == Capsule("crash", 1, (), "again")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_other_tools_read_its_tensors(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    capsule = full()
    tensors = load_file(write_capsule(tmp_path / "c", capsule))
    assert torch.equal(tensors["state/w"], capsule.state["w"])
    assert torch.equal(tensors["batch/0/0"], torch.ones(2, 3))


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = write_capsule(tmp_path / "c", full())
    whole = path.read_bytes()
    draw = random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(8), *(draw.randrange(header) for _ in range(40)), *(draw.randrange(len(whole)) for _ in range(40))]
    places += [whole.index(b'"sha256":"') + 12, len(whole) - 1]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(CapsuleDamaged, match="is not an intact failure capsule"):
            read_capsule(path)
    for cut in (whole[:-1], whole + b"\0", whole[:header], whole[:5], b""):
        path.write_bytes(cut)
        with pytest.raises(CapsuleDamaged):
            read_capsule(path)
    path.write_bytes(whole)
    assert read_capsule(path).step == 17


def test_what_cannot_be_kept_is_left_out_and_named(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    batch = {"x": torch.ones(1), "who": object(), "eye": torch.eye(2).to_sparse(), ("a",): [OrderedDict(k=Sample)]}
    capsule = Capsule("crash", 3, (0,), "boom", batch=batch, settings={"loop": loop})
    again = read_capsule(write_capsule(tmp_path / "c", capsule))
    assert same(again.batch, {"x": torch.ones(1), "who": None, "eye": None, ("a",): [{"k": None}]})
    assert [line.partition(":")[0] for line in again.omitted] == [
        "settings.loop.0…",
        "batch.who",
        "batch.eye",
        "batch.('a',).0.k",
    ]


def test_a_write_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        write_capsule(tmp_path / "file" / "c", full())
    (tmp_path / "folder" / "c").mkdir(parents=True)
    with pytest.raises(OSError, match="c"):
        write_capsule(tmp_path / "folder" / "c", full())
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["c"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="kind: expected one of divergence, not-finite, crash, got 'odd'"):
        Capsule("odd", 1, (), "")  # type: ignore[arg-type]
