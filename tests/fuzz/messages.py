"""The parsers of what processes tell each other: through pipes, the stores of groups, sockets and variables."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from torch.distributed import HashStore, PrefixStore

from paceline.bench.contenders import ContenderName, find_contender, label_each
from paceline.bench.spec import parse_sizes
from paceline.cli.run_flags import parse as parse_flags
from paceline.cli.run_job import job_from
from paceline.cli.train_output import TrainOutput
from paceline.collectives.call_site import CallFrame
from paceline.collectives.checked import _PostedCall
from paceline.collectives.gather import message_of
from paceline.collectives.peers import Identity, Issued, PeerRecord, Wait
from paceline.collectives.shm import notices
from paceline.collectives.shm.connect import PeerInfo
from paceline.collectives.store_gather import posted_in
from paceline.errors import CollectiveError, Malformed, MessageDamaged, UsageError, WorldError
from paceline.faults.fault import parse_all
from paceline.launch.failure import End, root_cause
from paceline.launch.lines import Lines
from paceline.launch.rank_processes import RankProcesses
from paceline.launch.rank_slot import RankErrors
from paceline.launch.rank_watch import RankWatch
from paceline.launch.rehearsal import Rehearsal
from paceline.launch.reports import ProgressBoard, ReportReader
from paceline.launch.tracebacks import own_line, read_sections, thread_stack
from paceline.member_messages import (
    Finished,
    FromLauncher,
    FromMember,
    Generation,
    MemberFailed,
    MemberFinished,
    MemberFormed,
    MemberLeft,
    MemberReady,
    MemberStore,
    Refused,
    Regroup,
    StoreAt,
    from_launcher,
    from_member,
    to_line,
)
from paceline.memory_plan.numbers import parse_count, parse_list
from paceline.rank_report import inherited_descriptor
from paceline.reducer.report import Abort, Mode, StepReport, Vote
from paceline.start.rendezvous import _Decision, _Rendezvous
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder
from paceline.world import World
from paceline.world.environment import Variables
from paceline.world.launchers import read_world
from tests.fuzz.frames import Frame
from tests.fuzz.parser import Parser

TRACEBACK = b"""Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    main()
    ~~~~^^
  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 7, in forward
    x
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in f
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: one
    +------------------------------------
During handling of the above exception, another exception occurred:
ValueError: it is wrong: [rank1] said so
Fatal Python error: Aborted
Current thread 0x00007f (most recent call first):
  File "x.py", line 3 in f
