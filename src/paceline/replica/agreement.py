"""The settings of the checks that ranks make of each other in every step, and of their consequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

_CHOICES = {"drift": ("raise", "heal"), "not_finite": ("keep", "skip", "raise"), "audit": ("raise", "warn")}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks check in every step besides reducing gradients, and how they react.

    Args:
        state_every: the number of steps within which all parameters and optimizer state (in lanes also buffers) are
            compared bit for bit, a part of them in every step. 1: all of them in every step. 0: never. Steps that a
            CUDA graph replays are not compared. Messages and capsules number steps as `model.lanes()` does;
            without lanes they count reductions, from 1.
        drift: what to do when replicas differ. "raise" on every rank, or "heal": overwrite what differs with the values
            of the majority, log a warning, and continue.
        trust: the rank whose values are used to heal when there is no majority, as between two ranks.
        not_finite: what to do when gradients are not finite. "keep" them, as torch does; "skip" the step on all ranks:
            gradients are set to None, so that the optimizer changes nothing; or "raise". With GradScaler use "keep": it
            finds them and skips such steps itself, and raises "No inf checks were recorded" where there are no
            gradients left to check.
        patience: raise after this many consecutive skipped steps.
        audit_every: in lanes, the number of steps between audits: one lane of the step is computed a second time by
            another rank, and its gradients are compared bit for bit. 0: none. The body of the loop over lanes then runs
            once more: see `DistributedDataParallel.repeats_lane`.
        audit: what to do when they differ and a third rank has decided which is wrong. "raise" on every rank, before
        the
            update, or "warn" and continue.
        checksums: in lanes over torch.distributed on hosts, compare every slice of a bucket that ranks send each other
            with what was received. A damaged one raises `MessageDamaged` on every rank, which names the sender and the
            bucket, before anything is used. Shared memory and devices have their own protection.
        capsules: a folder for failure capsules. The inputs of the step are written there when replicas drift, a
            gradient is not finite, or forward or backward raises; `paceline replay FILE` reruns it. Set it on all
            ranks or on none. A process writes the first 8 capsules of each kind of finding.
        about: additional content of capsules, such as what the model was built from: plain values and tensors.
    """

    state_every: int = 64
    drift: str = "raise"
    trust: int | None = None
    not_finite: str = "keep"
    patience: int = 10
    audit_every: int = 0
    audit: str = "raise"
    checksums: bool = False
    capsules: str | Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            if (given := getattr(self, name)) not in accepted:
                raise UsageError(f"Agreement({name}={given!r}): expected one of {', '.join(map(repr, accepted))}")
        for name, least in (("state_every", 0), ("patience", 1), ("audit_every", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Agreement({name}={value!r}): expected a whole number of at least {least}")
        if type(self.checksums) is not bool:
            raise UsageError(f"Agreement(checksums={self.checksums!r}): expected true or false")
        if self.trust is not None and (type(self.trust) is not int or self.trust < 0):
            raise UsageError(f"Agreement(trust={self.trust!r}): expected a rank, or None")

    def describe(self) -> str:
        names = (item.name for item in fields(self) if item.name not in ("capsules", "about"))
        settings = [f"{name}={getattr(self, name)!r}" for name in names]
        return ", ".join([*settings, f"capsules={'a folder' if self.capsules is not None else None}"])

    def check_trust(self, size: int) -> None:
        if self.trust is not None and 1 < size <= self.trust:  # a single rank has no other to heal from
            raise UsageError(f"Agreement(trust={self.trust}): expected a rank of this world, 0 to {size - 1}")
