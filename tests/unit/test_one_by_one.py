"""What the policy of an elastic job has done about processes, by what their members say."""

import json
from collections.abc import Collection

from paceline.launch.elastic_actions import Loss
from paceline.launch.failure import End
from paceline.launch.job import ElasticTerms, Listener
from paceline.launch.one_by_one import OneByOne
from paceline.launch.watchdog import FROZE, Hang
from paceline.member_messages import NEVER, FromMember, MemberFormed, MemberReady, to_line

TERMS = ElasticTerms(minimum=1, maximum=2)
USR1, ABORT = 10, 6


class Notes(Listener):
    """What was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.causes: list[str] = []
        self.steps: list[int] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def lost(self, loss: Loss) -> None:
        self.causes.append(loss.cause)
        self.steps.append(loss.step)


class Slots:
    """A supervisor without processes."""

    def __init__(self) -> None:
        self.listener: Listener = Notes()
        self.begun: set[int] = set()
        self.passed_on: list[tuple[int, list[int]]] = []
        self.job = OneByOne(self, TERMS)
        self.job.begin(0.0)

    def say(self, slot: int, message: FromMember) -> None:
        fields = json.loads(to_line(message))
        assert self.job.reported(slot, fields.pop("kind"), fields, 1.0)

    def start(self, rank: int, member: int | None = None) -> None:
        self.begun.discard(rank)

    def tell(self, rank: int, line: bytes) -> None: ...

    def end(self, rank: int, now: float, within_s: float) -> None: ...

    def abort(self, ranks: Collection[int], now: float, within_s: float) -> None: ...

    def stop(self, now: float, number: int) -> None:
        self.job.stopping(now)

    def step_of(self, rank: int) -> int:
        return 7

    def has_begun(self, rank: int) -> bool:
        return rank in self.begun

    def pass_on(self, number: int, ranks: Collection[int] | None = None) -> None:
        self.passed_on.append((number, sorted(ranks or ())))


def test_a_signal_is_kept_until_a_generation_works() -> None:
    slots = Slots()
    slots.job.notified(USR1)
    for slot in (0, 1):
        slots.say(slot, MemberReady(NEVER, 0, whole=False))
    slots.job.tick(1.0)
    slots.say(0, MemberFormed(0))
    slots.job.tick(2.0)
    assert slots.passed_on == []
    slots.say(1, MemberFormed(0))
    slots.job.tick(3.0)
    assert slots.passed_on == [(USR1, [0, 1])]
    slots.job.tick(4.0)
    assert len(slots.passed_on) == 1
    assert isinstance(slots.listener, Notes)
    assert slots.listener.texts == ["SIGUSR1 is deferred until the ranks can handle it"]


def test_one_that_waits_to_join_does_not_get_it() -> None:
    slots = Slots()
    for slot in (0, 1):
        slots.say(slot, MemberReady(NEVER, 0, whole=False))
    for slot in (0, 1):
        slots.say(slot, MemberFormed(0))
    slots.job.ended(End(1, 1.0, killed_by=9), 1.0)
    slots.say(0, MemberReady(0, 7, whole=True))
    slots.say(0, MemberFormed(1))
    slots.say(1, MemberReady(NEVER, 0, whole=False))
    slots.job.notified(USR1)
    assert slots.passed_on == [(USR1, [0])]


def test_of_a_script_that_is_no_member_those_get_it_that_train() -> None:
    slots = Slots()
    slots.job.notified(USR1)
    assert slots.passed_on == []
    slots.begun = {1}
    slots.job.tick(1.0)
    assert slots.passed_on == [(USR1, [1])]


# Another thread than the main one has received the signal.
STACK = (
    "Fatal Python error: Aborted",
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "a.py", line 3',
)
REST = ('  File "/usr/lib/python3.11/threading.py", line 320 in wait', '  File "train.py", line 12 in loss')


def test_a_rank_that_hangs_is_lost_with_the_line_in_which_it_rests() -> None:
    slots = Slots()
    for slot in (0, 1):
        slots.say(slot, MemberReady(NEVER, 0, whole=False))
    slots.job.hung(Hang((1,), FROZE, "no progress for 20 s in data (limit 20 s), using 0% of a CPU core", 6), 1.0)
    slots.job.ended(
        End(1, 2.0, killed_by=ABORT, tail=(*STACK, "", "Thread 0x00008f (most recent call first):", *REST)), 2.0
    )
    assert isinstance(slots.listener, Notes)
    (cause,) = slots.listener.causes
    assert slots.listener.steps == [6], "and not the one to which it came while it was aborted"
    assert cause.endswith("using 0% of a CPU core, in train.py:12 in loss")


def test_a_script_that_has_raised_is_named_while_its_process_still_ends() -> None:
    slots = Slots()
    assert isinstance(slots.listener, Notes)
    for slot, ended_at in ((0, None), (1, 5.2), (2, None)):
        assert slots.job.reported(slot, "failing", {"error": "KeyError: 'a'"}, 5.0)
        if ended_at is not None:
            slots.job.ended(End(slot, ended_at, 1), ended_at)
    slots.job.tick(5.4)
    assert slots.listener.texts == []
    slots.job.tick(5.6)
    slots.job.tick(5.7)
    assert len([text for text in slots.listener.texts if "about to end" in text]) == 1, "of rank 2 it says nothing new"
    assert slots.listener.texts[0] == "rank 0 raised KeyError: 'a', and is about to end"
    slots.say(0, MemberReady(NEVER, 0, whole=False))
    assert slots.job.reported(0, "failing", {"error": "KeyError: 'a'"}, 9.0), "of a member: it has said so itself"
