"""The policy of an elastic job: processes are replaced one by one, as decided by its coordinator."""

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.coordinator import Coordinator
from paceline.launch.elastic_actions import (
    Action,
    Departure,
    EndMember,
    Formed,
    GiveUp,
    Lost,
    Spawn,
    Tell,
    Waiting,
)
from paceline.launch.failure import End, cause_of, follows, root_cause
from paceline.launch.job import ElasticTerms, JobFailure
from paceline.launch.policy import BETTER_CAUSE_S, AllOrNothing, Supervisor
from paceline.launch.reports import Mark
from paceline.launch.stage import Stage
from paceline.launch.tracebacks import main_stack, own_line
from paceline.launch.watchdog import Hang
from paceline.member_messages import NEVER, MemberFailed, Refused, from_member, to_line
from paceline.phase import Phase
from paceline.rank_report import FAILING

# A process that is no longer needed has nothing worth waiting for.
DISMISS_S = 3.0
# How long a process has to dump its threads' stacks.
ABORT_S = 5.0
# The signals that ask a process to end.
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FROM_OUTSIDE = (signal.SIGKILL, *ASKS)


class OneByOne:
    """Until one of its processes identifies itself as a member, the job is all or nothing, because it may run any
    script."""

    def __init__(self, supervisor: Supervisor, terms: ElasticTerms) -> None:
        self._supervisor = supervisor
        self._coordinator = Coordinator(terms)
        self._plain: AllOrNothing | None = AllOrNothing(supervisor, terms.maximum)
        self._slots: dict[int, int] = {}  # member → slot, of all members ever started
        self._members: dict[int, int] = {}  # slot → the newest member in it
        self._ended_early: list[End] = []
        self._hung: dict[int, Hang] = {}  # by member: hangs that the watchdog has ended
        self._last_lost: End | None = None
        self._failing: set[int] = set()  # members that have reported an error of their scripts, and are about to end
        self._given_up: GiveUp | None = None
        self._stop_at = 0.0
        self._stopping = False
        self._unsent: set[int] = set()  # signals that arrived when no rank could handle them

    def begin(self, now: float) -> None:
        self._do(self._coordinator.start(now), now)

    def reported(self, rank: int, kind: str, fields: Mapping[str, Any], now: float) -> bool:
        message = from_member(kind, fields)
        if message is None:  # of members FAILING says nothing new
            return kind == FAILING if self._plain is None else self._plain.reported(rank, kind, fields, now)
        self._become_elastic(now)
        if isinstance(message, MemberFailed):
            self._failing.add(self._members[rank])
        self._do(self._coordinator.said(self._members[rank], message, now), now)
        return True

    def ended(self, end: End, now: float) -> None:
        if self._plain is not None:
            self._plain.ended(end, now)
            self._ended_early.append(end)
        else:
            self._lose(end, now)

    def watched(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        if self._plain is not None:
            return self._plain.watched(marks)
        awaited = {self._slots[member] for member in self._coordinator.awaited - self._hung.keys()}
        found = {slot: mark for slot, mark in marks.items() if slot in awaited}
        if self._coordinator.stage is not Stage.FORMING:
            return found
        # Receiving state is one long wait of all ranks, with its own limit. Being stopped is still checked.
        return {slot: mark._replace(phase=_patient(mark.phase)) for slot, mark in found.items()}

    def hung(self, hang: Hang, now: float) -> None:
        if self._plain is not None:
            self._plain.hung(hang, now)
            return
        fresh = [slot for slot in hang.ranks if self._members[slot] not in self._hung]
        self._hung.update({self._members[slot]: hang for slot in fresh})
        self._supervisor.abort(fresh, now, ABORT_S)

    def tick(self, now: float) -> None:
        self._pass_on()
        if self._plain is not None:
            self._plain.tick(now)
        elif self._given_up is None:
            self._do(self._coordinator.tick(now), now)
        elif not self._stopping and (not self._failing or now >= self._stop_at):
            self._supervisor.stop(now, signal.SIGTERM)

    def notified(self, number: int) -> None:
        self._unsent.add(number)
        self._pass_on()
        if self._unsent:
            self._supervisor.listener.note(f"{signal.Signals(number).name} is deferred until the ranks can handle it")

    def stopping(self, now: float) -> None:
        self._stopping = True
        if self._plain is not None:
            self._plain.stopping(now)
        self._do(self._coordinator.stop(now), now)

    def count(self, ends: Sequence[End]) -> list[End]:
        if self._plain is not None or self._coordinator.generation is None:
            return list(ends)
        # Ranks lost before the end have been replaced, and spares were asked to leave.
        last = {self._members[end.rank]: end for end in ends}
        members = self._coordinator.generation.members
        return [replace(last[member], rank=rank) for rank, member in enumerate(members) if member in last]

    def failure(self, ends: Sequence[End]) -> JobFailure | None:
        if self._plain is not None:
            return self._plain.failure(ends)
        if self._given_up is None:
            return root_cause(self.count(ends))
        reason = self._given_up.reason
        last = root_cause([replace(self._last_lost, asked=False)]) if self._last_lost is not None else None
        if last is None:
            return JobFailure((), 1, reason)
        return replace(last, summary=reason, details=(f"the last of them: {last.summary}", *last.details))

    @property
    def is_final(self) -> bool:
        return self._given_up is not None and self._given_up.final

    # ------------------------------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Forward only to ranks of the working generation: a process that starts, or waits to join, has no handler yet
        and would be killed by it. Before any process has identified itself as a member, forward only to those that
        train: it may be any script."""
        ready: list[int] = []
        if not self._unsent:
            return
        if self._plain is not None:
            ready = [slot for slot in self._members if self._supervisor.has_begun(slot)]
        elif self._coordinator.stage is Stage.WORKING:
            ready = sorted(self._slots[member] for member in self._coordinator.awaited)
        if ready:
            for number in sorted(self._unsent):
                self._supervisor.pass_on(number, ready)
            self._unsent.clear()

    def _become_elastic(self, now: float) -> None:
        if self._plain is not None:
            self._plain = None
            for end in self._ended_early:
                self._lose(end, now)

    def _lose(self, end: End, now: float) -> None:
        member = self._members[end.rank]
        self._failing.discard(member)
        hang = self._hung.get(member)
        cause = cause_of(end) if hang is None else f"{hang.how}: {hang.reason}{_where(end)}"
        if end.exit_code == 0:
            cause = "exited with code 0 without having reached Elastic.finish()"
        outside = end.killed_by in FROM_OUTSIDE and not end.out_of_memory and hang is None
        obeyed = self._stopping and end.asked and end.killed_by in (0, *ASKS)
        # A stopped process continues for a moment when it is aborted, so use the step in which it was found.
        step = self._supervisor.step_of(end.rank) if hang is None else hang.step
        how = Departure(cause, step, outside or follows(end), asked=obeyed)
        self._do(self._coordinator.exited(member, how, now), now)
        for loss in self._coordinator.losses:
            if loss.member == member:
                said = loss.cause.startswith("raised ") and end.asked  # it was too slow to end on its own
                end = replace(end, code=1, killed_by=0) if said else end
                self._last_lost = replace(end, rank=end.rank if loss.rank == NEVER else loss.rank)

    def _do(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Spawn):
                self._slots[action.member], self._members[action.slot] = action.slot, action.member
                self._supervisor.start(action.slot, action.member)
            elif isinstance(action, Tell):
                self._supervisor.tell(self._slots[action.member], to_line(action.message))
            elif isinstance(action, EndMember):
                self._supervisor.end(self._slots[action.member], now, DISMISS_S)
            elif isinstance(action, Lost):
                self._supervisor.listener.lost(action.loss)
            elif isinstance(action, Formed):
                self._supervisor.listener.formed(action)
            elif isinstance(action, Waiting):
                self._supervisor.listener.note(action.text)
            else:
                self._give_up(action, now)

    def _give_up(self, action: GiveUp, now: float) -> None:
        self._given_up = action
        for slot in self._members:
            self._supervisor.tell(slot, to_line(Refused(action.reason)))
        self._stop_at = now + BETTER_CAUSE_S  # until then a rank that is about to end may show where it failed


def _where(end: End) -> str:
    """The line of the script at which an aborted process had stopped, if Python could report it."""
    line = own_line(main_stack(end.tail))
    return f", in {line}" if line else ""


def _patient(phase: Phase) -> Phase:
    return phase if phase in (Phase.STARTING, Phase.IDLE, Phase.DONE) else Phase.CHECKPOINT
