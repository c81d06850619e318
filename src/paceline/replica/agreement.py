"""Replicas stay equal: a part of the state is compared in every step, and gradients that are not finite are named."""

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from paceline.agree import Rotation, StartedWord, first_not_finite, heal, locate, start_word
from paceline.agree.capsule import Kind
from paceline.blocks import lanes_of, listed
from paceline.collectives.api import Transport
from paceline.collectives.wait import finish
from paceline.errors import NoMajority, NotFiniteGradients, UsageError
from paceline.reducer.agreement import Words
from paceline.reducer.oversight import Findings, Verdict
from paceline.reducer.slot import GradSlot
from paceline.replica.lane_buffers import LaneBuffers

logger = logging.getLogger("paceline")

Named = Sequence[tuple[str, torch.Tensor]]
_CHOICES = {"drift": ("raise", "heal"), "not_finite": ("keep", "skip", "raise")}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks check of each other in every step, beside the gradients.

    Args:
        state_every: parameters and optimizer state (in lanes also buffers) are compared bit for bit, a part in every
            step and the whole within so many steps. 1: the whole in every step. 0: never. Steps that a CUDA graph
            replays are not compared. Messages and capsules number steps as `model.lanes(micros, step)` does; without
            lanes they count reductions, from 1.
        drift: when they differ, "raise" on every rank, or "heal": overwrite what differs with the values of the
            majority, say so, and go on.
        trust: the rank whose values are taken to heal when there is no majority, as between two ranks.
        not_finite: when a rank's gradients are not finite, "keep" them as torch does; "skip" the step on all ranks:
            gradients are emptied, so that the optimizer changes nothing; or "raise". With GradScaler keep "keep": it
            looks for them and skips such steps by itself, and raises "No inf checks were recorded" where there are no
            gradients left to look at.
        patience: after so many steps in a row that were skipped, raise.
        capsules: a folder for failure capsules. What the step was given is written there when replicas drift, a
            gradient is not finite, or forward or backward raises; `paceline replay FILE` runs it again. All ranks
            have one or none has. Of each kind of finding a process writes the first 8.
        about: more to write into capsules, such as what the model was built from: plain values and tensors.
    """

    state_every: int = 64
    drift: str = "raise"
    trust: int | None = None
    not_finite: str = "keep"
    patience: int = 10
    capsules: str | Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            if (given := getattr(self, name)) not in accepted:
                raise UsageError(
                    f"Agreement({name}={given!r}) is not known; accepted: {', '.join(map(repr, accepted))}"
                )
        for name, least in (("state_every", 0), ("patience", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Agreement({name}={value!r}): expected a whole number of at least {least}")
        if self.trust is not None and (type(self.trust) is not int or self.trust < 0):
            raise UsageError(f"Agreement(trust={self.trust!r}): expected a rank, or None")

    def describe(self) -> str:
        names = (item.name for item in fields(self) if item.name not in ("capsules", "about"))
        told = [f"{name}={getattr(self, name)!r}" for name in names]
        return ", ".join([*told, f"capsules={'a folder' if self.capsules is not None else None}"])

    def check_trust(self, size: int) -> None:
        if self.trust is not None and 1 < size <= self.trust:  # alone there is nobody to heal from
            raise UsageError(f"Agreement(trust={self.trust}): expected a rank of this world, 0 to {size - 1}")


class Overseer:
    """Carries an `Agreement` out, for one replica."""

    def __init__(
        self,
        agreement: Agreement,
        params: Named,
        transport: Transport,
        timeout_s: float | None,
        buffers: LaneBuffers | None = None,
    ) -> None:
        """`buffers`: only in lanes are they meant to be equal on all ranks, when a step begins."""
        agreement.check_trust(transport.size)
        self.agreement = agreement
        self.on_finding: Callable[[Kind, str, Sequence[int]], None] | None = None  # kind, text, ranks
        self.wide: Callable[[], list[torch.Tensor]] | None = None  # the parameters where others stand in for them
        self._transport = transport
        self._timeout_s = timeout_s
        self._buffers = buffers
        self._params = params
        self._names = {id(param): name for name, param in params}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._params_only = False  # ranks hold different optimizer states, as they do where these are sharded
        self._rotation: Rotation | None = None
        self._stale = True  # the list of what there is to compare has to be made anew
        self._homes: dict[int, tuple[Any, Any]] = {}  # by id of a tensor: what holds it, and where
        self._signature = 0
        self._compares = bool(agreement.state_every) and not transport.alone
        self._step = self._compared = 0
        self._word: StartedWord | None = None
        self._in_a_row = 0
        if self.looks_at_sums:
            transport.find_not_finite(True)

    @property
    def looks_at_sums(self) -> bool:
        return self.agreement.not_finite != "keep"

    def note_optimizer(self, optimizer: object, *, local: bool) -> None:
        assert isinstance(optimizer, Optimizer)
        self._compares = self._compares and not local
        if not any(known() is optimizer for known in self._optimizers):
            self._optimizers = [known for known in self._optimizers if known() is not None]
            self._optimizers.append(weakref.ref(optimizer))
            self._stale = True  # its state will be there when the next step begins

    def begin(self, number: int) -> None:
        self._step = number
        if not self._compares or self._is_captured():
            self._word, self._signature = None, 0
            return
        if self._stale or self._compared % self.agreement.state_every == 0:
            self._renew()
        assert self._rotation is not None
        part = [piece.flat() for piece in self._rotation.part(self._compared, self._current)]
        self._word = start_word(part if self._buffers is None else [*part, *self._buffers.changing()])
        self._compared += 1

    def findings(self) -> Findings:
        mask = 0
        if self.looks_at_sums:
            for rank in self._transport.not_finite():
                mask |= 1 << min(rank, 62)
        # Forgotten here and not when the next step begins: that one may be captured, and pinned memory that is given
        # back during a capture becomes a part of it.
        word, self._word = self._word, None
        return Findings(0 if word is None else word.word(), self._signature, mask)

    def judge(self, words: Sequence[Words], slots: Sequence[GradSlot]) -> Verdict:
        error = None
        if not all(row.signature for row in words):
            pass
        elif len({row.signature for row in words}) > 1:
            self._compare_parameters_only()
        elif len({row.state for row in words}) > 1:
            error = self._drifted()
        found = 0
        for row in words:
            found |= row.not_finite
        if not found:
            self._in_a_row = 0
            return Verdict(error=error)
        ranks = [rank for rank in range(self._transport.size) if found >> min(rank, 62) & 1]
        verdict = self._not_finite(_batches_of(ranks, words), ranks, slots)
        return verdict if error is None else Verdict(verdict.drops_gradients, error)

    def _is_captured(self) -> bool:
        """Whether this step goes into a CUDA graph, whose replays run nothing on the host: nothing could be compared,
        and reading a word would end the capture."""
        return any(param.is_cuda for _, param in self._params[:1]) and torch.cuda.is_current_stream_capturing()

    # ---- another set of ranks

    def begin_anew(self, transport: Transport) -> None:
        """Go on over another transport, whose ranks have compared nothing yet."""
        self._transport = transport
        self._rotation, self._stale = None, True
        self._compared = self._in_a_row = 0
        self._word = None
        if self.looks_at_sums:
            transport.find_not_finite(True)

    def make_equal(self, root: int) -> None:
        """Have all ranks take the parameters and the optimizer state of the majority, or else of rank `root`."""
        self._renew()
        told = torch.tensor([self._signature], dtype=torch.int64)
        every = torch.empty(self._transport.size, dtype=torch.int64)
        work = self._transport.all_gather(every, told)
        finish(work, what="the comparison of states", watch=self._transport.watch, timeout_s=self._timeout_s)
        if len(set(every.tolist())) > 1:  # a rank that was replaced has no optimizer state yet
            self._compare_parameters_only()
            self._renew()
        assert self._rotation is not None
        pieces = self._rotation.whole()
        drift = locate(pieces, self._transport, step=self._step, timeout_s=self._timeout_s)
        if drift.tensors:
            heal(drift, pieces, self._transport, trust=root, timeout_s=self._timeout_s)
            if self._transport.rank == 0:
                logger.warning(
                    "ranks were stopped at different places of a step: %d of %d tensors of parameters and optimizer "
                    "state differed, and have the values of %s again",
                    len(drift.tensors),
                    len(pieces),
                    "the majority" if drift.healable else f"rank {root}",
                )

    # ---- drift

    def _renew(self) -> None:
        self._homes.clear()
        state = [] if self._params_only else self._optimizer_state()
        buffers = [] if self._buffers is None else self._buffers.before()
        self._homes.update((id(value), (self._buffers, name)) for name, value in buffers)
        params = self._params
        if self.wide is not None:
            params = [(name, value) for (name, _), value in zip(params, self.wide(), strict=True)]
        named = [*params, *buffers, *state]
        self._stale = False
        if self._rotation is None:
            self._rotation = Rotation(named, max(1, self.agreement.state_every))
        else:
            self._rotation.renew(named)
        told = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named])
        self._signature = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), signed=True)

    def _optimizer_state(self) -> Named:
        found: list[tuple[str, torch.Tensor]] = []
        for optimizer in (known() for known in self._optimizers):
            for param, state in () if optimizer is None else optimizer.state.items():
                if isinstance(state, dict) and (name := self._names.get(id(param))) is not None:
                    for where, home, key in _places(state):
                        found.append((f"{where} of {name}", home[key]))
                        self._homes[id(home[key])] = home, key
        return sorted(found, key=lambda pair: pair[0])

    def _current(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        """The tensor that stands in this one's place: some optimizers make new ones, and a buffer that has changed
        between steps was noted anew. Buffers are looked at as a whole, and so when their first piece has its turn."""
        home, key = self._homes.get(id(tensor), ((), 0))
        try:
            now = home[key] if home is not self._buffers else tensor if begin else self._buffers.now(key)
        except (KeyError, IndexError):
            return tensor
        if now is tensor or not isinstance(now, torch.Tensor):
            return tensor
        self._homes[id(now)] = self._homes.pop(id(tensor))
        return now

    def _compare_parameters_only(self) -> None:
        """Ranks that hold different tensors cannot compare them; parameters are the same everywhere, by agreement."""
        if not self._params_only:
            logger.info("ranks hold different optimizer states, so only parameters are compared between them")
        self._params_only = self._stale = True

    def _drifted(self) -> Exception | None:
        step = self._step
        self._renew()  # a tensor of the optimizer's state may have been replaced since the list was made
        assert self._rotation is not None
        pieces = self._rotation.whole()  # a weight that drifted has often taken its moments along
        drift = locate(pieces, self._transport, step=step, timeout_s=self._timeout_s)
        if not drift.tensors:
            logger.warning("digests of the state differed between ranks in step %d, but the state does not", step)
            return None
        self._tell("divergence", drift.text, drift.ranks)
        if self.agreement.drift == "raise":
            return drift.error()
        try:
            heal(drift, pieces, self._transport, trust=self.agreement.trust, timeout_s=self._timeout_s)
        except NoMajority as error:
            return error
        if self._buffers is not None:
            self._buffers.put_back()
        logger.warning("healed: %s", drift.text_of_healed(self.agreement.trust))
        return None

    # ---- not finite

    def _not_finite(self, who: str, ranks: Sequence[int], slots: Sequence[GradSlot]) -> Verdict:
        self._in_a_row += 1
        first = first_not_finite((slot.meta.name, slot.view) for slot in slots if not slot.asleep)
        what = "a gradient" if first is None else f"the gradient of {first.name} ({first.how_many} × {first.kind})"
        text = f"{what} is not finite in step {self._step}, by the batch of {who}"
        self._tell("not-finite", text, ranks)
        if self.agreement.not_finite == "raise":
            where = "its capsule has it" if self.on_finding else "Agreement(capsules=…) would keep it"
            error = NotFiniteGradients(
                f"{text}; no rank has stepped on it. Look at that batch ({where}), lower the learning rate, or pass "
                f'not_finite="skip" to go on with the next step',
                ranks=ranks,
            )
            return Verdict(True, error)
        if self._in_a_row >= self.agreement.patience:
            error = NotFiniteGradients(
                f"{text}, and so it was in the last {self._in_a_row} steps, which were skipped; lower the learning "
                f"rate, look at the data, or go on from an earlier checkpoint",
                ranks=ranks,
            )
            return Verdict(True, error)
        if self._transport.rank == 0:
            logger.warning("%s: the step is skipped on all ranks", text)
        return Verdict(True)

    def _tell(self, kind: Kind, text: str, ranks: Sequence[int]) -> None:
        if self.on_finding is not None:
            self.on_finding(kind, text, ranks)


def _places(state: Any, before: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where an optimizer's state has tensors: a name, what holds the tensor, and its key or number there."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            yield f"{before}{key}", state, key
        elif isinstance(value, dict | list | tuple):
            yield from _places(value, f"{before}{key}.")


def _batches_of(ranks: Sequence[int], words: Sequence[Words]) -> str:
    """The ranks, and the lanes that they ran: `rank 1 (lanes 2 to 3)`."""
    lanes = len(words[0].lane_weights)
    if not lanes:
        return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    own = {rank: lanes_of(rank, len(words), lanes) for rank in ranks}
    return ", ".join(f"rank {rank} ({listed(mine)})" for rank, mine in own.items())
