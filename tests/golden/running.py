"""Runs cases on ranks, many of them in one call, and puts together what the ranks have found."""

import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.collectives import run as run_threads
from tests.golden.cases import CASES, Case
from tests.golden.training import Losses, summed, train
from tests.pool import Pool

Result = dict[str, Any]  # "digest", or one per rank where ranks are meant to differ, and "losses" by step
DEADLINE_S = 50.0


def on_rank(rank: int, size: int, names: list[str]) -> list[tuple[str, Losses]]:
    """The cases in turn, in a process of the pool."""
    found = []
    try:
        for name in names:
            found.append(train(CASES[name], rank, CASES[name].transport))
    except Exception as error:
        error.add_note(f"in the case {name!r}")
        raise
    finally:
        gc.collect()  # a replica holds its group, and is in a cycle
    return found


def on_threads(case: Case) -> list[tuple[str, Losses]]:
    # torch walks through the hooks of all optimizers in every step; meanwhile no thread may add one.
    together = threading.Barrier(case.ranks)

    def body(transport: Any) -> tuple[str, Losses]:
        return train(case, transport.rank, transport, lambda: together.wait(20))

    return run_threads(body, case.ranks)


def put_together(found: Iterable[tuple[str, Losses]]) -> Result:
    digests, losses = zip(*found, strict=True)
    return {"digest": digests[0] if len(set(digests)) == 1 else list(digests), "losses": summed(losses)}


def worlds(names: Iterable[str]) -> dict[str, list[str]]:
    """The cases that run in one call: threads, or as many processes."""
    found: dict[str, list[str]] = {}
    for name in names:
        case = CASES[name]
        found.setdefault("threads" if case.transport == "threads" else str(case.ranks), []).append(name)
    return found


def results(world: str, names: list[str], pool: Pool) -> Iterator[tuple[str, Result]]:
    """What comes of the cases of one of `worlds`."""
    if world == "threads":
        for name in names:
            yield name, put_together(on_threads(CASES[name]))
        return
    of_ranks = pool(int(world)).run(on_rank, names, deadline_s=DEADLINE_S)
    for name, found in zip(names, zip(*of_ranks, strict=True), strict=True):
        yield name, put_together(found)


def differences(expected: Result | None, got: Result) -> list[str]:
    """In words: what of a result is not as expected."""
    if expected is None:
        return ["it is new"]
    told = [
        f"the loss of step {step} is {theirs}, expected {ours}"
        for step, (ours, theirs) in enumerate(zip(expected["losses"], got["losses"], strict=True))
        if ours != theirs
    ][:1]
    if expected["digest"] != got["digest"]:
        ours, theirs = (_digests(result) for result in (expected, got))
        equal = "" if told else ", though all losses are equal"
        told.append(f"the digest is {theirs}, expected {ours}{equal}")
    return told


def _digests(result: Result) -> str:
    digest = result["digest"]
    return (
        f"{digest[:12]}…" if isinstance(digest, str) else f"another on each rank ({', '.join(d[:8] for d in digest)})"
    )
