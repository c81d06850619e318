"""The state of a replica that should be equal on all ranks: parameters, buffers in lanes, optimizer states."""

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import Optimizer

from paceline.agree.state_digest import Piece, Rotation
from paceline.agree.state_parts import NamedState, optimizer_tensors
from paceline.collectives.group import Group
from paceline.reducer.report import StepReport
from paceline.replica.lane_buffers import LaneBuffers
from paceline.replica.twin_state import TwinState

logger = logging.getLogger("paceline")


class ComparedState:
    """Lists the tensors, and cuts them into the parts that each step compares."""

    def __init__(
        self,
        params: Sequence[tuple[str, torch.Tensor]],
        every: int,
        buffers: LaneBuffers | None = None,
        twins: TwinState | None = None,
        wide: Callable[[], list[torch.Tensor]] | None = None,
    ) -> None:
        """`every`: the number of steps in which all are compared once. `buffers`: in lanes these should be equal on
        all ranks, when a step begins. `twins`: compared in turn with this, or instead of it. `wide`: returns
        the parameters themselves, where narrow copies stand in for them."""
        self.buffers = buffers
        self.twins = twins
        self.turns = 2 if twins is not None and not twins.instead else 1
        self.on_device = bool(params) and params[0][1].is_cuda
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self.stale = True  # the tensors must be listed again
        self.rotation = Rotation([], max(1, every // self.turns))
        self.signature = 0  # a digest of their names, shapes and dtypes
        self._params, self._wide = params, wide
        self._names = {id(param): name for name, param in params}
        self._params_only = False  # ranks hold different optimizer states, as they do if these are sharded

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers = [known for known in self.optimizers if known() is not None]
        self.optimizers.append(weakref.ref(optimizer))
        self.stale = True  # its state will be there when the next step begins

    def list_anew(self) -> int:
        """List the tensors: an optimizer may have replaced one since. Returns the signature."""
        params = self._params
        if self._wide is not None:
            params = [(name, value) for (name, _), value in zip(params, self._wide(), strict=True)]
        noted = [] if self.buffers is None else self.buffers.compared()
        optimizers = () if self._params_only else self.optimizers
        state = [pair for known in optimizers for pair in optimizer_tensors(known, self._names)]
        named: NamedState = [*params, *noted, *sorted(state, key=lambda pair: pair[0])]
        self.rotation.renew(named)
        if self.twins is not None:
            self.twins.list_anew(optimizers)
        self.stale = False
        self.signature = self.rotation.signature()
        return self.signature

    def whole(self) -> list[Piece]:
        """The whole state, listed again."""
        self.list_anew()
        return self.rotation.whole()

    def by_group(self, group: Group) -> list[tuple[list[Piece], Group]]:
        """Everything that is compared, listed again, with the group that compares it; `group` is that of all ranks."""
        of_all = self.whole(), group
        if self.twins is None:
            return [of_all]
        return [*([] if self.twins.instead else [of_all]), (self.twins.rotation.whole(), self.twins.group)]

    def differs(self, rows: Sequence[StepReport]) -> bool:
        """Whether ranks have reported different digests of the same tensors. All ranks call it with the same
        reports."""
        if not all(row.signature for row in rows):
            return False
        positions = 1 if self.twins is None else self.twins.positions
        signatures = [{row.signature for row in rows[at::positions]} for at in range(positions)]
        if any(len(of_twins) > 1 for of_twins in signatures):
            self.compare_parameters_only()
            return False
        return len({(row.signature, row.state) for row in rows}) > len(set().union(*signatures))

    def compare_parameters_only(self) -> None:
        """Ranks that hold different tensors cannot compare them; parameters are the same everywhere."""
        if not self._params_only:
            logger.info("ranks hold different optimizer states, so only parameters are compared between them")
        self._params_only = self.stale = True
