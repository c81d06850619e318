"""Shared memory between real processes: whose memory it is, what is left behind, and how it ends."""

import functools
import gc
import logging
import os
import random
import re
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import Op, TorchDistTransport, Transport, finish
from paceline.collectives.choose import choose
from paceline.collectives.shm import ShmTransport
from paceline.collectives.shm.connect import PeerInfo, check_share_host
from paceline.collectives.shm.mesh import RING
from paceline.collectives.store_gather import NoSharedMemory
from paceline.errors import (
    CollectiveError,
    CollectiveMismatch,
    PacelineError,
    PeerAbsent,
    PeerLost,
    SharedMemoryFull,
    UsageError,
)
from tests.pool import Pool
from tests.procs.test_waits import hear, say

CPU = torch.device("cpu")
MIB = 1 << 20


def over_shm(body: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `body(transport, ...)` on every rank, and sees that nothing of the transport is left afterwards."""

    @functools.wraps(body)
    def on_rank(rank: int, size: int, *args: Any) -> Any:
        gc.collect()  # what earlier tests have left in cycles
        held, before = mapped(), descriptors()
        assert dist.group.WORLD is not None
        transport = choose(TorchDistTransport(dist.group.WORLD), "shm", [CPU], 20)
        assert isinstance(transport, ShmTransport)
        try:
            return body(transport, *args)
        finally:
            transport.close()
            gc.collect()
            assert not Counter(mapped()) - Counter(held), "memory is still mapped"
            assert descriptors() - before == set()

    return on_rank


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(entry.readlink()))
        except FileNotFoundError:  # the one through which the folder was read
            continue
    # The store's file is opened and closed by threads of the watch.
    return {name for name in found if not name.startswith(("/", "pipe:"))}


def mapped() -> list[int]:
    """The sizes of what this process has mapped of the ranks' memory, but for control pages."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:paceline" in line:
            first, last = re.split("[- ]", line)[:2]
            sizes.append(int(last, 16) - int(first, 16))
    return sorted(size for size in sizes if size != 5 * 4096)


def settle(transport: Transport, *works: object, timeout_s: float = 20) -> None:
    for number, work in enumerate(works):
        finish(work, what=f"work {number}", watch=transport.watch, timeout_s=timeout_s)  # type: ignore[arg-type]


def reduced(transport: Transport, flat: torch.Tensor, op: Op = Op.SUM) -> torch.Tensor:
    settle(transport, transport.all_reduce(flat, op))
    return flat


# ------------------------------------------------------------------------------------------------------------ memory


@over_shm
def reduce_in_place(transport: ShmTransport) -> None:
    rank, size = transport.rank, transport.size
    bucket = transport.allocate(MIB, torch.float32, CPU)
    assert mapped().count(4 * MIB) == 1
    view = bucket[3:-5]
    view.fill_(rank + 1)
    reduced(transport, view, Op.MEAN)
    assert mapped().count(4 * MIB) == size, "one mapping per rank"
    assert bucket[3] == bucket[-6] == (size + 1) / 2
    assert bucket[2] == bucket[-5] == 0
    dist.barrier()  # a rank that goes on frees its memory, and the others hear of it at once
    del bucket, view
    reduced(transport, torch.ones(1))
    # Each rank says with its next collective that its memory is gone; one more and all have heard it.
    reduced(transport, torch.ones(1))
    assert 4 * MIB not in mapped()


def test_a_bucket_is_reduced_where_it_lies_and_freed_on_all_ranks(procs: Pool) -> None:
    procs(3).run(reduce_in_place)


@over_shm
def reduce_strange_tensors(transport: ShmTransport) -> None:
    size = transport.size
    every_second = torch.arange(20.0)[::2]
    assert reduced(transport, every_second).tolist() == [2.0 * size * i for i in range(10)]
    turned = torch.arange(6.0).view(2, 3).t()
    assert reduced(transport, turned).tolist() == [[0, 3 * size], [size, 4 * size], [2 * size, 5 * size]]
    leaf = torch.ones(3, requires_grad=True)
    assert reduced(transport, leaf).tolist() == [size] * 3 and leaf.grad_fn is None
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    assert reduced(transport, conjugate).tolist() == [size * (1 - 2j), size * -3j]
    in_arena = transport.allocate(4, torch.complex64, CPU).fill_(1j).conj()
    assert reduced(transport, in_arena).tolist() == [-1j * size] * 4
    assert reduced(transport, torch.tensor(2.0)).item() == 2 * size
    assert reduced(transport, torch.empty(0, 3)).shape == (0, 3)
    with torch.inference_mode():
        inside = transport.allocate(4, torch.float32, CPU)
        reduced(transport, inside.fill_(1))
    assert reduced(transport, torch.ones(4)).tolist() == [size] * 4


def test_tensors_of_every_make_are_reduced(procs: Pool) -> None:
    procs(2).run(reduce_strange_tensors)


@over_shm
def gather_in_one_arena(transport: ShmTransport) -> None:
    rank, size = transport.rank, transport.size
    flat = transport.allocate(size * 4, torch.float32, CPU)
    part = flat[rank * 4 : rank * 4 + 4].fill_(rank)
    settle(transport, transport.all_gather(flat, part))
    assert flat.view(size, 4)[:, 0].tolist() == list(range(size))
    flat.copy_(torch.arange(size * 4) + 100 * rank)
    settle(transport, transport.all_to_all(flat, flat))
    assert flat[::4].tolist() == [100 * peer + 4 * rank for peer in range(size)]
    shifted = flat[: 4 * (size - 1)] if size > 1 else flat
    settle(transport, transport.broadcast(shifted, root=size - 1))
    assert shifted[0] == 4 * (size - 1)


def test_parts_of_one_arena_may_be_source_and_target(procs: Pool) -> None:
    procs(3).run(gather_in_one_arena)


@over_shm
def too_much(transport: ShmTransport) -> str:
    size = transport.size
    with pytest.raises(SharedMemoryFull) as caught:
        transport.allocate(1 << 48, torch.float32, CPU)
    assert reduced(transport, torch.ones(1)).item() == size
    return str(caught.value)


def test_memory_that_cannot_be_had_is_named_in_bytes(procs: Pool) -> None:
    for message in procs(2).run(too_much):
        assert "1,125,899,906,842,624 bytes of shared memory" in message


# ---------------------------------------------------------------------------------------------------- many at a time


@over_shm
def fly_many(transport: ShmTransport) -> None:
    rank = transport.rank
    count = 2 * RING + 50
    # Every one in memory of its own, so that more descriptors are under way than a socket takes at once.
    flats = [transport.allocate(1, torch.int64, CPU).fill_(number + rank) for number in range(count)]
    if rank == 1:
        hear("all begun")
    works = [transport.all_reduce(flat) for flat in flats]
    if rank == 0:
        assert not works[-1].done()
        say("all begun")
    settle(transport, *reversed(works))
    assert [int(flat) for flat in flats] == [2 * number + 1 for number in range(count)]


def test_more_are_in_flight_than_records_and_sockets_hold(procs: Pool) -> None:
    procs(2).run(fly_many)


@over_shm
def help_between_gradients(transport: ShmTransport) -> None:
    """A collective completes by `progress` alone, on ranks that never wait."""
    size = transport.size
    flat = transport.allocate(1000, torch.float32, CPU).fill_(1)
    work = transport.all_reduce(flat)
    deadline = time.monotonic() + 20
    while not work.done() and time.monotonic() < deadline:
        transport.progress()
        time.sleep(0.001)
    assert work.done() and work.wait(0)
    assert flat[0] == size


def test_progress_alone_completes_a_collective(procs: Pool) -> None:
    procs(3).run(help_between_gradients)


@over_shm
def profile(transport: ShmTransport) -> list[str]:
    flat = transport.allocate(10, torch.float32, CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        settle(transport, transport.all_reduce(flat), transport.broadcast(flat))
    return [event.name for event in profiler.events() if event.name.startswith("shm:")]


def test_profilers_see_what_a_rank_does(procs: Pool) -> None:
    assert procs(2).run(profile) == [["shm:all_reduce", "shm:broadcast"]] * 2


@over_shm
def reduce_without_hints(transport: ShmTransport, hint: int) -> None:
    for link in transport._mesh.links:
        link.hint = memoryview(hint.to_bytes(8, "little")).cast("Q")
    flat = transport.allocate(1000, torch.float32, CPU)
    for number in range(50):
        works = [transport.all_reduce(flat.fill_(number)), transport.all_gather(torch.empty(3), torch.ones(1))]
        transport.progress()
        settle(transport, *works)
        assert flat[0] == flat[-1] == number * transport.size


@pytest.mark.parametrize("hint", [0, 2**64 - 1], ids=["never seen", "always early"])
def test_hints_only_save_time(hint: int, procs: Pool) -> None:
    procs(3).run(reduce_without_hints, hint)


# ------------------------------------------------------------------------------------------------------ disagreement


@over_shm
def disagree(transport: ShmTransport, what: str) -> tuple[str, tuple[int, ...]]:
    rank, size = transport.rank, transport.size
    flat = torch.ones(2)
    if rank != 1:
        work = transport.all_reduce(flat)
    elif what == "numel":
        work = transport.all_reduce(torch.ones(3))
    elif what == "dtype":
        work = transport.all_reduce(torch.ones(2, dtype=torch.float64))
    elif what == "op":
        work = transport.all_reduce(flat, Op.MAX)
    else:
        work = transport.broadcast(flat, root=2)
    with pytest.raises(CollectiveMismatch) as caught:
        settle(transport, work)
    assert flat.tolist() == [1, 1]
    assert reduced(transport, flat).tolist() == [size, size]
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize(
    ("what", "called"),
    [
        ("numel", "all_reduce(sum) of float32[3]"),
        ("dtype", "all_reduce(sum) of float64[2]"),
        ("op", "all_reduce(max) of float32[2]"),
        ("kind", "broadcast(root=2) of float32[2]"),
    ],
)
def test_ranks_that_differ_all_learn_it_and_go_on(what: str, called: str, procs: Pool) -> None:
    found = procs(3).run(disagree, what)
    assert len(set(found)) == 1
    assert f"rank 0 called all_reduce(sum) of float32[2]; rank 1 called {called}; rank 2" in found[0][0]


# ------------------------------------------------------------------------------------------------------------ deaths


def reduce_for_ever(transport: Transport, flat: torch.Tensor) -> None:
    while True:
        reduced(transport, flat)


@over_shm
def die_at_random(transport: ShmTransport, seed: int) -> tuple[tuple[int, ...], float, str]:
    chance = random.Random(seed)
    victim, delay_s = chance.randrange(transport.size), chance.uniform(0, 0.05)
    flat = transport.allocate(2 * MIB, torch.float32, CPU)
    reduced(transport, flat)
    if transport.rank == victim:
        say("killed at", time.monotonic() + delay_s)
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    killed_at = float(hear("killed at"))
    with pytest.raises(PeerLost) as caught:
        reduce_for_ever(transport, flat)
    seconds = time.monotonic() - killed_at
    with pytest.raises(CollectiveError, match="was abandoned"):
        transport.all_reduce(flat)
    return caught.value.ranks, seconds, str(caught.value)


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_a_rank_killed_in_a_reduction_is_named_on_the_others(size: int, seed: int, procs: Pool) -> None:
    victim = random.Random(seed).randrange(size)
    for outcome in procs(size).attempt(die_at_random, seed):
        if outcome.rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.ok, outcome.error
        ranks, seconds, message = outcome.value
        assert ranks == (victim,), message
        assert seconds < 3


@over_shm
def leave_early(transport: ShmTransport) -> str:
    flat = torch.ones(1000)
    if transport.rank == 0:
        work = transport.all_reduce(flat)
        say("begun")
        hear("did its part")
        settle(transport, work)
        say("settled")
        hear("second begun")
        transport.close()
        say("closed")
        hear("done")
        return ""
    hear("begun")
    work = transport.all_reduce(flat)  # does this rank's part, and rank 0 has not done its own
    say("did its part")
    hear("settled")
    # In memory that rank 0 is told of and never hears: what it said last comes after an error of the socket then.
    second = transport.all_reduce(transport.allocate(1, torch.float32, CPU))
    say("second begun")
    hear("closed")
    settle(transport, work)
    assert flat[0] == transport.size
    with pytest.raises(CollectiveError) as caught:
        settle(transport, second)
    say("done")
    return str(caught.value)


def test_who_leaves_in_good_order_breaks_nothing_that_is_complete(procs: Pool) -> None:
    message = procs(2).run(leave_early)[1]
    assert "connection closed by rank 0" in message
    assert "it closed its transport" in message


@over_shm
def come_late(transport: ShmTransport) -> tuple[str, tuple[int, ...]]:
    rank = transport.rank
    flat = torch.ones(1000)
    reduced(transport, flat)
    if rank == 1:
        hear("0 gave up"), hear("2 gave up")
    # Rank 2 would have more patience, but rank 0 tells it.
    with pytest.raises(PeerAbsent) as caught:
        settle(transport, transport.all_reduce(flat), timeout_s=1.5 if rank == 0 else 20)
    say(f"{rank} gave up")
    return str(caught.value), caught.value.ranks


def test_who_comes_after_the_timeout_is_told_so(procs: Pool) -> None:
    for message, ranks in procs(3).run(come_late):
        assert ranks == (1,)
        assert "rank 1" in message


@over_shm
def interrupt(transport: ShmTransport) -> tuple[float, str]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if transport.rank == 1:
            pid = int(hear("blocked"))
            time.sleep(0.2)  # for the other to be in its wait; if it is not yet, it is interrupted on its way
            say("sent at", time.monotonic())
            os.kill(pid, signal.SIGINT)
            hear("interrupted")
            with pytest.raises(PeerLost) as lost:
                reduced(transport, torch.ones(1))
            return 0.0, str(lost.value)
        say("blocked", os.getpid())
        with pytest.raises(KeyboardInterrupt):
            reduced(transport, torch.ones(1))
        ended = time.monotonic()
        say("interrupted")
        with pytest.raises(CollectiveError, match="make a new replica or transport") as caught:
            transport.all_reduce(torch.ones(1))
        return ended - float(hear("sent at")), str(caught.value)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.alone
def test_ctrl_c_ends_a_wait_and_the_use_of_the_transport(procs: Pool) -> None:
    interrupted, other = procs(2).run(interrupt)
    assert interrupted[0] < 0.3
    assert "KeyboardInterrupt while it waited for all_reduce(sum) of float32[1]" in interrupted[1]
    assert "connection closed by rank 0" in other[1]


@over_shm
def fork(transport: ShmTransport) -> str:
    rank, size = transport.rank, transport.size
    flat = transport.allocate(10, torch.float32, CPU)
    reduced(transport, flat.fill_(1))
    work = transport.all_reduce(flat.fill_(1)) if rank == 0 else None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process with threads is forked is the point
        child = os.fork()
    if child == 0:
        try:
            transport.progress()
            transport.all_reduce(flat)
        except PacelineError as error:
            os.write(writing, str(error).encode())
        finally:
            transport.close()
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    settle(transport, work if work is not None else transport.all_reduce(flat.fill_(1)))
    assert flat[0] == size
    del flat
    return said


def test_a_child_that_was_forked_off_is_silent(procs: Pool) -> None:
    for said in procs(2).run(fork):
        assert "forked from a rank" in said


# ---------------------------------------------------------------------------------------------------------- choosing


def presence(rank: int, **changes: object) -> PeerInfo:
    fields: dict[str, object] = {
        "rank": rank,
        "boot": "b",
        "network": "net:[1]",
        "user": 0,
        "hostname": "h",
        "token": "t",
    }
    return PeerInfo(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot": "c", "hostname": "i"}, "rank 1 runs on another host (i) than rank 0 (h)"),
        ({"network": "net:[2]"}, "rank 1 runs in another container than rank 0 (network namespace net:[2], not"),
        ({"user": 7}, "rank 1 runs as user 7, and rank 0 as user 0"),
        ({"cannot": "has no memory"}, "rank 1 has no memory"),
    ],
)
def test_why_ranks_share_no_memory_is_said(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(NoSharedMemory) as caught:
        check_share_host([presence(0), presence(1, **changes)])
    assert reason in str(caught.value)


def test_ranks_of_one_host_share_memory() -> None:
    check_share_host([presence(0), presence(1)])


def wish(rank: int, size: int, wishes: list[str]) -> str:
    assert dist.group.WORLD is not None
    try:
        transport = choose(TorchDistTransport(dist.group.WORLD), wishes[rank], [CPU], 20)
    except UsageError as error:
        return str(error)
    transport.close()
    return type(transport).__name__


def test_all_ranks_must_wish_the_same(procs: Pool) -> None:
    assert procs(2).run(wish, ["auto", "auto"]) == ["ShmTransport"] * 2
    assert procs(2).run(wish, ["torch", "torch"]) == ["TorchDistTransport"] * 2
    message = "every rank must pass the same transport=, got: rank 0 transport='shm'; rank 1 transport='torch'"
    assert procs(2).run(wish, ["shm", "torch"]) == [message] * 2
    assert "transport must be one of 'auto'" in procs(2).run(wish, ["gloo", "gloo"])[0]
    alone = "transport='two-level' cannot work here: all ranks run on one host; use transport='auto'"
    assert procs(2).run(wish, ["two-level"] * 2) == [alone] * 2


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, line: logging.LogRecord) -> None:
        self.lines.append((line.levelname, line.getMessage()))


@contextmanager
def another_network() -> Iterator[None]:
    """As in another container: the names of abstract sockets are not those of the other ranks."""
    libc = CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as home:
        if libc.unshare(0x40000000) != 0:
            pytest.skip("this user may not make network namespaces")
        try:
            yield
        finally:
            libc.setns(home.fileno(), 0)


@contextmanager
def small_files() -> Iterator[None]:
    """A process that may make files up to a size that a control page does not fit into."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cannot_share(rank: int, size: int, wanted: str, what: str, port: int) -> tuple[str, list[tuple[str, str]]]:
    """Over a store that is not a file, whose size would be limited too."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        return try_to_share(rank, size, wanted, what)
    finally:
        dist.barrier()  # the store lives in rank 0
        dist.destroy_process_group()


def try_to_share(rank: int, size: int, wanted: str, what: str) -> tuple[str, list[tuple[str, str]]]:
    log, logger = Lines(), logging.getLogger("paceline")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    before = descriptors()
    try:
        if rank != 1:
            return wish(rank, size, [wanted] * size), log.lines
        with another_network() if what == "network" else small_files():
            return wish(rank, size, [wanted] * size), log.lines
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
        gc.collect()
        assert descriptors() - before == set()


@pytest.mark.parametrize("what", ["network", "files"])
def test_one_rank_that_cannot_sends_all_to_torch_with_one_line(what: str, procs: Pool, reserved_port: int) -> None:
    if what == "network" and os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    found = procs(2).run(cannot_share, "auto", what, reserved_port, group=False)
    assert [kind for kind, _ in found] == ["TorchDistTransport"] * 2
    lines = found[0][1]
    assert found[1][1] == []
    if what == "network":  # nor can such a rank connect anew, so the user's own group is used
        level, line = lines.pop()
        assert level == "WARNING"
        assert "could not be duplicated (rank 1: " in line
    ((level, line),) = lines
    assert level == ("INFO" if what == "network" else "WARNING")
    assert ("rank 1 runs in another container" if what == "network" else "rank 1 could not connect") in line
    for message, _ in procs(2).run(cannot_share, "shm", what, reserved_port, group=False):
        assert message.startswith("transport='shm' cannot work here: rank 1 ")
        assert message.endswith("use transport='auto'")
