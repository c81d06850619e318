"""The agent of a Ray job and what it is made of, without Ray: an agent is an object that Ray happens to hold."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import ElasticTerms, Job
from paceline.launch.rank_environment import SURVIVORS, environment_of

pytest.importorskip("ray")

from paceline.process_status import read_status
from paceline.ray import agent as agent_module
from paceline.ray.agent import Agent
from paceline.ray.network import interface_of
from paceline.ray.pipe_ends import PipeEnds
from paceline.ray.places import Place
from paceline.ray.rank_run import THIS_PYTHON
from paceline.ray.variables import numbered, placed

PATIENCE_S = 20.0


@contextmanager
def agent() -> Iterator[Agent]:
    made = Agent("node", "127.0.0.1")
    try:
        yield made
    finally:
        made.close()


def until(agent: Agent, kind: str, run: int = 0, text: bytes = b"") -> list[Any]:
    """What the agent tells of a process up to the first of this kind, which comes last, or to the end of a text."""
    found, end = [], time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for number, what, more in agent.poll(0.1):
            if number == run:
                found.append((what, more))
                if what == kind and joined(found, kind).endswith(text):
                    return found
    raise AssertionError(f"no {kind} came, only {found}")


def joined(events: list[Any], kind: str) -> bytes:
    return b"".join(more for what, more in events if what == kind and isinstance(more, bytes))


def test_an_agent_tells_what_its_rank_writes_reports_and_notes_before_how_it_ended(tmp_path: Path) -> None:
    script = (
        "import os, sys; from paceline.progress import own_progress, Phase; from paceline.rank_report import report\n"
        "print('out', os.getcwd(), os.environ['GIVEN']); print('err', file=sys.stderr); report('done', step=7)\n"
        "own_progress().note(Phase.OPTIMIZER, 7); sys.exit(3)"
    )
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", script], {"LOCAL_RANK": "2", "GIVEN": "x"}, str(tmp_path))
        events = until(one, "exited")
    assert joined(events, "out") == f"out {tmp_path} x\n".encode()
    assert joined(events, "err") == b"err\n"
    assert joined(events, "report") == b'{"kind": "done", "step": 7}\n'
    noted = [more for what, more in events if what == "noted"][-1]
    assert noted != bytes(len(noted))
    assert events[-1][1]["code"] == 3


def test_a_rank_hears_signals_and_what_its_driver_tells_it() -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "told = int(os.environ['PACELINE_MEMBERSHIP_FD'].partition(':')[0]); print('up', flush=True)\n"
        "print(os.read(told, 100).decode(), flush=True)\n"
        "signal.pause()"
    )
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", script], {}, "")
        until(one, "out", text=b"up\n")
        one.signal(0, signal.SIGUSR1)
        until(one, "out", text=b"usr1\n")
        one.tell(0, b"news")
        until(one, "out", text=b"news\n")
        one.signal(0, signal.SIGKILL)
        assert until(one, "exited")[-1][1]["killed_by"] == signal.SIGKILL


def test_commands_for_a_process_that_is_over_do_not_reach_the_next_one() -> None:
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", ""], {}, "")
        until(one, "exited")
        one.start(1, [THIS_PYTHON, "-c", "print('up', flush=True); import time; time.sleep(60)"], {}, "")
        until(one, "out", run=1, text=b"up\n")
        one.signal(0, signal.SIGKILL)
        one.signal(1, signal.SIGTERM)
        assert until(one, "exited", run=1)[-1][1]["killed_by"] == signal.SIGTERM


def test_a_program_that_does_not_exist_never_starts() -> None:
    with agent() as one:
        one.start(0, ["/nowhere/to/be/found"], {}, "")
        assert "No such file" in until(one, "exited")[-1][1]["never"]


def test_closing_an_agent_ends_its_rank_and_what_that_has_started() -> None:
    script = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"
    )
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", script], {}, "")
        child = int(joined(until(one, "out", text=b"\n"), "out"))
        assert read_status(child).state
    assert read_status(child).state in ("", "Z")


def test_an_agent_without_its_driver_ends_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "DRIVER_S", 0.5)
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", "import time; time.sleep(60)"], {}, "")
        pid = until(one, "started")[-1][1]
        end = time.monotonic() + PATIENCE_S
        while read_status(pid).state and time.monotonic() < end:
            time.sleep(0.02)
        assert not read_status(pid).state
        assert until(one, "exited")[-1][1]["killed_by"] == signal.SIGKILL


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.7") == ""


def place(node: str, port: int, gpus: tuple[str, ...] = ()) -> Place:
    return Place(node=node, address=f"10.0.0.{port}", interface="eth1", port=port, gpus=gpus, clock_ns=0)


def test_ranks_are_numbered_by_their_machines_as_torchrun_does_it() -> None:
    places = {0: place("a", 1, ("0",)), 1: place("b", 2, ("0",)), 2: place("a", 3, ("1",))}
    assert numbered(2, places) == {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert numbered(1, places)["NODE_RANK"] == "1"


def test_ranks_meet_at_the_first_one_and_listen_at_their_own_address() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0", "MASTER_ADDR": "127.0.0.1"}
    found = placed(environment, 1, {0: place("a", 1), 1: place("b", 2)})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1")
    assert found["PACELINE_STORE_HOST"] == "10.0.0.2"
    assert found["GLOO_SOCKET_IFNAME"] == "eth1"
    assert found["NCCL_SOCKET_IFNAME"] == "ib0"  # the user's


def test_a_member_has_what_ranks_need_that_outlive_others(tmp_path: Path) -> None:
    terms = ElasticTerms(minimum=1, maximum=2)
    job = Job(command=("x",), ranks=2, run_dir=tmp_path, elastic=terms)
    environment = placed(environment_of(job, 1, 99, 0, {}, member=5), 1, {0: place("a", 1), 1: place("b", 2)})
    with agent() as one:
        one.start(0, [THIS_PYTHON, "-c", "import json, os; print(json.dumps(dict(os.environ)))"], environment, "")
        found = json.loads(joined(until(one, "exited"), "out"))
    assert SURVIVORS.items() <= found.items()
    assert (found["PACELINE_MEMBER"], found["PACELINE_JOB"]) == ("5", job.token)


def test_pipe_ends_pass_on_more_than_a_pipe_holds_and_give_up_when_told() -> None:
    ours, theirs = os.pipe()
    ends = PipeEnds({"out": theirs})
    os.close(theirs)
    full = False

    def look() -> bool:
        return full

    data = bytes(200_000)
    reader = _Reader(ours)
    ends.write("out", data, look)
    ends.close()
    assert reader.read() == data
    os.close(ours)
    ours, theirs = os.pipe()
    ends = PipeEnds({"out": theirs})
    os.close(theirs)
    ends.write("out", data, _after(3))  # nobody reads
    ends.close()
    os.close(ours)


class _Reader:
    """Reads a pipe to its end in another thread."""

    def __init__(self, descriptor: int) -> None:
        import threading

        self._found = bytearray()
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while data := os.read(self._descriptor, 1 << 16):
            self._found += data

    def read(self) -> bytes:
        self._thread.join(PATIENCE_S)
        return bytes(self._found)


def _after(asked: int) -> Callable[[], bool]:
    left = iter([False] * asked)
    return lambda: next(left, True)
