"""What the loop calls on a replica: when gradients are reduced, how much a micro counts, and lanes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.reducer import lane_step
from paceline.reducer.report import Vote
from paceline.reducer.taking_part import reduce_now, skip
from paceline.reducer.weighting import hold_weighted
from paceline.replica import arguments, rejoin
from paceline.replica.lanes import LaneLoop, Micro, step_of
from paceline.replica.torch_surface import TorchSurface


class Stepping(TorchSurface):
    """The part of the replica that decides what a step is made of."""

    if TYPE_CHECKING:
        _lane_loop: LaneLoop

    def sync_gradients(self) -> None:
        """Reduce what has been accumulated, without another forward.

        Needed after backward with `overlap=False`, and after backwards that ran inside `no_sync()`. Does nothing while
        synchronisation is switched off, nor with `overlap=True` when everything is reduced already.
        """
        core = self._core
        if core.lanes is not None:
            lane_step.sync(core)
            return
        reduced = self._settings.overlap and core.ledger.reductions and not core.ledger.window_open
        if core.sync_on and (not reduced or core.others_wait() or core.set.has_foreign()):
            reduce_now(core, by_hand=True)

    # ---- when to reduce

    @property
    def do_sync(self) -> bool:
        """Whether the next backward reduces gradients."""
        return self.require_backward_grad_sync

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for `do_sync`."""
        return self._core.sync_on if not self._use_python_reducer else self._python_reducer_syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._use_python_reducer:
            self._python_reducer_syncs = value
        else:
            self._core.sync_on = value

    def enable_grad_sync(self) -> None:
        """Reduce gradients in the backwards that follow."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """Only accumulate gradients in the backwards that follow."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them. What counts is where backward runs, not forward.

        Example:
            >>> with model.no_sync():
            ...     model(a).sum().backward()   # accumulates
            >>> model(b).sum().backward()       # reduces both
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        if not self._use_python_reducer:
            self._core.ledger.local_steps += 1
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            if not self._use_python_reducer:
                self._core.ledger.local_steps -= 1

    @contextmanager
    def weight(self, weight: float | torch.Tensor) -> Iterator[None]:
        """Weigh the backwards inside: gradients become the exact mean over all tokens of all ranks and micros.

        Give the number of tokens (or samples) that the loss is a mean over. All micros of a step, on all ranks, must
        run inside `weight(...)`.

        Example:
            >>> with model.weight(n_tokens):
            ...     loss.backward()
        """
        core = self._core
        tokens = arguments.weight_of(weight, self._managed.params)
        weighting = core.weighting
        if weighting.current is None and (stale := hold_weighted(core)) is not None:
            raise UsageError(
                f"weight() needs a step that starts from empty gradients, but {stale} has one that no weighted micro "
                f"has left; call optimizer.zero_grad() before the first micro, and put every micro inside weight()"
            )
        before, weighting.current = weighting.current, tokens
        try:
            yield
        finally:
            weighting.current = before
            if before is None:
                core.set.show_all()  # so that zero_grad() can throw them away

    def lanes(self, micros: Iterable[Micro], step: int) -> Iterator[Micro]:
        """Run this rank's lanes of one step, for the same bits in every world.

        A global batch is `lanes` micros. A rank runs some of them, one after another, each in its own turn of the loop:
        with random numbers that follow from (seed, step, lane), from the same buffers, and with gradients that are
        added in the order of one tree over lane numbers. So 1, 2, 3 or `lanes` ranks give equal bits, as long as the
        kernels do: the same number of threads on every rank, deterministic algorithms.

        `step` is the number of the step, from 0 or from where a resumed run goes on: random numbers follow from it. A
        rank that leaves the loop with an error tells the others when it calls `lanes()` again, or ends; they wait until
        then. A step whose backward has raised cannot be mended inside the loop: catch the error outside of it.

        Example:
            >>> model = paceline.DistributedDataParallel(net, lanes=8, seed=7)
            >>> for step, micros in enumerate(paceline.Loader(data, batch_size=4, lanes=8)):
            ...     for x, y in model.lanes(micros, step):
            ...         loss_fn(model(x), y).backward()
            ...     optimizer.step(); optimizer.zero_grad()
        """
        if self._lane_count is None:
            raise UsageError("this replica has no lanes; wrap with DistributedDataParallel(module, lanes=8)")
        if self._group_is_gone:
            rejoin.rejoin(self)
        return self._lane_loop.run(micros, step_of(step))

    @property
    def own_lanes(self) -> range:
        """The lanes that this rank runs."""
        return range(0) if self._core.lanes is None else self._core.lanes.mine

    def skip_batch(self) -> None:
        """Instead of forward and backward: this rank's batch (or the lane that runs) is to count for nothing.

        The others need not wait for it: gradients become the mean over those that had a batch. If none had one, they
        stay empty.
        """
        core = self._core
        if core.lanes is not None:
            lane_step.skip(core)
            return
        if not core.ledger.forwards_pending and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()  # as the forward of the others does
        if core.sync_on:  # else the others only accumulate, too
            skip(core)
        self.require_forward_param_sync = core.sync_on

    def vote(self, *, stop: bool = False, save: bool = False, exhausted: bool = False) -> None:
        """Tell all ranks something with the next reduction; what they told is in `votes` after it, on every rank."""
        given = ((stop, Vote.STOP), (save, Vote.SAVE), (exhausted, Vote.EXHAUSTED))
        for said, vote in given:
            self._core.votes |= vote if said else Vote.NOTHING

    @property
    def votes(self) -> dict[str, list[int]]:
        """Which ranks voted "stop", "save" or "exhausted" in the last reduction."""
        heard = self._core.heard
        return {str(v.name).lower(): [r for r, vote in enumerate(heard) if v in vote] for v in Vote if v.value}
