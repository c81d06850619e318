"""Progress bars of tqdm on a rank: text, whichever of its modules a cell takes them from.

`tqdm.notebook`, and `tqdm.auto` inside a kernel, draw widgets. Those of a rank reach no page: one would see a bar that
stays at 0 %. Text does reach it, and is drawn there as the bars of all ranks.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DRAW_WIDGETS = ("tqdm.autonotebook", "tqdm.notebook")


def draw_bars_as_text() -> None:
    """From now on these modules, once a cell imports them, hold the bars of `tqdm.std`."""
    if not any(isinstance(finder, _Bars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Bars())


class _Bars(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in DRAW_WIDGETS else None

    def exec_module(self, module: ModuleType) -> None:
        std: Any = import_module("tqdm.std")
        names = {"tqdm": std.tqdm, "trange": std.trange, "tqdm_notebook": std.tqdm, "tnrange": std.trange}
        module.__dict__.update(names, __all__=list(names))
