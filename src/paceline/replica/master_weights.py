"""Master weights around an update: a few kernels, whatever the number of parameters, and the host never waits.

    before   masters take changes of the user ─ gradients are widened
    after    blocks of parameters take the masters' new values

Note: why parameters are compared with their masters in every update
--------------------------------------------------------------------
A version counter does not tell whether a parameter was changed since the last update: changes made through
`param.data`, as by `param.data.clamp_()`, are not counted. So the values are compared, and the device decides which
values a master takes from its parameter.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from paceline.reducer.shard import Shard

# Elements compared at a time. This bounds the temporaries, 9 bytes per element for bfloat16. On a host they should
# stay in the cache.
AT_A_TIME, AT_A_TIME_ON_HOST = 1 << 22, 1 << 18

Pair = tuple[torch.Tensor, torch.Tensor]  # equal stretches of a block and of its master


def take_changes(shards: Sequence[Shard]) -> None:
    """If a parameter is not its rounded master, it was changed, for instance by clamping it or by loading other
    weights: the master takes that value."""
    for pairs in _windows(shards):
        if len(pairs) == 1:
            _take(*pairs[0])
            continue
        sizes = [block.numel() for block, _ in pairs]
        block, master = (like.new_empty(sum(sizes)) for like in pairs[0])
        blocks, masters = list(block.split(sizes)), list(master.split(sizes))
        torch._foreach_copy_(blocks, [one for one, _ in pairs])
        torch._foreach_copy_(masters, [one for _, one in pairs])
        _take(block, master)
        torch._foreach_copy_([one for _, one in pairs], masters)


def _take(block: torch.Tensor, master: torch.Tensor) -> None:
    torch.where(block.ne(master.to(block.dtype)), block, master, out=master)


def widened(grads: Sequence[torch.Tensor | None], shards: Sequence[Shard]) -> list[torch.Tensor | None]:
    """Gradients in the types of their masters."""
    found = [
        None if grad is None else torch.empty_like(grad, dtype=shard.value.dtype)
        for grad, shard in zip(grads, shards, strict=True)
    ]
    _copy((wide, grad) for wide, grad in zip(found, grads, strict=True) if wide is not None and grad is not None)
    return found


def store_values(shards: Iterable[Shard]) -> None:
    """Store an optimizer's results in the blocks: those of masters, or of values whose memory was replaced, as by
    `param.data = ...`."""
    moved: list[Shard] = []
    pairs: list[Pair] = []
    for shard in shards:
        block, value = shard.block, shard.value.detach()
        if block.data_ptr() != value.data_ptr():
            pairs.append((block, value))
            if not shard.has_master:
                moved.append(shard)
    _copy(pairs)
    for shard in moved:
        shard.value.data = shard.block


def _copy(pairs: Iterable[Pair]) -> None:
    """Copy the second of each pair into the first, with one call for each combination of types."""
    by_kind: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for to, given in pairs:
        found = by_kind.setdefault((to.device, to.dtype, given.dtype), ([], []))
        found[0].append(to)
        found[1].append(given)
    for targets, sources in by_kind.values():
        torch._foreach_copy_(targets, sources)


def _windows(shards: Iterable[Shard]) -> Iterator[list[Pair]]:
    """The blocks and their masters in groups of one kind, each with at most as many elements as are compared at a
    time; larger blocks are cut."""
    groups: dict[object, list[Pair]] = {}
    sizes: dict[object, int] = {}
    for shard in shards:
        block, master = shard.block, shard.value.detach()
        most = AT_A_TIME if block.is_cuda else AT_A_TIME_ON_HOST
        kind = block.device, block.dtype, master.dtype
        for pair in zip(block.split(most), master.split(most), strict=True):
            size = sizes.get(kind, 0) + pair[0].numel()
            if size > most and (full := groups.pop(kind, [])):
                yield full
                size = pair[0].numel()
            if pair[0].numel():
                groups.setdefault(kind, []).append(pair)
            sizes[kind] = size
    yield from groups.values()
