"""A script that is a member of an elastic job and nothing else: no torch, a state of one number, and a star of sockets.

    elastic_member.py PLAN

PLAN is JSON. "faults" is a list of [slot, step, what]: the first process of that slot does it when it comes to that
step, and every process if there is no slot. Training ends when the world is full and all have come to the step "end".
With "late", a process that replaces another does not come in time. With "stops", members that have been in a generation
take SIGTERM and SIGUSR1 for a wish to save and leave, of which they say the step.
"""

import json
import os
import signal
import socket
import sys
import time

from paceline.member import Member, in_elastic_job
from paceline.member_messages import (
    NEVER,
    Generation,
    MemberFailed,
    MemberFinished,
    MemberFormed,
    MemberReady,
    MemberStore,
)
from paceline.progress import Phase, own_progress

REGROUP, END, STOP = 1, 2, 4


class Broken(Exception):
    """A link to another member is gone."""


class Star:
    """All members of a generation, each linked to the first."""

    def __init__(self, me: Member, generation: Generation) -> None:
        self._me, self._generation = me, generation.number
        self.links: list[socket.socket] = []
        self.is_hub = generation.members[0] == me.id
        if self.is_hub:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(0.02)
                me.send(MemberStore(generation.number, listener.getsockname()[1]))
                while len(self.links) < generation.size - 1:
                    self._look()
                    try:
                        self.links.append(listener.accept()[0])
                    except TimeoutError:
                        continue
        else:
            self.links.append(socket.create_connection(me.await_store(generation.number)))
        for link in self.links:
            link.settimeout(0.02)

    def _look(self) -> None:
        if self._me.ended(self._generation):
            raise Broken

    def _get(self, link: socket.socket) -> int:
        while True:
            self._look()
            try:
                data = link.recv(1)
            except TimeoutError:
                continue
            except OSError as error:
                raise Broken from error
            if not data:
                raise Broken
            return data[0]

    def meet(self, wish: int) -> int:
        """Wait for all; returns the wishes of all."""
        try:
            if not self.is_hub:
                self.links[0].sendall(bytes([wish]))
                return self._get(self.links[0])
            for link in self.links:
                wish |= self._get(link)
            for link in self.links:
                link.sendall(bytes([wish]))
        except OSError as error:
            raise Broken from error
        return wish

    def close(self) -> None:
        for link in self.links:
            link.close()


def fail(what: str, me: Member, number: int, step: int) -> None:
    if what == "raise":
        me.send(MemberFailed(number, step, "ValueError: a bad sample"))
        raise ValueError("a bad sample")
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit")))
    os.kill(os.getpid(), signal.Signals[what])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    plan = json.loads(sys.argv[1])
    me, slot, progress = Member.own(), int(os.environ["RANK"]), own_progress()
    assert me is not None and in_elastic_job()
    again = me.id >= int(os.environ["WORLD_SIZE"]) + plan.get("spares", 0)
    if again and plan.get("late"):
        time.sleep(600)
    was, step, whole = NEVER, 0, False
    asked: list[int] = []
    if plan.get("stops"):
        say(f"member {me.id} waits")
    while True:
        me.send(MemberReady(was, step, whole))
        generation = me.await_generation(was)
        was, star = generation.number, None
        for number in (signal.SIGTERM, signal.SIGUSR1) if plan.get("stops") else ():
            signal.signal(number, lambda number, _: asked.append(number))
        step = generation.step
        whole = True
        try:
            star = Star(me, generation)
            me.send(MemberFormed(was))
            say(f"generation {was} rank {generation.rank_of(me.id)} of {generation.size} step {step}")
            if work(me, plan, slot, again, star, generation, step, progress, asked):
                return
        except Broken:
            step = progress.step
        finally:
            if star is not None:
                star.close()
        step = progress.step


def work(me, plan, slot, again, star, generation, step, progress, asked) -> bool:  # type: ignore[no-untyped-def]
    """Step until training is over (True), or members regroup (False)."""
    progress.note(Phase.FORWARD, step)
    while True:
        for at, when, what in plan["faults"]:
            if at in (slot, None) and when == step and (not again or at is None):
                fail(what, me, generation.number, step)
        full = generation.size == int(os.environ["WORLD_SIZE"])
        done = full and step >= plan["end"]
        progress.note(Phase.WAITING, step)
        wish = star.meet(REGROUP * me.wants_regroup(generation.number) | END * done | STOP * bool(asked))
        step += 1
        progress.note(Phase.FORWARD, step)
        if wish & STOP:
            me.send(MemberFinished(generation.number, step))
            say(f"saved at step {step}")
            sys.exit(143)
        if wish & END:
            me.send(MemberFinished(generation.number, step))
            say(f"done at step {step}")
            for at, when, what in plan["faults"]:
                if when == "after" and at == slot:
                    fail(what, me, generation.number, step)
            return True
        if wish & REGROUP:
            return False
        time.sleep(0.002)


if __name__ == "__main__":
    main()
