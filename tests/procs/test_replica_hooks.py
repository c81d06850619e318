"""torch's communication hooks, with our class and with torch's: the same training."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

from paceline.strategies.cast import Wire
from tests.models import DDP, assert_close, assert_same_bits, draw, grads, mlp, packed, unpacked, values
from tests.pool import Pool
from tests.procs.test_shm import mapped

TorchDDP: Any = nn.parallel.DistributedDataParallel


def allreduce(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def fp16(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def fp16_around_allreduce(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def built_in(model: Any) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def power_sgd(model: Any) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def post_local_sgd(model: Any) -> None:
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def of_the_user(model: Any) -> None:
    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        total = bucket.buffer().mul_(2 / dist.get_world_size())
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        result: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    model.register_comm_hook(None, doubled)


def train(model: Any, rank: int) -> bytes:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        model(draw(100 * step + rank, 4, 8)).square().mean().backward()
        optimizer.step()
    return packed(values(model))


# the hook, and whether the bits are torch's: approximations see buckets that are padded otherwise
HOOKS: list[tuple[Callable[[Any], None], bool]] = [
    (allreduce, True),
    (fp16, True),
    (fp16_around_allreduce, True),
    (built_in, True),
    (of_the_user, True),
    (power_sgd, False),
    (post_local_sgd, True),
]


def with_hook(rank: int, size: int, index: int) -> tuple[bytes, bytes]:
    hook = HOOKS[index][0]
    results = []
    for wrap in (DDP, TorchDDP):
        torch.manual_seed(0)
        # Over gloo, torch's own class hangs when PowerSGD has several buckets.
        model = wrap(mlp(8, 16, 8, 4), bucket_cap_mb=25 if hook is power_sgd else 1e-4)
        hook(model)
        results.append(train(model, rank))
    return results[0], results[1]


@pytest.mark.parametrize("index", range(len(HOOKS)), ids=[hook.__name__ for hook, _ in HOOKS])
def test_torchs_hooks_train_as_in_torch(procs: Pool, index: int) -> None:
    results = procs(2).run(with_hook, index)
    for ours, torchs in results:
        if HOOKS[index][1]:
            assert_same_bits(unpacked(ours), unpacked(torchs))
        else:
            assert_close(unpacked(ours), unpacked(torchs), rtol=0.1, atol=0.05)
    if HOOKS[index][0] is not post_local_sgd:
        assert_same_bits(unpacked(results[0][0]), unpacked(results[1][0]))


def many_buckets(rank: int, size: int) -> bytes:
    torch.manual_seed(0)
    model = DDP(mlp(8, 16, 8, 4), bucket_cap_mb=1e-4, timeout=5)
    power_sgd(model)
    return train(model, rank)


def test_power_sgd_of_several_buckets_keeps_replicas_equal(procs: Pool) -> None:
    first, second = procs(2).run(many_buckets)
    assert_same_bits(unpacked(first), unpacked(second))


def refused(rank: int, size: int) -> None:
    model = DDP(mlp(3, 2))
    for wrap in (DDP, TorchDDP):
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required CUDA"):
            wrap(mlp(3, 2)).register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(TypeError, match="Communication hook must be callable"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


def test_hooks_that_cannot_work_are_refused_as_in_torch(procs: Pool) -> None:
    procs(2).run(refused)


def raising(rank: int, size: int) -> None:
    model = DDP(mlp(3, 4, 2))

    def broken(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise ZeroDivisionError("in the hook")

    model.register_comm_hook(None, broken)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        model(draw(rank, 2, 3)).sum().backward()

    def no_future(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return bucket.buffer()  # type: ignore[return-value]

    other = DDP(mlp(3, 4, 2))
    other.register_comm_hook(None, no_future)
    with pytest.raises(RuntimeError, match="must return a torch.futures.Future object, but got Tensor"):
        other(draw(rank, 2, 3)).sum().backward()


def test_the_error_of_a_hook_is_the_error_of_the_backward(procs: Pool) -> None:
    procs(2).run(raising)


def seen_by_a_hook(rank: int, size: int) -> list[tuple[Any, ...]]:
    model = DDP(mlp(3, 4, 2), bucket_cap_mb=1e-6)
    # Not the model itself: torch's hooks on parameters hide from the collector whatever they lead to, so a
    # communication hook that holds its replica keeps it, and its memory, for as long as the process lives.
    own = {id(param) for param in model.parameters()}
    seen = []

    def look(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        (gradient,), (parameter,) = bucket.gradients(), bucket.parameters()
        assert gradient.data_ptr() == bucket.buffer().data_ptr()
        assert id(parameter) in own
        assert gradient.shape == parameter.shape
        seen.append((state, bucket.index(), bucket.is_last(), tuple(parameter.shape)))
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    model.register_comm_hook("state", look)
    model(draw(rank, 2, 3)).sum().backward()
    return seen


def test_a_hook_sees_the_bucket_as_torch_shows_it(procs: Pool) -> None:
    for seen in procs(2).run(seen_by_a_hook):
        assert seen == [
            ("state", 0, False, (2,)),
            ("state", 1, False, (2, 4)),
            ("state", 2, False, (4,)),
            ("state", 3, True, (4, 3)),
        ]


def memory_left(rank: int, size: int) -> list[int]:
    gc.collect()
    before = Counter(mapped())
    for body in (many_buckets, refused, raising, seen_by_a_hook):
        body(rank, size)
    gc.collect()
    return list((Counter(mapped()) - before).elements())


def test_replicas_with_hooks_leave_no_memory_behind(procs: Pool) -> None:
    assert procs(2).run(memory_left) == [[], []]


def weighted(rank: int, size: int) -> tuple[bytes, bytes]:
    results = []
    for hooked in (True, False):
        model = DDP(mlp(3, 4, 2))
        if hooked:
            allreduce(model)
        with model.weight(1 + rank):
            model(draw(rank, 1 + rank, 3)).square().sum(1).mean().backward()
        results.append(packed(grads(model)))
    return results[0], results[1]


def test_weights_go_through_a_hook(procs: Pool) -> None:
    for hooked, plain in procs(2).run(weighted):
        assert_close(unpacked(hooked), unpacked(plain))


def narrow(rank: int, size: int) -> tuple[bytes, bytes]:
    results = []
    for reduction in (Wire(torch.bfloat16), None):
        model = DDP(mlp(8, 16, 8, 4), reduction=reduction)
        results.append(train(model, rank))
    return results[0], results[1]


def test_bfloat16_on_the_wire_is_close_and_equal_among_ranks(procs: Pool) -> None:
    results = procs(2).run(narrow)
    for wire, mean in results:
        assert_close(unpacked(wire), unpacked(mean), rtol=0.02, atol=0.01)
        assert_same_bits(unpacked(wire), unpacked(results[0][0]))
