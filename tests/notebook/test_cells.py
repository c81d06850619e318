"""Which lines of a cell run where."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.notebook.cell_parts import CellPart, Where, split


def ranks(text: str, first_line: int = 1, spec: str | None = None) -> CellPart:
    return CellPart(Where.RANKS, text, first_line, spec)


def local(text: str, first_line: int = 1) -> CellPart:
    return CellPart(Where.LOCAL, text, first_line)


def magic(name: str, rest: str = "", first_line: int = 1) -> CellPart:
    """A line magic of ours, as IPython calls it."""
    text = f"get_ipython().run_line_magic({name!r}, {rest!r})\n"
    return CellPart(Where.LOCAL, text, first_line, command=" ".join(["run_line_magic", name, *rest.split()]))


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
        ("%%distributed", "all"),
        ("%%distributed  # all of them", "all"),
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
    with pytest.raises(UsageError, match="expected nothing after %%local, got 'x = 1'"):
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
        *("x = %dist_pull y", "x, d['a=b'] = %dist_pull y", "x: int = %dist_pull y"),
        *("%pip install x", "!pip install x", "found = !pip list", "!python3 -m pip install x", "%conda list"),
        *("%dist_init?", "%dist_init??", "?%dist_init", "?dist_init", "dist_init?", "%%rank?", "?%%rank", "%sync?"),
    ],
)
def test_own_line_magics_stay_here(line: str) -> None:
    (alone,) = split(line)
    assert (alone.where, alone.first_line) == (Where.LOCAL, 1) and "get_ipython()" in alone.text
    before, own, after = split(f"a = 1\n{line}\nb = 2\n")
    assert (before, after) == (ranks("a = 1\n"), ranks("b = 2\n", 3))
    assert (own.where, own.text, own.first_line) == (Where.LOCAL, alone.text, 2)


def test_a_cell_that_starts_the_ranks_and_uses_them() -> None:
    cell = "\n# start\n%load_ext paceline\n%dist_init -n 2\n\nimport torch\nx = torch.ones(2)  # %sync\n!ls\n"
    assert split(cell) == [
        magic("load_ext", "paceline", 3),
        magic("dist_init", "-n 2", 4),
        ranks("\nimport torch\nx = torch.ones(2)  # %sync\nget_ipython().system('ls')\n", 5),
    ]
    assert split("%dist_init -n 2\n# done") == [magic("dist_init", "-n 2")]
    assert split("%dist_init \\\n -n 2") == [magic("dist_init", "  -n 2")]


def test_a_cell_magic_below_code_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"expected %%rank \[0\] at the beginning of a cell, got it on line 3"):
        split("x = 1\n\n%%rank [0]\ny")
    with pytest.raises(UsageError, match="expected %%local at the begin"):
        split("%sync\nx = 1\n%%local\ny")


def test_windows_line_ends() -> None:
    assert split("x = 1\r\n%sync\r\ny\r\n") == [ranks("x = 1\n"), magic("sync", "", 2), ranks("y\n", 3)]
    assert split("%%rank [0]\r\nprint(1)\r\n") == [ranks("print(1)\n", 2, "[0]")]


def test_pasted_cells() -> None:
    assert split("    %dist_init -n 2\n    x = 1\n") == [magic("dist_init", "-n 2"), ranks("x = 1\n", 2)]
    assert split("  %%rank [0]\n  x") == [ranks("x", 2, "[0]")]
    assert split("In [3]: %dist_init -n 2\nIn [4]: x") == [magic("dist_init", "-n 2"), ranks("x\n", 2)]
    assert split(">>> x = 1\n>>> %sync\n") == [ranks("x = 1\n"), magic("sync", "", 2)]
    assert split("\n>>> def f():\n...     pass\n") == [ranks("def f():\n    pass\n", 2)]


def test_other_ends_of_lines_are_no_lines() -> None:
    cell = "s = 'a\u2028b\x0cc'\n%sync"
    assert split(cell) == [ranks("s = 'a\u2028b\x0cc'\n"), magic("sync", "", 2)]


LINES = st.sampled_from(
    [
        *("x = 1", "", "# comment's (", "    y", "!ls 'it (", "files = !ls (", "%time f('", "%sync", "%dist_init -n 2"),
        *("z = %dist_pull z", "f(", ")", "'''", '"""', "x = [1,", "]", "a \\", "if x:", "@d", "'", '"%sync"', "obj?"),
        *("%dist_init \\", "  %sync", "\t", "{'a': '''", "x = '''a''' # '''"),
    ]
)


@given(st.lists(LINES, max_size=10), st.booleans())
def test_parts_are_in_order_and_none_is_empty(lines: list[str], ends: bool) -> None:
    parts = split("\n".join(lines) + ("\n" if ends else ""))
    numbers = [part.first_line for part in parts]
    assert numbers == sorted(set(numbers)) and all(part.text.strip() for part in parts)


@given(st.text(alphabet="%!?#'\"\\\n\r ()[]=xr0", max_size=40))
def test_any_text_can_be_split(cell: str) -> None:
    assert split(cell) or not COMMENTS.sub("", cell.replace("\r", "\n")).strip()


COMMENTS = re.compile(r"^\s*#.*$", re.MULTILINE)
