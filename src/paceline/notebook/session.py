"""The ranks behind one notebook: whether there are any, and whether plain cells go to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.launch.lines import name_ranks, spans
from paceline.notebook.cell.collectives import collectives_in
from paceline.notebook.cell.selection import parse_ranks
from paceline.notebook.events import Noticed
from paceline.notebook.fleet.fleet import Fleet
from paceline.notebook.fleet.kernel import Answer, RankState
from paceline.notebook.fleet.placing import Wish
from paceline.notebook.page.failures import RanksFailed
from paceline.notebook.page.output import CellView
from paceline.notebook.page.show import IPythonShow
from paceline.notebook.panel.panel import show_panel
from paceline.notebook.values import pack, unpack

NO_RANKS = "there are no ranks yet: start them with %dist_init --num-processes 2"
# Shorter cells train nothing worth a picture, and asking takes longer than an empty cell should.
WORTH_A_PANEL_S = 0.1
VALUES_S = 60.0


class Session:
    """What the magics act on. `mode_on`: plain cells run on the ranks."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._wish: Wish | None = None
        self.mode_on = False
        self.panel_on = True
        self._make_last_panel_still: Callable[[], None] = lambda: None

    @property
    def fleet(self) -> Fleet:
        if self._fleet is None:
            raise UsageError(NO_RANKS)
        return self._fleet

    @property
    def has_ranks(self) -> bool:
        return self._fleet is not None

    def start(self, wish: Wish, show: Callable[[Any], None]) -> None:
        """Start the ranks and return when every one of them has answered."""
        if self._fleet is not None:
            raise UsageError(
                f"{self._fleet.size} ranks are running already: end them with %dist_shutdown, or start them anew with "
                f"%dist_reset"
            )
        fleet = Fleet(wish)
        try:
            fleet.start(show)
        except BaseException:
            fleet.close()
            raise
        self._fleet, self._wish, self.mode_on = fleet, wish, True

    def start_over(self, show: Callable[[Any], None]) -> None:
        """End all ranks and start as many again, with nothing in them."""
        if self._wish is None:
            raise UsageError(NO_RANKS)
        wish = self._wish
        self.end()
        self.start(wish, show)

    def end(self) -> None:
        """End all ranks, if there are any."""
        fleet, self._fleet, self.mode_on = self._fleet, None, False
        if fleet is not None:
            fleet.close()

    def choose(self, spec: str | None) -> tuple[int, ...]:
        return parse_ranks(spec or "all", self.fleet.size)

    def living(self, spec: str | None) -> tuple[int, ...]:
        """The ranks that are meant, all of which must be alive."""
        ranks = self.choose(spec)
        gone = {facts.rank: facts.died for facts in self.fleet.ranks() if facts.state is RankState.DEAD}
        dead = [rank for rank in ranks if rank in gone]
        if dead:
            left = [rank for rank in range(self.fleet.size) if rank not in gone]
            told = "; ".join(f"rank {rank} {gone[rank]}" for rank in dead)
            other = f", or run the cell on the others with %%rank [{spans(left)}]" if left else ""
            raise UsageError(f"{told}: bring it back with %dist_restart {spans(dead)}{other}")
        return ranks

    # ---- cells

    def run(self, code: str, spec: str | None, *, count: int | None, first_line: int) -> None:
        """Run code on ranks and show what they say. Raises RanksFailed if it failed on any of them."""
        fleet, ranks = self.fleet, self.living(spec)
        view = CellView(ranks, fleet.size, IPythonShow())
        if len(ranks) < fleet.size and (warning := _would_wait(code, ranks, fleet.size, first_line)):
            view.take(Noticed(warning), time.monotonic())
        self._make_last_panel_still()
        self._make_last_panel_still = lambda: None
        began_ns = time.perf_counter_ns()
        outcome = fleet.run(code, ranks, view, count=count, first_line=first_line)
        if self.panel_on and outcome.seconds > WORTH_A_PANEL_S and not outcome.deaths and not outcome.interrupted:
            self._show_panel(ranks, began_ns)
        if outcome.failures or outcome.deaths or outcome.interrupted:
            raise RanksFailed(outcome, fleet.size)

    def _show_panel(self, ranks: Sequence[int], began_ns: int) -> None:
        answers = self.fleet.request("timeline", {"since_ns": began_ns}, ranks=ranks)
        self._make_last_panel_still = show_panel({rank: answer.content for rank, answer in answers.items()})

    # ---- variables

    def pull(self, name: str, spec: str | None) -> object:
        """The value of a variable on one rank, or a dict of those on several."""
        ranks = self.living(spec)
        answers = self.fleet.request("pull", {"name": name}, ranks=ranks, within_s=VALUES_S)
        values: dict[int, object] = {}
        self._check_answers(ranks, answers)
        for rank in ranks:
            values[rank] = unpack(answers[rank].content, answers[rank].buffers)
        return values[ranks[0]] if len(ranks) == 1 else values

    def push(self, name: str, value: object, spec: str | None) -> tuple[int, ...]:
        """Set a variable on ranks; returns these."""
        ranks = self.living(spec)
        content, buffers = pack(value, name)
        answers = self.fleet.request("push", {"name": name, **content}, ranks=ranks, buffers=buffers, within_s=VALUES_S)
        self._check_answers(ranks, answers)
        return ranks

    def _check_answers(self, ranks: Sequence[int], answers: Mapping[int, Answer]) -> None:
        for rank in ranks:
            if rank in answers and answers[rank].error:
                raise UsageError(f"rank {rank}: {answers[rank].error}")
        silent = [rank for rank in ranks if rank not in answers]
        if silent:
            self.living(",".join(map(str, silent)))  # one that died meanwhile is named
            raise UsageError(
                f"{name_ranks(silent)} did not answer within {VALUES_S:.0f} s: look with %dist_status what it does"
            )


def _would_wait(code: str, ranks: Sequence[int], size: int, first_line: int) -> str | None:
    """The warning before a cell that runs a collective on some of the ranks only."""
    calls = collectives_in(code)
    if not calls:
        return None
    others = [rank for rank in range(size) if rank not in ranks]
    first = calls[0]
    return (
        f"{first.name} in line {first.line + first_line - 1} is for all ranks, but this cell runs on "
        f"{name_ranks(ranks)} alone: it waits until {name_ranks(others)} "
        f"{'runs' if len(others) == 1 else 'run'} it too. Stop the cell to end the wait"
    )
