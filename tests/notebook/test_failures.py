"""Errors of several ranks, made from what a real kernel says."""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.launch.tracebacks import package_of, without_colours
from paceline.notebook.events import Died, Failed
from paceline.notebook.output.failures import MAX_LINES, RanksFailed
from paceline.notebook.rank_kernels.cell_run import CellOutcome
from tests.notebook.kernel_cells import run_cells

CELLS = {
    "define": "def f(x):\n    y = x + 1\n    return 1 / 0",
    "cell": "a = 1\nb = a / 0\nc = 3",
    "other cell": "a = 1\nf(3)\nb = 2",
    "torch": "import torch\nnet = torch.nn.Linear(3, 4)\nnet(torch.zeros(2, 5))",
    "syntax": "a = 1\nb = (1 +\nc = 2",
    "many lines": "raise ValueError('one\\ntwo\\nthree')",
    "very many lines": "raise ValueError('\\n'.join(f'this is {i}' for i in range(80)))",
    "chained": "try:\n    f(1)\nexcept Exception as e:\n    raise RuntimeError('it did not work') from e",
    "handling": "try:\n    f(1)\nexcept Exception as e:\n    {}['key']",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError('x')])",
    "interrupt": "import time\nraise KeyboardInterrupt",
    "recursion": "def g(n):\n    return g(n + 1) if n < 60 else 1 / 0\ng(0)",
    "deep": "def k(n):\n    if n:\n        return m(n)\n    raise KeyError(n)\ndef m(n):\n    return k(n - 1)\nk(30)",
    "loss half": "raise ValueError('loss 0.5')",
    "library": "import json\njson.loads('{')",
    "note": "error = ValueError('said')\nerror.add_note('and noted')\nraise error",
    "exit": "raise SystemExit(3)",
    "worker": "raise ValueError('in a worker\\nOriginal Traceback (most recent call last):\\n  a\\n  b\\nKeyError: 3')",
    "wide": "raise ValueError('x' * 5000)",
    "magic": "%time f(2)",
    "loop": "for i in range(3):\n    # one\n    x = torch.zeros(2, 5)\n    y = net(x)\n    print(y)",
    "plain mode": "%xmode Plain\nf(1)",
    "minimal mode": "%xmode Minimal\nf(1)",
    "without colours": "%xmode Context\n%colors NoColor\nf(1)",
}


@pytest.fixture(scope="module")
def errors() -> dict[str, Failed]:
    """By name, how each cell failed on rank 0."""
    found = {}
    for name, messages in zip(CELLS, run_cells(list(CELLS.values())), strict=True):
        told: Mapping[str, Any] = next((one for one in messages if one["kind"] == "error"), messages[-1])
        if told.get("ename"):
            found[name] = Failed(0, told["ename"], told["evalue"], tuple(told["traceback"]))
    return found


def on(error: Failed, ranks: range | list[int], **changes: Any) -> tuple[Failed, ...]:
    fields = {"name": error.name, "value": error.value, "traceback": error.traceback, **changes}
    return tuple(Failed(rank, **fields) for rank in ranks)


def rendered(*failures: Failed, size: int = 2, deaths: tuple[Died, ...] = (), interrupted: bool = False) -> list[str]:
    lines = RanksFailed(CellOutcome(failures, deaths, interrupted), size)._render_traceback_()
    assert all("\n" not in line for line in lines)
    return [without_colours(line) for line in lines]


@pytest.mark.parametrize("size", [1, 2, 64])
def test_one_error_takes_at_most_fifteen_lines(errors: dict[str, Failed], size: int) -> None:
    assert errors.keys() == CELLS.keys() - {"define"}
    for name, error in errors.items():
        lines = rendered(*on(error, range(size)), size=size)
        assert 2 <= len(lines) <= MAX_LINES == 15, name
        ranks = f"ranks 0-{size - 1}" if size > 1 else "rank 0"
        assert lines[0] == f"{error.name} on {ranks} ({size} of {size})"


def test_the_users_own_line_is_kept_with_its_arrow(errors: dict[str, Failed]) -> None:
    arrows = {
        "cell": "----> 2 b = a / 0",
        "other cell": "----> 3     return 1 / 0",
        "torch": "----> 3 net(torch.zeros(2, 5))",
        "chained": "----> 4     raise RuntimeError('it did not work') from e",
        "recursion": "----> 3 g(0)",
        "deep": "----> 7 k(30)",
        "library": "----> 2 json.loads('{')",
        "loop": "----> 4     y = net(x)",
        "without colours": "----> 3     return 1 / 0",
        "magic": "----> 3     return 1 / 0",
    }
    for name, arrow in arrows.items():
        assert arrow in rendered(*on(errors[name], range(2))), name


def test_the_error_of_a_worker_is_told_with_its_own_last_line(errors: dict[str, Failed]) -> None:
    lines = rendered(*on(errors["worker"], range(2)))
    assert lines[-4] == "ValueError: in a worker" and lines[-1] == "KeyError: 3"


