"""The ranks of one notebook: whether they exist, and whether plain cells run on them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import display

from paceline.errors import UsageError
from paceline.launch.lines import name_ranks
from paceline.notebook.output.cell_output import CellOutput
from paceline.notebook.output.display import IPythonDisplay
from paceline.notebook.output.failures import RanksFailed
from paceline.notebook.output.panel import panel
from paceline.notebook.rank_kernels.connection import RankReply
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
from paceline.notebook.rank_selection import parse_ranks
from paceline.notebook.values import pack, unpack

NO_RANKS = "there are no ranks yet: start them with %dist_init --num-processes 2"
# Shorter cells do no training worth a picture, and asking the ranks takes longer than an empty cell should.
WORTH_A_PANEL_S = 0.1
VALUES_S = 60.0


class NotebookSession:
    """What the magics act on. `mode_on`: plain cells run on the ranks."""

    def __init__(self) -> None:
        self._kernels: RankKernels | None = None
        self._options: StartOptions | None = None
        self.mode_on = False
        self.panel_on = True

    @property
    def kernels(self) -> RankKernels:
        if self._kernels is None:
            raise UsageError(NO_RANKS)
        return self._kernels

    @property
    def has_ranks(self) -> bool:
        return self._kernels is not None

    def start(self, options: StartOptions, show: Callable[[Any], None]) -> None:
        """Start the ranks and return when every one of them has replied."""
        if self._kernels is not None:
            raise UsageError(
                f"{self._kernels.size} ranks are already running: end them with %dist_shutdown, or replace them with "
                f"%dist_reset"
            )
        self._kernels = RankKernels(options, show)
        self._options, self.mode_on = options, True

    def start_over(self, show: Callable[[Any], None]) -> None:
        """End all ranks and start the same number of new ones."""
        if self._options is None:
            raise UsageError(NO_RANKS)
        self.end()
        self.start(self._options, show)

    def end(self) -> None:
        """End all ranks, if there are any."""
        kernels, self._kernels, self.mode_on = self._kernels, None, False
        if kernels is not None:
            kernels.close()

    def choose(self, spec: str | None) -> tuple[int, ...]:
        return parse_ranks(spec or "all", self.kernels.size)

    def living(self, spec: str | None) -> tuple[int, ...]:
        """The selected ranks. Raises UsageError if one of them is dead."""
        ranks = self.choose(spec)
        self.kernels.check_alive(ranks)
        return ranks

    # ---- cells

    def run(self, code: str, spec: str, *, count: int | None) -> None:
        """Run code on ranks and show their output. Raises RanksFailed if it failed on any of them."""
        kernels, ranks = self.kernels, self.choose(spec)
        output = CellOutput(ranks, kernels.size, IPythonDisplay())
        began_ns = time.perf_counter_ns()
        outcome = kernels.run(code, ranks, output, count=count)
        if self.panel_on and outcome.seconds > WORTH_A_PANEL_S and not outcome.deaths and not outcome.interrupted:
            replies = kernels.request("timeline", {"since_ns": began_ns}, ranks=ranks)
            if bundle := panel({rank: reply.content for rank, reply in replies.items()}):
                display(bundle, raw=True)
        if outcome.failures or outcome.deaths or outcome.interrupted:
            raise RanksFailed(outcome, kernels.size)

    # ---- variables

    def pull(self, name: str, spec: str | None) -> object:
        """The value of a variable on one rank, or a dict of those on several."""
        ranks = self.living(spec)
        replies = self.kernels.request("pull", {"name": name}, ranks=ranks, within_s=VALUES_S)
        self._check_replies(ranks, replies)
        values = {rank: unpack(replies[rank].content, replies[rank].buffers) for rank in ranks}
        return values[ranks[0]] if len(ranks) == 1 else values

    def push(self, name: str, value: object, spec: str | None) -> tuple[int, ...]:
        """Set a variable on ranks; returns these."""
        ranks = self.living(spec)
        content, buffers = pack(value, name)
        request = {"name": name, **content}
        replies = self.kernels.request("push", request, ranks=ranks, buffers=buffers, within_s=VALUES_S)
        self._check_replies(ranks, replies)
        return ranks

    def _check_replies(self, ranks: Sequence[int], replies: Mapping[int, RankReply]) -> None:
        for rank in ranks:
            if rank in replies and replies[rank].error:
                raise UsageError(f"rank {rank}: {replies[rank].error}")
        if silent := [rank for rank in ranks if rank not in replies]:
            self.kernels.check_alive(silent)  # raises for one that died meanwhile
            raise UsageError(
                f"{name_ranks(silent)} did not reply within {VALUES_S:.0f} s: %dist_status shows what it is doing"
            )
