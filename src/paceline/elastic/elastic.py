"""`Elastic`: wraps the steps of a script, so that training survives the loss of ranks."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint import Checkpointer, NoCheckpoint
from paceline.collectives.checked import named_barrier
from paceline.collectives.gather import gather_ints
from paceline.collectives.group import Group
from paceline.collectives.wait import EventWork
from paceline.elastic.before_attempt import BeforeAttempt
from paceline.elastic.declared import Declared
from paceline.elastic.deferred_signals import DeferredSignals
from paceline.elastic.generations import Generations, in_one_line
from paceline.elastic.joining import Joining
from paceline.elastic.losses import Answer, answer, describe_loss
from paceline.elastic.step_votes import PreemptionVotes, ask_all, was_asked
from paceline.elastic.transaction import StepMark, Transaction
from paceline.elastic.undeclared import UndeclaredReplicas, UndeclaredUses, UpdateWatch
from paceline.errors import PeerLost, WorldNotFormed
from paceline.member import Member
from paceline.member_messages import MemberFinished
from paceline.progress import Phase, own_progress
from paceline.reducer.report import Vote
from paceline.replica.membership import discard

logger = logging.getLogger("paceline")


class Elastic:
    """Lets training survive the loss of ranks.

        run = paceline.Elastic(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        batches = loader.endless()
        while run.step < steps:
            with run.attempt():
                for microbatch in model.lanes(next(batches), run.step):
                    loss(model, microbatch).backward()
                with run.commit():
                    optimizer.step()
                    scheduler.step()
                optimizer.zero_grad()
        run.finish()

    Started by `paceline run --ranks 2:8 train.py`, the number of ranks may change while the job runs. When a rank dies,
    the others keep their state in memory, drop the current step, form a new group without it and redo that step. A new
    rank receives the whole state from an existing one. With `lanes=` the result is bit-identical to a run without any
    loss. Under other launchers the same loop runs in a fixed world.

    Declare everything that changes from step to step, under any name: models, optimizers, schedulers, loaders,
    samplers, GradScaler, averages of weights, and any object with `state_dict()` and `load_state_dict()`. A
    `Checkpointer`, given as `checkpoints=`, is loaded at the start if it has a snapshot, and again if no rank has a
    complete state any more; its snapshots must be saved with the names that are declared here:
    `checkpoints.save(run.step, **run.declared)`.

    Everything that communicates with other ranks belongs inside an attempt: reading batches, the step, evaluation,
    saving a checkpoint. If a rank is lost, the attempt ends early without an error, before or after its commit, and the
    loop continues from `run.step`. Work that must not be skipped at the end of an attempt belongs in an attempt of its
    own, without a commit, which is repeated until it succeeds.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        checkpoints: Checkpointer | None = None,
        begin: Callable[[bool], int | None] | None = None,
        backend: str | None = None,
        **more: Any,
    ) -> None:
        """All ranks call `begin` together when none of them has a state: with True if no rank has trained yet, with
        False after all states were lost or torn. It loads a state and returns its step, or None. The default loads the
        newest of `checkpoints`. `backend` is that of each generation's process group; None: gloo, and NCCL for tensors
        on a CUDA device."""
        things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, **more}
        self._declared = Declared({**things, "checkpoints": checkpoints})
        self._transaction = Transaction()
        self._before = BeforeAttempt(self._declared.modules, self._declared.device)
        self._strangers = UndeclaredReplicas(self._declared.replicas)
        self._uses = UndeclaredUses(self._declared.things.values())
        self._regroups = False  # members wait to join: this generation ends with the attempt
        self._apart = False  # an error of the script has ended this rank's part in its generation
        if begin is None and checkpoints is not None:
            begin = partial(_load_newest, checkpoints, self._declared)
        member = Member.own()
        self._generations = None if member is None else Generations(member, backend, self._declared.device)
        self._preemption = None if member is None else PreemptionVotes(self._declared)
        self._joining = Joining(
            self._declared, self._transaction, self._before, begin, self._generations, self._preemption
        )
        self._group = self._joining.begin()
        self._updates = UpdateWatch(self._transaction, self._declared.things.values())

    @property
    def step(self) -> int:
        """How many steps were committed."""
        return self._transaction.step

    @property
    def generation(self) -> int:
        """The number of the generation that this rank is in. It changes when ranks leave or join; -1 in a fixed
        world."""
        return -1 if self._generations is None else self._generations.number

    @property
    def declared(self) -> Mapping[str, Any]:
        """The declared objects that have a state, by name: what a checkpoint of this run must hold."""
        return dict(self._declared.stateful)

    def attempt(self) -> "StepAttempt":
        """`with run.attempt():` around one step, or anything else that communicates with other ranks."""
        return StepAttempt(self)

    def commit(self) -> "Commit":
        """`with run.commit():` around the update of a step, inside its attempt. Afterwards the step is committed."""
        return Commit(self)

    def finish(self) -> None:
        """Training is over on all ranks: from now on no rank is replaced. All ranks call it, once."""
        met = False
        while not met:
            try:
                with self.attempt():
                    if dist.is_initialized() and dist.get_world_size() > 1:
                        named_barrier("Elastic.finish()", group=None, timeout=None)
                    met = True
            except WorldNotFormed:
                if self._generations is None or not self._generations.member.finished:
                    raise
                met = True  # the others have finished, and this rank had reached the same step
        if self._generations is not None:
            self._generations.member.send(MemberFinished(self._generations.number, self.step))
            self._generations.close()
        self._updates.close()
        self._declared.begin_step(None)

    # ---- an attempt

    def _begin_attempt(self) -> None:
        if self._apart:  # the script has caught its error, and continues
            self._join()
        self._transaction.begin_attempt()
        own_progress().note(Phase.BETWEEN, self.step)
        self._before.keep()
        self._strangers.note()
        if self._generations is not None and self._generations.wants_regroup:
            ask_all(self._declared.replicas, Vote.REGROUP)
        if self._preemption is not None:
            self._preemption.ask()
        self._declared.begin_step(self.step + 1)
        self._uses.begin()

    def _end_attempt(self, error: BaseException | None) -> bool:
        """The attempt was left, by `error` or without one. Returns True if the error was handled."""
        self._uses.end()
        generations = self._generations
        if error is None:
            self._transaction.end_attempt()
            if self._regroups:
                self._join()
            return False
        if generations is None:
            self._drop(discards=False)
            return False
        found = answer(error, -1 if self._group is None else self._group.rank, generations)
        if found is not Answer.RAISE:
            step, mark = self.step, self._transaction.mark
            self._drop(discards=True)
            logger.warning("%s", describe_loss(error, step, mark, found))
            if found is Answer.GO_BACK:
                self._transaction.tear()
            self._join("" if found is Answer.GO_ON else f"raised {in_one_line(error)}")
            return True
        self._drop(discards=True)
        if isinstance(error, Exception):
            generations.tell_failure(self.step, error)
            self._apart = True
        return False

    def _drop(self, *, discards: bool) -> None:
        """Undo what the attempt changed outside the update; after its commit that belongs to the next step."""
        committed = self._transaction.mark is StepMark.WHOLE
        self._transaction.drop()
        for replica in self._declared.replicas if discards else ():
            discard(replica)
        self._declared.go_back()
        if not committed:
            self._before.put_back()
        self._updates.forget()

    def _join(self, reason: str = "") -> None:
        self._group = self._joining.join(reason)
        self._regroups = self._apart = False

    # ---- a commit

    def _before_commit(self) -> None:
        if self._group is not None and self._declared.device.type == "cuda":
            self._await_sums(self._group)
        if self._generations is not None:
            self._declared.await_parameters()  # before the update, so that the loss of a rank cannot interrupt that
        self._strangers.check()

    def _begin_commit(self) -> None:
        self._transaction.begin_update()

    def _await_sums(self, group: Group) -> None:
        """Work queued behind an aborted collective would run on incomplete sums, so the host must wait until it knows
        that they are complete, and that no member had left by then."""
        event = torch.cuda.current_stream(self._declared.device).record_event()
        group.wait(EventWork(event), f"the sums of step {self.step}")
        if self._generations is not None and self._generations.over:
            raise PeerLost(f"a member left generation {self.generation} before step {self.step} was committed")
        if self._declared.in_shards and group.size > 1:  # either all ranks have their sums, or no rank uses them
            gather_ints(group, [self.step], f"the sums of step {self.step} on all ranks")

    def _end_commit(self) -> None:
        self._declared.commit(self.step + 1)
        self._transaction.end_update()
        own_progress().note(Phase.BETWEEN, self.step)
        if (generations := self._generations) is not None:
            alone = self._group is not None and self._group.size == 1
            self._regroups = generations.wants_regroup if alone else was_asked(self._declared.replicas, Vote.REGROUP)
            if self._preemption is not None and self._group is not None:
                self._preemption.read(self._group)


class StepAttempt:
    """What `run.attempt()` returns."""

    def __init__(self, run: Elastic) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._begin_attempt()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run._end_attempt(error)


class Commit:
    """What `run.commit()` returns. An interrupt is raised after the step is committed."""

    def __init__(self, run: Elastic) -> None:
        self._run = run
        self._signals = DeferredSignals()

    def __enter__(self) -> None:
        self._run._before_commit()
        self._signals.begin()
        try:
            self._run._begin_commit()
        except BaseException:
            self._signals.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._run._end_commit()
        finally:
            self._signals.end()


def _load_newest(checkpoints: Checkpointer, declared: Declared, _: bool) -> int | None:
    """Load the newest checkpoint and return its step; None if there is none."""
    try:
        return checkpoints.load("compared", **declared.stateful).step
    except NoCheckpoint as error:
        if error.skipped:
            raise
        return None