def test_an_error_in_a_cell_reads_as_ipython_shows_it(errors: dict[str, Failed]) -> None:
    assert rendered(*on(errors["other cell"], range(2))) == [
        "ZeroDivisionError on ranks 0-1 (2 of 2)",
        "Cell In[3], line 2",
        "      1 a = 1",
        "----> 2 f(3)",
        "      3 b = 2",
        "Cell In[1], line 3, in f(x)",
        "      1 def f(x):",
        "      2     y = x + 1",
        "----> 3     return 1 / 0",
        "ZeroDivisionError: division by zero",
    ]


def test_frames_of_libraries_are_counted_and_the_raising_one_is_kept(errors: dict[str, Failed]) -> None:
    lines = rendered(*on(errors["torch"], range(2)))
    at = lines.index("… 2 frames in torch")
    assert lines[at + 1].startswith("File torch/nn/modules/linear.py:")
    assert "F.linear(input, self.weight, self.bias)" in lines[at + 2]
    assert lines[at + 3] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 3x4)"
    lines = rendered(*on(errors["library"], range(2)))
    assert any(line.startswith("File json/decoder.py:") for line in lines)


def test_colours_are_kept(errors: dict[str, Failed]) -> None:
    coloured = RanksFailed(CellOutcome(on(errors["cell"], range(2))), 2)._render_traceback_()
    assert coloured[0] == "\x1b[31mZeroDivisionError\x1b[39m on ranks 0-1 (2 of 2)"
    original = "\n".join(errors["cell"].traceback).split("\n")
    assert all(line in original for line in coloured[1:])
    plain = RanksFailed(CellOutcome(on(errors["without colours"], range(2))), 2)._render_traceback_()
    assert "\x1b" not in "".join(plain)


def test_a_syntax_error_shows_its_line_and_caret(errors: dict[str, Failed]) -> None:
    assert rendered(*on(errors["syntax"], range(2))) == [
        "SyntaxError on ranks 0-1 (2 of 2)",
        "Cell In[5], line 2",
        "    b = (1 +",
        "        ^",
        "SyntaxError: '(' was never closed",
    ]


def test_messages_of_several_lines(errors: dict[str, Failed]) -> None:
    assert rendered(*on(errors["many lines"], range(2)))[-3:] == ["ValueError: one", "two", "three"]
    assert rendered(*on(errors["very many lines"], range(2)))[-2:] == ["… 77 more lines", "this is 79"]
    assert rendered(*on(errors["note"], range(2)))[-2:] == ["ValueError: said", "and noted"]
    assert len(rendered(*on(errors["wide"], range(2)))[-1]) <= 300


def test_what_led_to_it_is_one_line(errors: dict[str, Failed]) -> None:
    cause = "ZeroDivisionError: division by zero (Cell In[1], line 3, in f(x))"
    assert rendered(*on(errors["chained"], range(2)))[-2:] == [
        "RuntimeError: it did not work",
        f"caused by {cause}",
    ]
    assert rendered(*on(errors["handling"], range(2)))[-2:] == ["KeyError: 'key'", f"raised while handling {cause}"]


def test_an_exception_group_has_its_traceback_elsewhere(errors: dict[str, Failed]) -> None:
    lines = rendered(*on(errors["group"], range(2)))
    assert lines[:2] == ["ExceptionGroup on ranks 0-1 (2 of 2)", "ExceptionGroup: many (2 sub-exceptions)"]


def test_a_recursion_is_not_told_frame_by_frame(errors: dict[str, Failed]) -> None:
    error = errors["recursion"]
    lines = rendered(*on(error, range(2)))
    assert sum("return g(n + 1)" in line and "->" in line for line in lines) == 1
    assert "… 60 frames in cells" in lines
    shallow = on(error, [1], traceback=error.traceback[:40] + error.traceback[-1:])
    assert rendered(error, *shallow)[0] == "ZeroDivisionError on ranks 0-1 (2 of 2)"


def test_values_that_differ_are_listed_by_rank(errors: dict[str, Failed]) -> None:
    first = errors["loss half"]
    other = on(first, [1], value="loss 0.7", traceback=tuple(x.replace("0.5", "0.7") for x in first.traceback))
    # The source line is the same in a real cell; only what is said differs.
    lines = rendered(first, *on(first, [1], value="loss 0.7"))
    assert lines[0] == "ValueError on ranks 0-1 (2 of 2)"
    assert lines[-3:] == ["ValueError: the messages differ", "  rank 0: loss 0.5", "  rank 1: loss 0.7"]
    assert rendered(first, *other)[-2:] == ["  rank 0: loss 0.5", "  rank 1: loss 0.7"]
    many = [on(first, [rank], value=f"loss {rank // 32 if rank < 62 else rank}")[0] for rank in range(64)]
    lines = rendered(*many, size=64)
    assert lines[-4:] == ["  ranks 0-31: loss 0", "  ranks 32-61: loss 1", "  rank 62: loss 62", "  rank 63: loss 63"]
    lines = rendered(*(on(first, [rank], value=f"loss {rank}")[0] for rank in range(64)), size=64)
    assert len(lines) <= MAX_LINES
    assert lines[-1] == "  … and other messages on 60 more ranks"


