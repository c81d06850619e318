"""What every transport must do, asked of all of them."""

import gc
import time
import traceback
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from paceline import collectives
from paceline.collectives import LocalTransport, Op, ThreadWorld, TorchDistTransport, Transport, finish, run
from paceline.collectives.block_gather import BlockGather
from paceline.collectives.choose import choose
from paceline.collectives.group import Group
from paceline.collectives.protocols import Traits
from paceline.collectives.reduction import GradBucket
from paceline.collectives.shm import ShmTransport
from paceline.collectives.tree_sum import tree_sum
from paceline.errors import CollectiveMismatch, PeerAbsent, PeerLost, UsageError
from paceline.strategies.scatter_mean import ScatterMean
from tests.pool import Pool

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def settle(transport: Transport, *works: object) -> None:
    for number, work in enumerate(works):
        finish(work, what=f"work {number}", watch=transport.watch, timeout_s=20)  # type: ignore[arg-type]


def mine(transport: Transport, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([1, 2, 4], dtype=dtype) * (transport.rank + 1)


def all_mine(transport: Transport, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([torch.tensor([1, 2, 4], dtype=dtype) * (rank + 1) for rank in range(transport.size)])


def it_knows_its_place(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size


def it_allocates_zeros(transport: Transport) -> None:
    flat = transport.allocate(7, torch.bfloat16, CPU)
    assert flat.shape == (7,)
    assert flat.dtype is torch.bfloat16
    assert not flat.any()


def it_reduces_by_every_op(transport: Transport) -> None:
    expected = all_mine(transport)
    for op, result in {
        Op.SUM: expected.sum(0),
        Op.MEAN: expected.mean(0),
        Op.PRODUCT: expected.prod(0),
        Op.MIN: expected.amin(0),
        Op.MAX: expected.amax(0),
    }.items():
        flat = mine(transport)
        settle(transport, transport.all_reduce(flat, op))
        assert torch.equal(flat, result), op


def it_adds_in_the_tree_where_it_can(transport: Transport) -> None:
    for dtype in [*FLOATS, torch.complex64]:
        for numel in (0, 3, 1000):
            draws = torch.Generator().manual_seed(numel)
            sizes = 10.0 ** torch.randint(-3, 4, (transport.size, numel), generator=draws)
            parts = (torch.randn(transport.size, numel, generator=draws) * sizes).to(dtype)
            flat = transport.allocate(numel, dtype, CPU).copy_(parts[transport.rank])
            if not transport.traits(CPU).tree_sum:
                with pytest.raises(UsageError, match="cannot add in the tree over rank numbers"):
                    transport.all_reduce(flat, Op.TREE)
                continue
            settle(transport, transport.all_reduce(flat, Op.TREE))
            assert torch.equal(flat, tree_sum(list(parts))), dtype
    assert not transport.traits(CPU).stream_ordered


def it_reduces_every_dtype(transport: Transport) -> None:
    for dtype in [*FLOATS, torch.complex64, torch.int32, torch.int64, torch.uint8]:
        flat = mine(transport, dtype)
        settle(transport, transport.all_reduce(flat))
        assert torch.equal(flat, all_mine(transport, dtype).sum(0).to(dtype)), dtype
    flag = torch.tensor([transport.rank == 0, False])
    settle(transport, transport.all_reduce(flag, Op.MAX))
    assert flag.tolist() == [True, False]


def it_means_floats_and_complex(transport: Transport) -> None:
    for dtype in [*FLOATS, torch.complex64]:
        flat = mine(transport, dtype)
        settle(transport, transport.all_reduce(flat, Op.MEAN))
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.testing.assert_close(flat.to(wide), all_mine(transport, wide).mean(0), rtol=1e-2, atol=0)


def it_reduces_sparse_tensors(transport: Transport) -> None:
    for op, factor in ((Op.SUM, 1), (Op.MEAN, transport.size)):
        values = torch.tensor([1.0, 10.0])
        indices = torch.tensor([[transport.rank, 5]])
        with torch.sparse.check_sparse_tensor_invariants():  # asked for, so that torch does not warn
            sparse = torch.sparse_coo_tensor(indices, values, (6,))
        settle(transport, transport.all_reduce(sparse, op))
        expected = torch.zeros(6)
        expected[: transport.size] = 1
        expected[5] = 10 * transport.size
        torch.testing.assert_close(sparse.to_dense(), expected / factor)


def it_broadcasts_from_any_root(transport: Transport) -> None:
    for root in range(transport.size):
        flat = mine(transport)
        settle(transport, transport.broadcast(flat, root))
        assert torch.equal(flat, all_mine(transport)[root])


def it_gathers_in_rank_order(transport: Transport) -> None:
    out = torch.full((transport.size * 3,), -1.0)
    settle(transport, transport.all_gather(out, mine(transport)))
    assert torch.equal(out, all_mine(transport).flatten())


def it_sends_a_part_to_each(transport: Transport) -> None:
    for dtype in (torch.float32, torch.complex64, torch.int64):
        flat = torch.arange(transport.size * 3).to(dtype) + 100 * transport.rank
        out = torch.full_like(flat, -1)
        settle(transport, transport.all_to_all(out, flat))
        first = torch.arange(3) + 3 * transport.rank
        expected = torch.cat([first + 100 * rank for rank in range(transport.size)]).to(dtype)
        assert torch.equal(out, expected), dtype
    with pytest.raises(UsageError, match="all_to_all over"):
        transport.all_to_all(torch.zeros(1), torch.zeros(2))


def it_reduces_into_shards(transport: Transport) -> None:
    """By `ScatterMean`, which does it in some way over every transport; the bits are those of the whole mean."""
    size, rank = transport.size, transport.rank
    bounds = [0, *(40 * (other + 1) for other in range(size - 1)), 200]
    spans = [((begin, end), (200 + begin, 200 + end)) for begin, end in pairwise(bounds)]
    for dtype in FLOATS:
        for flat in (transport.allocate(400, dtype, CPU), torch.zeros(400, dtype=dtype)):
            flat.copy_(torch.arange(400).mul(rank + 1).remainder(17))
            whole = flat.clone()
            reduction = ScatterMean()
            if not reduction.divides(transport, CPU):
                flat.div_(size), whole.div_(size)
            flight = reduction(GradBucket(0, flat, [flat], [flat], last=True, spans=spans), transport)
            settle(transport, flight.work)
            flight.result()
            mean = Op.MEAN if reduction.divides(transport, CPU) else Op.SUM
            settle(transport, transport.all_reduce(whole, mean))
            exact = size <= 2 or transport.traits(CPU).sharded  # else a ring adds in another order
            limit = 0.0 if exact else 0.02
            for begin, end in spans[rank]:
                torch.testing.assert_close(flat[begin:end], whole[begin:end], rtol=limit, atol=limit)


def it_gathers_blocks(transport: Transport) -> None:
    """Some ranks bring more than others, and one may bring nothing."""
    group = Group(transport, 20, owned=False)
    target = torch.zeros(transport.size, 8)
    blocks = [[target[rank, :rank], target[rank, 4 : 4 + rank]] for rank in range(transport.size)]
    filled = [[block for block in of_rank if block.numel()] for of_rank in blocks]
    if not any(filled):
        return
    own = [block.clone().fill_(10 * transport.rank + at) for at, block in enumerate(filled[transport.rank])]
    gather = BlockGather(own, filled, tag=3)
    gather.start(group)
    gather.finish(group, "blocks")
    for rank in range(transport.size):
        assert target[rank, :rank].tolist() == [10.0 * rank] * rank
        assert target[rank, 4 : 4 + rank].tolist() == [10.0 * rank + 1] * rank


def it_tells_gathers_apart(transport: Transport) -> None:
    if transport.size == 1:
        return
    target = torch.zeros(transport.size, 4)
    blocks = [[row] for row in target]
    gather = BlockGather([torch.ones(4)], blocks, tag=transport.rank)
    with pytest.raises(CollectiveMismatch, match="must run the same parts of the model"):
        gather.finish(Group(transport, 20, owned=False), "the parameters of block 1")


def it_has_many_in_flight(transport: Transport) -> None:
    tensors = [mine(transport) * (index + 1) for index in range(20)]
    works = [transport.all_reduce(tensor) for tensor in tensors]
    settle(transport, *reversed(works))
    assert all(work.done() for work in works)
    total = all_mine(transport).sum(0)
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, total * (index + 1))


def it_may_be_waited_for_twice(transport: Transport) -> None:
    flat = mine(transport)
    work = transport.all_reduce(flat, Op.MEAN)
    settle(transport, work, work)
    assert torch.equal(flat, all_mine(transport).mean(0))


def it_leaves_gradients_of_parameters_alone(transport: Transport) -> None:
    flat = mine(transport).requires_grad_()
    settle(transport, transport.all_reduce(flat.detach()))
    assert flat.grad is None


def it_refuses_what_cannot_work(transport: Transport) -> None:
    with pytest.raises(UsageError, match="mean needs a floating point"):
        transport.all_reduce(torch.ones(2, dtype=torch.int32), Op.MEAN)
    with pytest.raises(UsageError, match="complex"):
        transport.all_reduce(torch.ones(2, dtype=torch.complex64), Op.MAX)
    with pytest.raises(UsageError, match="sparse"):
        transport.all_reduce(torch.ones(2).to_sparse(), Op.TREE)
    with pytest.raises(UsageError, match="root must be a rank"):
        transport.broadcast(torch.ones(2), transport.size)
    with pytest.raises(UsageError, match="all_gather over"):
        transport.all_gather(torch.ones(1), torch.ones(2))


def it_forgets_a_tensor_that_was_waited_for_in_vain(transport: Transport) -> None:
    """A wait that is over before the others come leaves nothing behind that only the collector would find."""
    flat = torch.ones(1 << 15)
    kept = weakref.ref(flat)
    if transport.rank:
        time.sleep(0.1)
    gc.disable()
    try:
        work = transport.all_reduce(flat)
        while not work.wait(0.01):
            pass
        settle(transport, transport.all_reduce(torch.ones(1)))
        del work, flat
        deadline = time.monotonic() + 5
        while kept() is not None and time.monotonic() < deadline:
            transport.progress()
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()


CASES: list[Callable[[Transport], None]] = [
    it_reduces_into_shards,
    it_gathers_blocks,
    it_tells_gathers_apart,
    it_knows_its_place,
    it_allocates_zeros,
    it_reduces_by_every_op,
    it_adds_in_the_tree_where_it_can,
    it_reduces_every_dtype,
    it_means_floats_and_complex,
    it_reduces_sparse_tensors,
    it_broadcasts_from_any_root,
    it_gathers_in_rank_order,
    it_sends_a_part_to_each,
    it_has_many_in_flight,
    it_may_be_waited_for_twice,
    it_leaves_gradients_of_parameters_alone,
    it_refuses_what_cannot_work,
    it_forgets_a_tensor_that_was_waited_for_in_vain,
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@every_case
def test_local(case: Callable[[Transport], None]) -> None:
    case(LocalTransport())


@every_case
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(case: Callable[[Transport], None], size: int) -> None:
    run(case, size)


def faults_of(transport: Transport) -> dict[str, str]:
    faults = {}
    for case in CASES:
        try:
            case(transport)
        except Exception:  # noqa: BLE001 - shown by the test of that case
            faults[case.__name__] = traceback.format_exc()
    return faults


def show(case: Callable[[Transport], None], found: list[dict[str, str]]) -> None:
    for rank, faults in enumerate(found):
        assert case.__name__ not in faults, f"rank {rank}:\n{faults[case.__name__]}"


def over_gloo(rank: int, size: int) -> dict[str, str]:
    assert dist.group.WORLD is not None
    transport = TorchDistTransport(dist.group.WORLD)
    assert (transport.rank, transport.size, transport.users_group) == (rank, size, dist.group.WORLD)
    assert transport.traits(CPU).tree_sum is (size <= 2)
    return faults_of(transport)


@pytest.fixture(scope="module")
def gloo(procs: Pool) -> dict[int, list[dict[str, str]]]:
    return {size: procs(size).run(over_gloo) for size in (2, 3)}


@every_case
@pytest.mark.parametrize("size", [2, 3])
def test_gloo(case: Callable[[Transport], None], size: int, gloo: dict[int, list[dict[str, str]]]) -> None:
    show(case, gloo[size])


def over_shm(rank: int, size: int) -> dict[str, str]:
    assert dist.group.WORLD is not None
    transport = choose(TorchDistTransport(dist.group.WORLD), "shm", [CPU], 20)
    assert isinstance(transport, ShmTransport)
    assert (transport.rank, transport.size) == (rank, size)
    able = Traits(progress_on_caller=True, native_mean=True, tree_sum=True, all_to_all=True, sharded=True)
    assert transport.traits(CPU) == able
    faults = faults_of(transport)
    second = transport.dup(20)
    faults |= faults_of(second)
    second.close()
    transport.close()
    return faults


@pytest.fixture(scope="module")
def shm(procs: Pool) -> dict[int, list[dict[str, str]]]:
    return {size: procs(size).run(over_shm) for size in (2, 3)}


@every_case
@pytest.mark.parametrize("size", [2, 3])
def test_shm(case: Callable[[Transport], None], size: int, shm: dict[int, list[dict[str, str]]]) -> None:
    show(case, shm[size])


def in_a_subgroup(rank: int, size: int) -> list[float]:
    group = dist.new_group([2, 1])
    if rank == 0:
        with pytest.raises(UsageError, match="member of"):
            TorchDistTransport(group)
        return []
    transport = TorchDistTransport(group)
    flat = torch.tensor([float(rank)])
    settle(transport, transport.broadcast(flat, root=1))
    gathered = torch.zeros(2)
    settle(transport, transport.all_gather(gathered, torch.tensor([float(rank)])))
    return [flat.item(), *gathered.tolist()]


def test_roots_are_numbered_within_the_group(procs: Pool) -> None:
    results = procs(3).run(in_a_subgroup)
    assert results[1] == results[2]
    ordered = results[1][1:]
    assert results[1][0] == ordered[1]


class Echo(dist._Work):
    """A Work written in Python: it takes no timeout and cannot tell whether it is complete."""

    def wait(self) -> bool:  # type: ignore[override]
        return True


class EchoGroup(dist.ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # noqa: N802 - torch's word
        return "echo"

    def name(self) -> str:
        return "echo"

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Echo:  # type: ignore[override]
        tensors[0].mul_(3)
        return Echo()


def test_a_process_group_written_in_python() -> None:
    group = EchoGroup()
    transport = TorchDistTransport(group)
    flat = torch.ones(2)
    settle(transport, transport.all_reduce(flat))
    assert flat.tolist() == [3, 3]
    assert not transport.traits(CPU).tree_sum, "what it adds, and with whom, is not known"
    with pytest.raises(UsageError, match="cannot add in the tree"):
        transport.all_reduce(flat, Op.TREE)


# --------------------------------------------------------------------------------------- public collectives, alone


def test_public_collectives_work_without_a_group() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert collectives.all_reduce(tensor, "mean") is tensor
    assert collectives.all_reduce(tensor, Op.MAX).tolist() == [1, 2]
    assert collectives.broadcast(tensor) is tensor
    assert [part.tolist() for part in collectives.all_gather(tensor)] == [[1, 2]]
    collectives.barrier(timeout=1)


def test_a_wrong_op_is_refused_with_the_right_ones() -> None:
    with pytest.raises(UsageError, match="op must be one of 'sum', 'mean', 'product', 'min', 'max', 'tree', got 'avg'"):
        collectives.all_reduce(torch.ones(1), "avg")


# ----------------------------------------------------------------------------------------------- threads in particular


def test_threads_return_results_in_rank_order() -> None:
    assert run(lambda transport: transport.rank * 10, 3) == [0, 10, 20]


def test_threads_add_in_rank_order_whoever_comes_first() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]

    def body(transport: Transport) -> float:
        time.sleep(0.01 * (2 - transport.rank))
        flat = parts[transport.rank].clone()
        settle(transport, transport.all_reduce(flat))
        return flat.item()

    assert run(body, 3) == [1.0, 1.0, 1.0]


def test_starting_does_not_wait_for_the_others() -> None:
    world = ThreadWorld(2)
    first, second = torch.ones(1), torch.ones(1)
    work = world.transport(0).all_reduce(first)
    assert not work.done()
    assert not work.wait(0)
    assert world.transport(1).all_reduce(second).done()
    assert work.wait(0)
    assert (first.item(), second.item()) == (2, 2)


def test_ranks_may_hand_in_one_tensor() -> None:
    world = ThreadWorld(2)
    shared = torch.ones(1)
    works = [world.transport(rank).all_reduce(shared) for rank in range(2)]
    assert all(work.wait(0) for work in works)
    assert shared.item() == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda transport: transport.all_reduce(torch.ones(3)),
        lambda transport: transport.all_reduce(torch.ones(2, dtype=torch.float64)),
        lambda transport: transport.all_reduce(torch.ones(2), Op.MAX),
        lambda transport: transport.broadcast(torch.ones(2)),
    ],
    ids=["shape", "dtype", "op", "kind"],
)
def test_threads_that_differ_all_learn_it(other: Callable[[Transport], object]) -> None:
    def body(transport: Transport) -> str:
        work = transport.all_reduce(torch.ones(2)) if transport.rank != 1 else other(transport)
        with pytest.raises(CollectiveMismatch) as caught:
            settle(transport, work)
        flat = torch.ones(1)
        settle(transport, transport.all_reduce(flat))
        assert flat.item() == transport.size
        return str(caught.value)

    messages = run(body, 3)
    assert len(set(messages)) == 1
    assert "rank 0 called all_reduce(sum) of float32[2]" in messages[0]


def test_the_error_of_one_thread_frees_the_others() -> None:
    seen: list[tuple[int, ...]] = []

    def body(transport: Transport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("mine")
        try:
            settle(transport, transport.all_reduce(torch.ones(1)))
        except PeerLost as error:
            seen.append(error.ranks)
            raise

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(body, 3)
    assert seen == [(1,), (1,)]


def test_an_absent_thread_is_named() -> None:
    world = ThreadWorld(3)
    world.transport(2).all_reduce(torch.ones(1))
    work = world.transport(0).all_reduce(torch.ones(1))
    with pytest.raises(PeerAbsent, match="for rank 1, which exceeds timeout") as caught:
        finish(work, what="bucket 0", watch=world.transport(0).watch, timeout_s=0.2)
    assert caught.value.ranks == (1,)
