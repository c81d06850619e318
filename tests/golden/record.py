"""Records results anew: `python -m tests.golden.record [--only PATTERN] [--dry-run] [--stored]`.

Do so when results are meant to change, and read the lines of the diff: each is a promise that is broken. Every case is
run twice, among other neighbours, and one that gives two results is not recorded.
"""

import argparse
import sys
from collections.abc import Iterable
from contextlib import closing
from fnmatch import fnmatch

from tests.golden import stored
from tests.golden.cases import CASES
from tests.golden.files import GOLDEN, STORED, read, write
from tests.golden.running import Result, differences, results, worlds
from tests.pool import Pool


def run_twice(names: Iterable[str], pool: Pool) -> tuple[dict[str, Result], list[str]]:
    """The results of all cases, and the names of those that give another one each time."""
    found: dict[str, Result] = {}
    unsteady = []
    for world, of_world in worlds(names).items():
        first = dict(results(world, of_world, pool))
        second = dict(results(world, of_world[::-1], pool))
        for name in of_world:
            if first[name] == second[name]:
                found[name] = first[name]
            else:
                unsteady.append(name)
    return found, unsteady


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose names are like this, as 'shm-3*'")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument(
        "--stored", action="store_true", help="make the stored checkpoint and capsules anew, and no case"
    )
    given = parser.parse_args(arguments)
    with closing(Pool()) as pool:
        if given.stored:
            write(STORED, stored.make(pool))
            return 0
        found, unsteady = run_twice([name for name in CASES if fnmatch(name, given.only)], pool)
    old = read(GOLDEN)
    kept = {name: result for name, result in old.items() if name in CASES}
    for name in unsteady:
        sys.stdout.write(f"{name}: NOT RECORDED, it gives another result each time\n")
    for name, result in found.items():
        for told in differences(old.get(name), result):
            sys.stdout.write(f"{name}: {told}\n")
    for name in old.keys() - kept.keys():
        sys.stdout.write(f"{name}: there is no such case any more\n")
    if not given.dry_run:
        write(GOLDEN, kept | found)
    return 1 if unsteady else 0


if __name__ == "__main__":
    sys.exit(main())