def test_the_first_line_that_differs_is_the_one_shown(errors: dict[str, Failed]) -> None:
    first = errors["many lines"]
    lines = rendered(first, *on(first, [1], value="one\nTWO\nthree"))
    assert lines[-3:] == ["ValueError: one", "  rank 0: two", "  rank 1: TWO"]


def test_addresses_do_not_differ(errors: dict[str, Failed]) -> None:
    first = on(errors["loss half"], [0], value="<object at 0x7f0123456789>")
    second = on(errors["loss half"], [1], value="<object at 0x7f9999999999>")
    assert "differ" not in "\n".join(rendered(*first, *second))


def test_different_errors_are_told_apart(errors: dict[str, Failed]) -> None:
    lines = rendered(*on(errors["cell"], [0, 2]), *on(errors["torch"], [1]), *on(errors["chained"], [3]), size=4)
    heads = [line for line in lines if " of 4)" in line]
    assert heads == [
        "ZeroDivisionError on ranks 0,2 (2 of 4)",
        "RuntimeError on rank 1 (1 of 4)",
        "RuntimeError on rank 3 (1 of 4)",
    ]
    assert "----> 3 net(torch.zeros(2, 5))" in lines
    assert "----> 4     raise RuntimeError('it did not work') from e" in lines
    assert len(lines) <= 15 + 8 + 8


def test_very_many_different_errors_are_named(errors: dict[str, Failed]) -> None:
    failures = [on(errors["cell"], [rank], name=f"Error{rank}")[0] for rank in range(64)]
    lines = rendered(*failures, size=64)
    assert len(lines) <= 15 + 3 * 8 + 6
    assert lines[-1] == "… 55 more errors"
    assert "Error4 on rank 4 (1 of 64): division by zero" in lines


def test_consequences_of_a_death_are_one_line_each(errors: dict[str, Failed]) -> None:
    died = Died(1, "was killed by SIGKILL", ("one", "", "Killed: two"))
    lost = on(errors["torch"], [0, 2, 3], name="PeerLost", value="rank 1 died\nmore")
    closed = on(errors["cell"], [4], name="RuntimeError", value="[pair.cc:538] Connection closed by peer [::1]:3")
    lines = rendered(*lost, *closed, size=5, deaths=(died,))
    assert lines == [
        "rank 1 was killed by SIGKILL (1 of 5)",
        "Last lines of standard error:",
        "  one",
        "  Killed: two",
        "%dist_restart 1 brings it back; the other ranks keep their variables.",
        "ranks 0,2-3: PeerLost: rank 1 died (a consequence)",
        "rank 4: RuntimeError: Connection closed by peer [::1]:3 (a consequence)",
    ]
    assert str(RanksFailed(CellOutcome((*lost, *closed), (died,)), 5)) == "rank 1 was killed by SIGKILL"


def test_an_error_beside_a_death_is_no_consequence(errors: dict[str, Failed]) -> None:
    died = (Died(2, "exited with 3", ()), Died(3, "exited with 3", ()))
    lines = rendered(*on(errors["cell"], [0, 1]), size=4, deaths=died)
    assert lines[0] == "ranks 2-3 exited with 3 (2 of 4)"
    assert "%dist_restart 2-3 brings them back; the other ranks keep their variables." in lines
    assert "----> 2 b = a / 0" in lines


def test_a_lost_peer_is_the_error_when_there_is_no_other(errors: dict[str, Failed]) -> None:
    lines = rendered(*on(errors["cell"], [0], name="PeerAbsent", value="rank 1 did not come"))
    assert lines[0] == "PeerAbsent on rank 0 (1 of 2)"
    assert "----> 2 b = a / 0" in lines


def test_an_interrupt_says_where_each_rank_was(errors: dict[str, Failed]) -> None:
    cut = on(errors["cell"], [1], name="RuntimeError", value="Connection closed by peer")
    lines = rendered(*on(errors["interrupt"], [0]), *cut, interrupted=True)
    assert lines == [
        "KeyboardInterrupt on rank 0 (1 of 2)",
        "Cell In[11], line 2",
        "      1 import time",
        "----> 2 raise KeyboardInterrupt",
        "rank 1: RuntimeError: Connection closed by peer (a consequence)",
    ]


def test_the_exception_is_one_line_and_travels(errors: dict[str, Failed]) -> None:
    failed = RanksFailed(CellOutcome(on(errors["many lines"], range(2))), 2)
    assert str(failed) == "ValueError on ranks 0-1 (2 of 2): one"
    assert str(pickle.loads(pickle.dumps(failed))) == str(failed)
    assert str(RanksFailed(CellOutcome(), 2)) == "the cell failed"


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/a/site-packages/torch/nn/x.py", "torch"),
        ("/a/lib/python3.11/dist-packages/six.py", "six"),
        ("~/.pyenv/versions/3.11.7/lib/python3.11/json/decoder.py", "json"),
        ("<frozen importlib._bootstrap>", "importlib._bootstrap"),
        ("<string>", "<string>"),
        ("~/code/src/paceline/replica/ddp.py", "paceline"),
        ("~/project/train.py", ""),
    ],
)
def test_whose_file_it_is(path: str, package: str) -> None:
    assert package_of(path) == package
