"""Which lines of a cell run where."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from paceline.errors import UsageError
from paceline.notebook.cell.parts import Part, Where, split
from paceline.notebook.cell.source import logical_lines


def ranks(text: str, first_line: int = 1, spec: str | None = None) -> Part:
    return Part(Where.RANKS, text, first_line, spec)


def local(text: str, first_line: int = 1) -> Part:
    return Part(Where.LOCAL, text, first_line)


PYTHON = [
    "x = 1\ny = 2",
    "!ls -l | grep \"it's\n",
    "files = !ls\nprint(files)",
    "%time f()",
    "%matplotlib inline\n%load_ext autoreload\n%autoreload 2\n",
    "await f()",
    "@decorated\ndef f():\n    return 1\n\nf()  # the end",
    "?obj",
    "obj.method??",
    "x = 1\n# that is all",
    "print('100 %dist_init')",
    "x = (\n%dist_status\n)",
    "y = x \\\n%dist_status",
    "def f():\n    '''Call\n%dist_init -n 2\n    first.'''\n",
    'text = """\n%dist_init -n 2\n%%rank [0]\n"""',
    'f(r\'\\\', """\n%sync\n""")',
    "if True:\n    %dist_status\n",
    "s = 'x = %dist_pull y'",
    "print(a, sep='x = %dist_pull y')",
    "x %dist_modulus",
    "%synchronise\n%distant\n%load_ext paceline_of_others",
    "# %dist_init\nx",
    "s = 'open\n%time x",
    "d = {'%dist_init': 1,\n'%sync': 2}",
    "f\"{x!r:>10}\"\nf'''{\n%sync\n}'''",
]


@pytest.mark.parametrize("cell", PYTHON)
def test_plain_cells_go_to_the_ranks_whole(cell: str) -> None:
    assert split(cell) == [ranks(cell)]


@pytest.mark.parametrize("cell", ["", "\n\n", "   ", "# a thought\n\n   # and another"])
def test_nothing_to_run(cell: str) -> None:
    assert split(cell) == []


@pytest.mark.parametrize(
    ("head", "spec"),
    [
        ("%%rank [0]", "[0]"),
        ("%%rank[0]", "[0]"),
        ("%%rank 0", "0"),
        ("%%rank0", "0"),
        ("%%rank [0]  # only the first", "[0]"),
        ("%%rank   [0, 2]  ", "[0, 2]"),
        ("%%rank !0", "!0"),
        ("%%rank![0,1]", "![0,1]"),
        ("%%rank", ""),
        (" %%rank 0", "0"),
        ("%%distributed", None),
        ("%%distributed  # all of them", None),
        ("%%distributed [1]", "[1]"),
    ],
)
@pytest.mark.parametrize("above", ["", "\n\n", "# why\n\n", "  \n# %%time\n"])
def test_cells_for_some_ranks(above: str, head: str, spec: str | None) -> None:
    line = above.count("\n") + 2
    assert split(f"{above}{head}\nx = '''\n%dist_status'''\n%sync\n") == [
        ranks("x = '''\n%dist_status'''\n%sync\n", line, spec)
    ]
    assert split(above + head) == [ranks("", line, spec)]


def test_local_cells() -> None:
    assert split("%%local\nx = 1\n%dist_status") == [local("x = 1\n%dist_status", 2)]
    assert split("# here\n%%local # please\n%%time\nx") == [local("%%time\nx", 3)]
    with pytest.raises(UsageError, match="expected nothing behind %%local, got 'x = 1'"):
        split("%%local x = 1")


def test_other_cell_magics_run_on_the_ranks() -> None:
    assert split("%%time\nf()\n%sync") == [ranks("%%time\nf()\n%sync")]
    assert split("%%ranking\nf()") == [ranks("%%ranking\nf()")]
    # IPython would not see the magic below a comment.
    assert split("\n# how long?\n%%time\nf()\n") == [ranks("%%time\nf()\n", 3)]
    assert split("%%bash\necho 'it\n%dist_status\n") == [ranks("%%bash\necho 'it\n%dist_status\n")]
    assert split("%%time?") == [ranks("%%time?")]
    assert split("%%rank 0\n%%time\nf()") == [ranks("%%time\nf()", 2, "0")]


@pytest.mark.parametrize(
    "line",
    [
        *("%dist_init -n 2", "%dist_status", "%sync", "%dist_init --num-processes 2 # it's (two"),
        *("%load_ext paceline", "%unload_ext  paceline", "%reload_ext paceline"),
        *("x = %dist_pull y", "x, d['a=b'] = %dist_pull y", "x: int = %dist_pull y", "%dist_init \\\n  -n 2"),
        *("%dist_init?", "%dist_init??", "?%dist_init", "?dist_init", "dist_init?", "%%rank?", "?%%rank", "%sync?"),
    ],
)
def test_own_line_magics_stay_here(line: str) -> None:
    assert split(line) == [local(line)]
    height = line.count("\n") + 1
    assert split(f"a = 1\n{line}\nb = 2\n") == [
        ranks("a = 1\n"),
        local(f"{line}\n", 2),
        ranks("b = 2\n", 2 + height),
    ]


def test_a_cell_that_starts_the_ranks_and_uses_them() -> None:
    cell = "# start\n%load_ext paceline\n%dist_init -n 2\n\nimport torch\nx = torch.ones(2)  # %sync\n"
    assert split(cell) == [
        local("%load_ext paceline\n", 2),
        local("%dist_init -n 2\n", 3),
        ranks("\nimport torch\nx = torch.ones(2)  # %sync\n", 4),
    ]
    assert split("%dist_init -n 2\n\n# now\n%%rank [0]\nx\n") == [local("%dist_init -n 2\n"), ranks("x\n", 5, "[0]")]
    assert split("%dist_init -n 2\n%%time\nx\n") == [local("%dist_init -n 2\n"), ranks("%%time\nx\n", 2)]
    assert split("%dist_init -n 2\n# done") == [local("%dist_init -n 2\n")]


def test_a_cell_magic_below_code_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"expected %%rank \[0\] at the begin of a cell, got it on line 3"):
        split("x = 1\n\n%%rank [0]\ny")
    with pytest.raises(UsageError, match="expected %%local at the begin"):
        split("%sync\nx = 1\n%%local\ny")


def test_windows_line_ends() -> None:
    assert split("x = 1\r\n%sync\r\ny\r\n") == [ranks("x = 1\n"), local("%sync\n", 2), ranks("y\n", 3)]
    assert split("%%rank [0]\r\nprint(1)\r\n") == [ranks("print(1)\n", 2, "[0]")]
    assert split("%dist_init \\\r\n -n 2\r\nx") == [local("%dist_init \\\n -n 2\n"), ranks("x", 3)]


def test_pasted_cells() -> None:
    assert split("    %dist_init -n 2\n    x = 1\n") == [local("    %dist_init -n 2\n"), ranks("    x = 1\n", 2)]
    assert split("  %%rank [0]\n  x") == [ranks("  x", 2, "[0]")]
    assert split("In [3]: %dist_init -n 2\nIn [4]: x") == [local("%dist_init -n 2\n"), ranks("x", 2)]
    assert split(">>> x = 1\n>>> %sync\n") == [ranks("x = 1\n"), local("%sync\n", 2)]
    assert split("\n>>> def f():\n...     pass\n") == [ranks("\ndef f():\n    pass\n")]


def test_other_ends_of_lines_are_no_lines() -> None:
    cell = "s = 'a\u2028b\x0cc'\n%sync"
    assert split(cell) == [ranks("s = 'a\u2028b\x0cc'\n"), local("%sync", 2)]


LINES = st.sampled_from(
    [
        *("x = 1", "", "# comment's (", "    y", "!ls 'it (", "files = !ls (", "%time f('", "%sync", "%dist_init -n 2"),
        *("z = %dist_pull z", "f(", ")", "'''", '"""', "x = [1,", "]", "a \\", "if x:", "@d", "'", '"%sync"', "obj?"),
        *("%dist_init \\", "  %sync", "\t", "{'a': '''", "x = '''a''' # '''"),
    ]
)


