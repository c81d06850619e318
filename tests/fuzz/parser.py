"""A parser of ours, and what becomes of it when it is given frames that nobody has sent."""

import random
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.frames import Frame, mutated

SLOW_S = 0.5  # for one frame, which has some kilobytes
ROOM = 256 << 20  # bytes of memory beyond what the process has
OUT_OF_MEMORY = ("allocate memory", "Unable to allocate", "out of memory", "Cannot allocate")


@dataclass(frozen=True)
class Parser:
    """`read` takes a frame; it answers, or raises one of `refuses`. `share` is its part of all frames."""

    name: str
    read: Callable[[Frame], object]
    frames: tuple[Frame, ...]
    refuses: tuple[type[Exception], ...] = ()
    share: float = 1.0
    seal: Callable[[Frame], Frame] = bytes  # what makes a frame of a changed one, such as a hash of it


@dataclass
class Findings:
    """What came of all frames of one parser."""

    parser: Parser
    frames: int = 0
    answered: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    wrong: dict[str, tuple[Frame, str]] = field(default_factory=dict)  # by kind: a frame, and where it went wrong
    seconds: float = 0.0

    def try_frame(self, frame: Frame) -> None:
        """Give the parser a frame, and note what it did."""
        began, computed = time.perf_counter(), time.process_time()
        try:
            self.parser.read(frame)
            self.answered += 1
        except self.parser.refuses as error:
            self.refused += 1
            if wanted := next((one for one in _causes(error) if _asked_for_memory(one)), None):
                self._note(f"takes too much memory: {type(wanted).__name__}", frame, wanted)
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            self._note(f"{type(error).__name__}: {str(error)[:60]}", frame, error)
        took_s = time.perf_counter() - began
        self.slowest_s = max(self.slowest_s, took_s)
        # A busy machine is no reason to call a parser slow.
        if (computed_s := time.process_time() - computed) > SLOW_S:
            self._note("slow", frame, TimeoutError(f"{computed_s:.1f} s"))
        self.frames += 1

    def _note(self, kind: str, frame: Frame, error: BaseException) -> None:
        where = "".join(traceback.format_exception(error)[-4:])
        place = traceback.extract_tb(error.__traceback__)[-1:]
        self.wrong.setdefault(f"{kind} {place[0].name if place else ''}", (frame, where))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _asked_for_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


@contextmanager
def little_memory() -> Iterator[None]:
    """Inside, this process cannot take much more memory than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(parser: Parser, frames: int, seed: int) -> Findings:
    """Give a parser so many frames, the same for the same seed. The valid ones come first."""
    found = Findings(parser)
    draw = random.Random(f"{parser.name} {seed}")
    began = time.perf_counter()
    for frame in parser.frames:
        found.try_frame(parser.seal(frame))
    assert found.answered == len(parser.frames) or found.wrong, f"{parser.name} refuses what is valid"
    while found.frames < frames:
        frame = draw.choice(parser.frames)
        found.try_frame(parser.seal(mutated(frame, parser.frames, draw)))
    found.seconds = time.perf_counter() - began
    return found


def fuzz_all(parsers: Mapping[str, Parser], frames: int, seed: int) -> list[Findings]:
    """Deal so many frames to all parsers by their shares."""
    whole = sum(parser.share for parser in parsers.values())
    return [fuzz(parser, round(frames * parser.share / whole), seed) for parser in parsers.values()]
