"""Gives all parsers frames that nobody has sent, and prints a table: `./scripts/fuzz [FRAMES] [SEED]`."""

import faulthandler
import sys
import tempfile
import warnings
from pathlib import Path

from tests.fuzz.all_parsers import all_parsers
from tests.fuzz.parser import fuzz, little_memory

HANG_S = 300  # for one parser; then Python says where it is, and ends


def main(frames: int, seed: int) -> int:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as folder, little_memory():
        parsers = all_parsers(Path(folder))
        whole = sum(parser.share for parser in parsers)
        found = []
        sys.stdout.write(
            f"{'parser':<42} {'frames':>8} {'answered':>9} {'refused':>8} {'slowest':>9} {'time':>7}  wrong\n"
        )
        for parser in parsers:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            one = fuzz(parser, round(frames * parser.share / whole), seed)
            faulthandler.cancel_dump_traceback_later()
            found.append(one)
            sys.stdout.write(
                f"{parser.name:<42} {one.frames:>8,} {one.answered:>9,} {one.refused:>8,} "
                f"{one.slowest_s * 1e3:>6.0f} ms {one.seconds:>5.1f} s  {len(one.wrong)}\n"
            )
            sys.stdout.flush()
    for one in found:
        for kind, (frame, where) in one.wrong.items():
            sys.stdout.write(f"\n{one.parser.name}: {kind}\n  {frame[:300]!r}\n{where}\n")
    sys.stdout.write(f"{sum(one.frames for one in found):,} frames, seed {seed}\n")
    return 1 if any(one.wrong for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
