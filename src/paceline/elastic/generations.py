"""How this member leaves a generation, waits for the next one, and forms its group."""

import logging
import sys
import threading
from dataclasses import replace

import torch
import torch.distributed as dist

from paceline.collectives.group import Group
from paceline.collectives.own_group import abort_all
from paceline.collectives.peers import Identity
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.errors import WorldNotFormed
from paceline.member import Member
from paceline.member_messages import NEVER, Generation, MemberFailed, MemberFormed, MemberLeft, MemberReady
from paceline.start.elastic_world import form_generation, leave_generation

logger = logging.getLogger("paceline")

ABORT_S = 10.0


class Generations:
    """This process as a member: its current generation, and the group of that."""

    def __init__(self, member: Member, backend: str | None, device: torch.device) -> None:
        self.member = member
        self.number = NEVER  # the newest that it has entered, or tried to
        self._backend = backend
        self._device = device
        self._others: tuple[Identity, ...] = ()
        self._hook = sys.excepthook
        self._aborting: threading.Thread | None = None
        self._stop_watching = member.on_ended(self._on_ended) if device.type == "cuda" else lambda: None

    @property
    def over(self) -> bool:
        """Whether a member has left the current generation."""
        return bool(self.member.ended(self.number))

    @property
    def wants_regroup(self) -> bool:
        """Whether others wait to join."""
        return self.member.wants_regroup(self.number)

    def enter_next(self, ready: MemberReady) -> tuple[Generation, Group]:
        """Leave the generation, report this rank's state, and form the group of the next one that it belongs to.
        `ready.was` is filled in here.

        Raises PeerLost if a member of the new one leaves meanwhile: then there will be another.
        """
        self._leave()
        self.member.send(replace(ready, was=self.number))
        generation = self.member.await_generation(self.number)
        self.number = generation.number
        self._hook = sys.excepthook
        self._others = form_generation(self.member, generation, self._backend, self._device)
        group = dist.group.WORLD
        assert group is not None
        return generation, Group(TorchDistTransport(group), owned=False)

    def formed(self) -> None:
        """Report that the state of this rank equals that of the others."""
        self.member.send(MemberFormed(self.number))

    def tell_failure(self, step: int, error: Exception) -> None:
        """Report that the script of this member has raised an error that no other member caused."""
        self.member.send(MemberFailed(self.number, step, in_one_line(error)))

    def close(self) -> None:
        """Stop following generations."""
        self._stop_watching()

    # ---- a device, whose host may be blocked in a collective when a peer dies

    def _on_ended(self, ended: MemberLeft) -> None:
        if ended.generation == self.number and self._aborting is None and dist.is_initialized():
            self._aborting = threading.Thread(target=abort_all, name="paceline abort", daemon=True)
            self._aborting.start()

    def _leave(self) -> None:
        aborting, self._aborting = self._aborting, None
        if aborting is not None:
            aborting.join(ABORT_S)
            if aborting.is_alive():
                raise WorldNotFormed(
                    f"member {self.member.id}: the communicator of generation {self.number} could not be aborted "
                    f"within {ABORT_S:g} s, so this process cannot go on; the launcher replaces it"
                )
        leave_generation(self._others)
        self._others = ()
        sys.excepthook = self._hook  # torch adds one more hook for every group, each with a rank


def in_one_line(error: BaseException) -> str:
    """An error as one line for the launcher."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")
