"""The blocks of a model's parameters that one rank owns and updates under a placement.

It receives those of the other ranks after every update: see `update_gathers.py`, and `units.py` under "zero3".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer

from paceline.collectives.block_gather import BlockGather
from paceline.collectives.group import Group
from paceline.collectives.protocols import Op
from paceline.collectives.subgroup import ranks_of
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import UsageError
from paceline.layout import MIB, BucketCaps, ParamMeta, plan_layout
from paceline.placement import Ownership, Span, cut_parameters
from paceline.reducer.shard import Shard, flat_as, flat_of
from paceline.replica.lane_norm import norm_in_lanes
from paceline.replica.units import Units
from paceline.replica.update_gather import UpdateGather
from paceline.replica.update_gathers import UpdateGathers
from paceline.trace import Trace

# Of parameters gathered at a time. With shared memory, this bounds the data that waits for the others to read it.
PIECE_BYTES, PIECE_BYTES_ON_HOST = 16 * MIB, 4 * MIB


class OwnedBlocks:
    """This rank's blocks of the parameters of one replica, and how it receives those of the others."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        metas: Sequence[ParamMeta],
        group: Group,
        *,
        cut: bool,
        trace: Trace | None = None,
    ) -> None:
        """`cut`: every rank owns a block of each parameter. Otherwise every rank owns all of them. `trace`: where
        gathers of parameters leave stamps."""
        for meta in metas if cut else ():
            _check_can_be_cut(meta)
        self.cut = cut
        self.metas = metas
        self.ownership: Ownership = cut_parameters(metas, group.size if cut else 1)
        self.position = group.rank if cut else 0  # of this rank among those that hold all shards between them
        self.lacking = False  # ranks were lost before their updates had reached the parameters
        self.shards = [
            Shard(meta.name, param, self.ownership.block(index, group.rank if cut else 0))
            for index, (meta, param) in enumerate(zip(metas, params, strict=True))
        ]
        self._group = group
        self._trace = trace
        self._by_id = {id(shard.param): shard for shard in self.shards}
        self._by_id.update((id(shard.value), shard) for shard in self.shards)
        on_host = all(meta.device.type == "cpu" for meta in metas)
        caps = BucketCaps((PIECE_BYTES_ON_HOST if on_host else PIECE_BYTES,))
        layout = plan_layout(metas, range(len(metas)), caps)
        together = [[slot.param for slot in bucket.slots if slot.numel] for bucket in layout.buckets]
        self._together = [some for some in together if some]
        self.gathers: UpdateGathers | None = None  # if all ranks hold whole parameters
        self._units: Units | None = None
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # optimizers that update blocks
        self._addresses: list[int] = []  # of the parameters, when the gathers were created

    @property
    def units(self) -> Units | None:
        """The units that gather the parameters, if these are sharded."""
        return self._units

    @units.setter
    def units(self, units: Units) -> None:
        self._units = units
        self._by_id.update((id(shard.front), shard) for shard in self.shards)

    # ---- in an elastic job

    def outlive(self) -> None:
        """Training survives the loss of ranks: see `UpdateGathers.outlive`."""
        if self._units is not None:
            self._units.outlive()
        if self.gathers is not None:
            self.gathers.outlive()

    @property
    def held(self) -> tuple[int, int]:
        """The number of shards of the parameters, and the one that this rank owns."""
        return self.ownership.ranks, self.position

    @property
    def due(self) -> tuple[int, int]:
        """The same, as it should be in this rank's current group."""
        return self._group.size, self._group.rank

    def due_spans(self) -> dict[int, Span]:
        """The elements of each parameter that this rank will own, by the id of its shard."""
        ranks, position = self.due
        ours = cut_parameters(self.metas, ranks)
        return {id(shard): ours.block(index, position) for index, shard in enumerate(self.shards)}

    def sources_of_due(self, ranks: int) -> set[int]:
        """The shards of a cut over `ranks` that overlap with what this rank will own."""
        theirs, ours = cut_parameters(self.metas, ranks), cut_parameters(self.metas, self._group.size)
        spans = [(index, *ours.block(index, self._group.rank)) for index in range(len(self.metas))]
        return {
            rank
            for rank in range(ranks)
            for index, begin, end in spans
            for low, high in [theirs.block(index, rank)]
            if max(low, begin) < min(high, end)
        }

    def discard(self) -> None:
        """Drop gradients and communication in progress: the group has ended."""
        for shard in self.shards if self.cut else ():
            shard.drop()
        if self._units is not None:
            self._units.discard()
        if self.gathers is not None:
            self.lacking |= self.gathers.move(self._group)

    def move(self, group: Group) -> None:
        """Continue with other ranks. This rank's blocks stay the same until `cut_anew`."""
        self._group = group
        if self.gathers is not None:
            self.lacking |= self.gathers.move(group)
        if self._units is not None:
            own = group.transport.dup(group.timeout_s)
            self._units.move(own.connect() if isinstance(own, TorchDistTransport) else own, ranks_of(group))

    def cut_anew(self) -> None:
        """Own the blocks of this rank's position in its group. If they are new, blocks of sharded parameters, masters
        and optimizer states must be filled by others."""
        if self.due != self.held:
            ranks, self.position = self.due
            self.ownership = cut_parameters(self.metas, ranks)
            for index, shard in enumerate(self.shards):
                shard.cut_at(self.ownership.block(index, self.position))
        self._addresses = []  # gathers must use the new ranks
        if self._units is not None:
            self._units.cut_anew(self.ownership.cuts)

    def complete(self) -> None:
        """Gather the blocks of all ranks, if parameters are whole. All ranks call it."""
        if self.gathers is not None:
            self.follow_parameters()
            self.gathers.gather_now()
        self.lacking = False

    def find(self, param: torch.Tensor) -> Shard | None:
        """The shard of a parameter, looked up by the parameter or by the tensor that an optimizer updates instead."""
        return self._by_id.get(id(param))

    def keep_masters(self, dtype: torch.dtype, shards: Iterable[Shard]) -> None:
        """Keep these blocks in a wider type too, which an optimizer updates from now on."""
        narrow = [shard for shard in shards if dtype not in (shard.param.dtype, shard.value.dtype)]
        if narrow and not hasattr(narrow[0].value, "grad_dtype"):
            raise UsageError(
                f"master= needs a torch whose parameters may have gradients of another type (Tensor.grad_dtype), got "
                f"torch {torch.__version__}; use a newer one, or keep the model in {dtype}"
            )
        updated = {id(param) for one in self.optimizers for group in one.param_groups for param in group["params"]}
        if taken := [shard.name for shard in narrow if id(shard.value) in updated]:
            raise UsageError(
                f"master={dtype} was asked for {taken[0]}, which another optimizer updates without a master and "
                f"would no longer update; pass the same master= to both, or release the other one first"
            )
        for shard in narrow:
            del self._by_id[id(shard.value)]  # another tensor may reuse that id
            shard.keep_master(dtype)
            self._by_id[id(shard.value)] = shard

    def follow_parameters(self) -> None:
        """Point the values that optimizers update at the memory that parameters have now: it may have been replaced, as
        by `param.data = ...`."""
        if self._units is not None:
            self._units.keep_changes()
            return
        if self.gathers is not None:
            self.gathers.wait()
        addresses = [shard.param.data_ptr() for shard in self.shards]
        if addresses == self._addresses:
            return
        for shard in self.shards:
            if not shard.has_master:
                shard.value.data = shard.block
        if self.gathers is not None:
            self.gathers.gather([self._update_gather(some) for some in self._together])
        self._addresses = addresses

    def _update_gather(self, indices: Sequence[int]) -> UpdateGather:
        return UpdateGather(
            [self.shards[index] for index in indices],
            lambda tensors, of: self._gather_of({indices[at]: one for at, one in tensors.items()}, self._trace, of),
        )

    def _gather_of(self, tensors: Mapping[int, torch.Tensor], trace: Trace | None = None, of: str = "") -> BlockGather:
        """A gather of tensors that are cut like the parameters of these indices, in their own memory."""
        flats = {index: flat_of(tensor) for index, tensor in tensors.items()}
        blocks = [
            [flat[begin:end] for index, flat in flats.items() for begin, end in [self.ownership.block(index, rank)]]
            for rank in range(self.ownership.ranks)
        ]
        filled = [[block for block in of_rank if block.numel()] for of_rank in blocks]
        return BlockGather(filled[self.position], filled, trace=trace, of=of)

    def follow_update(self) -> None:
        """After an update of this rank's blocks: gather those of all ranks. All ranks call it."""
        if self._units is not None:
            self._units.follow_update()
        elif self.gathers is not None:
            self.gathers.follow_update()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, *, in_lanes: bool
    ) -> torch.Tensor:
        """Clip the gradients by their norm over all shards of all ranks. Returns that norm. All ranks call it."""
        if not norm_type > 0:
            raise UsageError(f"a sharded placement clips by norms of an order above 0, got norm_type={norm_type}")
        for shard in self.shards:
            shard.follow_user()
            shard.lift_guard()
        try:
            return self._clip(max_norm, norm_type, error_if_nonfinite, in_lanes=in_lanes)
        finally:
            for shard in self.shards:
                shard.guard()

    def _clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, *, in_lanes: bool) -> torch.Tensor:
        grads = {at: shard.value.grad for at, shard in enumerate(self.shards) if shard.value.numel()}
        own = {at: grad for at, grad in grads.items() if grad is not None}
        device = self.shards[0].param.device
        if in_lanes and norm_type != math.inf:
            total = norm_in_lanes(own, self.ownership, norm_type, self._group, device)
        else:
            total = self._norm(get_total_norm(list(own.values()), norm_type).to(device), norm_type)
        return _clip([self.shards[at].value for at in own], max_norm, norm_type, total, error_if_nonfinite)

    def _norm(self, own: torch.Tensor, norm_type: float) -> torch.Tensor:
        highest = norm_type == math.inf
        total = own.double() if highest else own.double() ** norm_type
        work = self._group.transport.all_reduce(total, Op.MAX if highest else Op.SUM)
        self._group.wait(work, "the norm of all gradients")
        return (total if highest else total ** (1 / norm_type)).to(torch.float32)

    def whole(self, shard: Shard, own: torch.Tensor) -> torch.Tensor:
        """A tensor like the parameter of `shard`, of which every rank has its block. All ranks call it."""
        whole = torch.empty_like(shard.form, dtype=own.dtype, device=own.device)
        if not self.cut or not whole.numel():
            flat_of(whole).copy_(own)
            return whole
        index = next(at for at, other in enumerate(self.shards) if other is shard)
        flat_of(whole)[slice(*shard.span)] = own
        self._gather_of({index: whole}).finish(self._group, f"the state of {shard.name}")
        return whole

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero this rank's sharded gradients. torch itself zeroes whole ones."""
        for shard in self.shards if self.cut else ():
            shard.drop() if set_to_none else shard.zero()