"""
MESSAGES: tuple[FromMember | FromLauncher, ...] = (
    MemberReady(0, 3, True, "raised ValueError", 2, 1, 2, 8),
    MemberStore(1, 4000),
    MemberFormed(1),
    MemberFailed(1, 5, "raised"),
    MemberFinished(1, 9),
    Generation(2, (0, 3), (0,), 5, False),
    StoreAt(2, "127.0.0.1", 4000),
    MemberLeft(1, 2, "was killed"),
    Regroup(1),
    Refused("no more"),
    Finished(3),
)
LINES = tuple(to_line(message) for message in MESSAGES)
STEP = {
    "step": 3,
    "loss": 1.5,
    "tokens_per_s": 9.0,
    "own_tokens_per_s": 4.5,
    "step_s": 0.1,
    "exposed_s": 0.0,
    "data_s": 0,
}
READY = {"lanes": 0, "shard": 0, "ranks": 2, "device": "cpu", "placement": "ddp", "samples": 4, "context": 8}
REPORTS = tuple(
    json.dumps({"kind": kind, **fields}).encode() + b"\n"
    for kind, fields in (
        ("step", STEP),
        ("ready", {**READY, "parameters": 1000, "source": "text"}),
        ("checked", {"planned": 1 << 20, "measured": 1 << 20, "difference": 1e-7}),
        ("held_out", {"step": 3, "loss": 1.0, "per_byte": 0.5}),
        ("resumed", {"step": 3, "redone": 0, "jump": [0.1, 0.2], "skipped": ["x"]}),
        ("trouble", {"text": "x"}),
        ("refused", {"text": "x"}),
        ("saved", {"step": 3, "problem": "disk", "blocked_s": 0.1}),
        ("rests", {"stack": ['  File "x.py", line 3 in f']}),
        ("fault", {"fault": "kill rank=1 step=20"}),
    )
)
VARIABLES = (
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2", "LOCAL_RANK": "1", "PET_RDZV_ENDPOINT": "a:1"},
    {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "gpu[003-7],x",
        "SLURM_JOB_ID": "12",
    },
    {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": "29500"},
    {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "LSB_HOSTS": "a b c", "LSB_JOBID": "77"},
    {"PBS_NODEFILE": "/proc/self/comm"},
    {
        "TF_CONFIG": json.dumps(
            {"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}}
        )
    },
)
FLAGS = (
    ["-n", "2", "--max-restarts", "3", "--hang-timeout", "5", __file__],
    ["--ranks", "1:4", "--spares", "1", "--recovery-timeout", "9", "--fault", "kill rank=1 step=2", __file__],
    ["--gpu-ids", "0,1", "--rdzv-endpoint", "[::1]:29500", "--rdzv-id", "job", __file__, "-n", "3"],
)


def launcher_frames() -> Iterator[Parser]:
    """What the launcher and a rank say to each other, and what a rank writes."""
    yield Parser("a member: what its launcher says", from_launcher, LINES, share=4)
    yield Parser("the launcher: what ranks report", _Launcher().on_report, (*LINES, *REPORTS), share=4)
    yield Parser("the launcher: events of the reaper", _event, _EVENTS, (Malformed,))
    yield Parser(
        "the launcher: what ranks write", _output, (TRACEBACK, b"step 1\rstep 2\r\n[rank0]: x\n", b"a\nb\n"), share=2
    )
    yield Parser("tracebacks", _sections, (TRACEBACK, TRACEBACK[:300]), share=2)
    yield Parser("the launcher: the progress board", _board, (struct.pack("@qqqq", 1, 2, 3, 4) + bytes(32),))
    yield Parser("a rank: descriptors by name", lambda frame: inherited_descriptor(_text(frame)), (b"1:12345",))


class _Launcher:
    """All in the launcher that takes what a rank reports."""

    def __init__(self) -> None:
        console = Console(file=StringIO(), markup=False, highlight=False, soft_wrap=True)
        self._console = console
        self._shown = TrainOutput(TrainConfig(), 2, RunFolder(Path("run")), console)
        self._rehearsal = Rehearsal(parse_all("kill rank=1 step=20 times=3"))
        self._watch = RankWatch([0, 1], None, cast(Any, None), print)

    def on_report(self, frame: Frame) -> None:
        assert isinstance(self._console.file, StringIO)
        self._console.file.seek(0)
        self._console.file.truncate()
        reader = ReportReader()
        for part in (frame[: len(frame) // 2], frame[len(frame) // 2 :], b"\n"):
            for kind, fields in reader.feed(part):
                from_member(kind, fields)
                self._rehearsal.on_report(kind, fields)
                self._watch.on_report(0, kind, fields)
                self._shown.reported(0, kind, fields)
                self._shown._picture()


_EVENTS = (
    b'{"rank": 0, "pid": 77}',
    b'{"rank": 1, "code": 3}',
    b'{"rank": 1, "killed_by": 9}',
    b'{"rank": 0, "never": "x", "code": 127}',
)


def _event(frame: Frame) -> object:
    processes = object.__new__(RankProcesses)
    processes.living, processes._oom_kills = {0: 0, 1: 5}, 1 << 60
    return processes._event(frame)


def _output(frame: Frame) -> None:
    out, err = Lines(0), RankErrors(0)
    for number in range(3):
        out.feed(frame, number)
        err.feed(frame, number)
        out.idle(number + 0.9)
        err.idle(number + 20.0)
    tail = tuple(err.last)
    root_cause([End(rank=0, at=1.0, code=1, tail=tail), End(rank=1, at=2.0, killed_by=6, tail=tail)])


def _sections(frame: Frame) -> None:
    lines = frame.decode(errors="replace").splitlines()
    for section in read_sections(lines):
        section.details(), section.reasons, section.name
    own_line(thread_stack(lines))
    own_line(lines)


def _board(frame: Frame) -> None:
    with closing(ProgressBoard(1)) as board:
        board._memory[:64] = frame[:64].ljust(64, b"\0")
        board.read(0), board.beat(0)


def _text(frame: Frame) -> str:
    return frame.decode(errors="replace")


def store_frames() -> Iterator[Parser]:
    """What ranks post on a store, and send each other."""
    damaged = (MessageDamaged,)
    own = PeerInfo.own(1, "auto cpu")
    record = PeerRecord(
        Identity.own(), [Wait("all_reduce", 1.5)], 1, {"x": Issued(2, ["a"])}, 3, verdict=("x", [[1.5]])
    )
    call = _PostedCall("all_reduce(sum)", None, (CallFrame("train.py", 3, "main"),))
    tagged = _PostedCall("barrier()", "x", ())
    yield Parser(
        "shared memory: the address of a rank",
        lambda frame: PeerInfo.decode(_text(frame), 1),
        (own.encode().encode(),),
        damaged,
    )
    yield Parser("shared memory: notices", _Notices().take, _NOTICES, (CollectiveError,))
    yield Parser(
        "the store: records of ranks",
        lambda frame: PeerRecord.decode(frame, 0),
        (record.encode().encode(),),
        damaged,
        share=2,
    )
    yield Parser(
        "the store: processes of a generation", Identity.decode, (Identity.own().encode().encode(),), (Malformed,)
    )
    yield Parser(
        "the store: calls",
        lambda frame: _PostedCall.decode(_text(frame), 0),
        (call.encode().encode(), tagged.encode().encode()),
        damaged,
        share=2,
    )
    yield Parser("the store: gathers", lambda frame: posted_in(frame, "key"), (b"12 some text", b""), damaged)
    decision = json.dumps({"missing": [1], "sizes": [[0, 2], [1, 2]]}).encode()
    yield Parser("the store: a world that forms", _Forming().decided, (decision, b"2"), (WorldError,))
    yield Parser("collectives: messages of ranks", lambda frame: message_of(frame, 0, "x"), (b'{"a": [1]}',), damaged)
    report = StepReport(
        1, 0, 0, Mode.PLAIN, 1.0, votes=Vote.STOP, abort=Abort.DAMAGED, used=(3,), lane_weights=(1.0, 2.0)
    )
    row = struct.pack(f"<{len(report.encode())}q", *report.encode())
    yield Parser("collectives: step reports", _step_report, (row,), damaged, share=4)


_NOTICES = tuple(
    data for data, _ in (notices.freed_notice(3), notices.exit_notice(notices.PeerExit("it waited", (1, 2), True)))
)


class _Notices:
    def take(self, frame: Frame) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other:
            one.setblocking(False)
            other.send(frame[:4096])
            notices.NoticeSocket(1, one).receive()


class _Forming:
    def __init__(self) -> None:
        self._rendezvous = object.__new__(_Rendezvous)
        self._rendezvous._store, self._rendezvous._world = PrefixStore("x", HashStore()), World(rank=0, size=2)

    def decided(self, frame: Frame) -> object:
        self._rendezvous._store.set("x", _text(frame))
        return self._rendezvous._read("x", int if frame[:1].isdigit() else _Decision)


def _step_report(frame: Frame) -> object:
    whole = frame[: len(frame) // 8 * 8]
    return StepReport.decode(struct.unpack(f"<{len(whole) // 8}q", whole), 2)


def word_frames() -> Iterator[Parser]:
    """What people and schedulers say: variables, flags, faults, sizes."""
    refused = (UsageError,)
    variables = tuple(json.dumps(one).encode() for one in VARIABLES)
    yield Parser("variables of launchers", _variables, variables, (WorldError,), share=4)
    flags = tuple(json.dumps(one).encode() for one in FLAGS)
    yield Parser("flags of paceline run", _flags, flags, refused, share=0.1)
    faults = (
        b"kill rank=1 step=20; slow rank=all step=3 seconds=0.5",
        b"flip rank=2 step=7 tensor=3 bit=22 where=update",
    )
    yield Parser("faults", lambda frame: parse_all(_text(frame)), faults, refused, share=2)
    yield Parser("sizes", lambda frame: parse_sizes(_text(frame)), (b"4KiB..256MiB", b"4,1MiB"), refused)
    yield Parser("counts", lambda frame: parse_count("x", _text(frame)), (b"124M", b"1.3B", b"7"), refused)
    yield Parser("lists", lambda frame: parse_list("x", _text(frame)), (b"1,2,4",), refused)
    yield Parser("contenders", _contenders, (b"paceline:bucket_mb=4:x=1.5,torch", b"zero1,zero1"), refused)


def _variables(frame: Frame) -> object:
    try:
        found = json.loads(frame)
    except (ValueError, RecursionError):
        found = {"TF_CONFIG": _text(frame)}
    table = found if isinstance(found, dict) else {"RANK": str(found), "WORLD_SIZE": "2"}
    return read_world(
        Variables({name: value if isinstance(value, str) else json.dumps(value) for name, value in table.items()})
    )


def _flags(frame: Frame) -> object:
    try:
        words = [str(word) for word in json.loads(frame)]
    except (ValueError, RecursionError, TypeError):
        words = _text(frame).split()
    words = [word for word in words if word not in ("-h", "--help", "auto", "gpu")]  # which ask the machine, or end
    return job_from(parse_flags(words, {}), {})


def _contenders(frame: Frame) -> object:
    labels = label_each(_text(frame).split(","))
    return [find_contender(ContenderName.parse(label).name, files=False) for label in labels]
