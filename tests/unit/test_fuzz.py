"""A quick share of what `./scripts/fuzz` does: every parser is given frames that nobody has sent."""

import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("jupyter_client")  # some parsers are the notebook's

from tests.fuzz.all_parsers import all_parsers
from tests.fuzz.parser import SLOW_S, Parser, fuzz, little_memory

FRAMES = 8_000  # in all, of 1,000,000


def test_every_parser_answers_or_refuses_with_one_error(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsers = all_parsers(tmp_path)
        whole = sum(parser.share for parser in parsers)
        with little_memory():
            found = [fuzz(parser, round(FRAMES * parser.share / whole), seed=0) for parser in parsers]
    wrong = {one.parser.name: one.wrong for one in found if one.wrong}
    assert not wrong
    assert sum(one.frames for one in found) > 0.9 * FRAMES
    assert len({parser.name for parser in parsers}) == len(parsers)


def take_much(frame: bytes) -> object:
    return bytearray(1 << 40)


def take_long(frame: bytes) -> None:
    until = time.process_time() + 1.2 * SLOW_S
    while time.process_time() < until:
        continue


def be_wrong(frame: bytes) -> None:
    raise KeyError(frame)


WRONG = {"MemoryError": take_much, "slow": take_long, "KeyError": be_wrong}


@pytest.mark.parametrize("kind", WRONG)
def test_a_parser_that_is_wrong_is_found(kind: str) -> None:
    with little_memory():
        found = fuzz(Parser("x", WRONG[kind], (b"x",), (ValueError,)), 1, seed=0)
    assert [text.partition(":")[0].split()[0] for text in found.wrong] == [kind]