def clip_whole_in_lanes(
    params: Sequence[nn.Parameter],
    metas: Sequence[ParamMeta],
    group: Group,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """As `OwnedBlocks.clip_grad_norm_` does in lanes, where every rank has all gradients."""
    grads = {at: flat_as(param, param.grad) for at, param in enumerate(params) if param.grad is not None}
    if norm_type == math.inf:
        total = get_total_norm(list(grads.values()), norm_type)
    else:
        total = norm_in_lanes(grads, cut_parameters(metas, 1), norm_type, group, params[0].device)
    return _clip(params, max_norm, norm_type, total, error_if_nonfinite)


def _clip(
    params: Sequence[torch.Tensor], max_norm: float, norm_type: float, total: torch.Tensor, error_if_nonfinite: bool
) -> torch.Tensor:
    """Clip gradients by a norm that is known, as torch does. Returns it."""
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            f"clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            f"`error_if_nonfinite=False`"
        )
    clip_grads_with_norm_(params, max_norm, total)
    return total


def _check_can_be_cut(meta: ParamMeta) -> None:
    if meta.sparse:
        raise UsageError(
            f"a sharded placement needs dense gradients, and {meta.name} has sparse ones; set sparse=False, or use "
            f'placement="ddp"'
        )
    if not meta.dense:
        raise UsageError(
            f"a sharded placement shards a parameter's memory, but {meta.name} is not stored densely (shape "
            f'{list(meta.shape)}, strides {list(meta.stride)}); make it contiguous, or use placement="ddp"'
        )