@given(st.lists(LINES, max_size=10), st.booleans())
def test_every_line_is_kept_once_in_order(lines: list[str], ends: bool) -> None:
    cell = "\n".join(lines) + ("\n" if ends else "")
    parts = split(cell)
    at = 0
    for part in parts:
        start = sum(len(line) + 1 for line in lines[: part.first_line - 1])
        skipped = cell[at:start]
        assert all(not line.strip() or line.lstrip().startswith("#") for line in skipped.split("\n"))
        assert cell[start : start + len(part.text)] == part.text
        at = start + len(part.text)
    assert all(not line.strip() or line.lstrip().startswith("#") for line in cell[at:].split("\n"))
    assert all(part.text.strip() for part in parts)


@given(st.text(alphabet="%!?#'\"\\\n\r ()[]=xr0", max_size=40))
def test_any_text_can_be_split(cell: str) -> None:
    plain = cell.replace("\r\n", "\n").replace("\r", "\n")
    kept = "".join(part.text for part in split(cell))
    assert kept in (plain, plain[plain.find("%%") :]) or not (kept or COMMENTS.sub("", plain).strip())


COMMENTS = re.compile(r"^\s*#.*$", re.MULTILINE)
# Without `obj?`: below an open bracket in a shell command IPython loses that command.
STATEMENTS = st.sampled_from(
    [
        *(
            "x = 1\n",
            "\n",
            "# it's (\n",
            "!ls 'it (\n",
            "files = !ls (\n",
            "%time f('\n",
            "z = %dist_pull z\n",
        ),
        *("?obj\n", "f(\n%sync\n)\n", "s = '''\n!ls\n'''\n", "a \\\n%b\n", "%dist_init \\\n -n 2\n", "x == y\n"),
        *(
            "if x:\n    !ls (\n    y = %env\n",
            "d['%a'] = {\n'=': 1}  # = %b\n",
            "x != y\n",
            "f(a=1)[b:=2]\n",
            ",f a b\n",
        ),
    ]
)


@given(st.lists(STATEMENTS, min_size=1, max_size=6).map("".join))
def test_commands_are_what_ipython_takes_for_commands(cell: str) -> None:
    lines = list(logical_lines(cell))
    assert "".join(line.text for line in lines) == cell
    python = "".join(f"{line.target}{line.number}\n" if line.command else line.text for line in lines)
    commands = [line for line in lines if line.command]
    ipython = TransformerManager()
    theirs = ipython.transform_cell(cell)
    assert len(re.findall(r"get_ipython\(\)|^f\(\"", theirs, re.MULTILINE)) == len(commands)
    # With all commands taken out, nothing is left that IPython would change.
    assert ipython.transform_cell(python).strip() == python.strip()
