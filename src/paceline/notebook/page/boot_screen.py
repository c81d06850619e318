"""The boot of ranks as a person sees it: a bar for each, then rank → device."""

import sys
from types import TracebackType
from typing import Any

from paceline.notebook.fleet.boot import BootView, Stage

STAGES = tuple(Stage)
WIDTH = 12


class BootScreen:
    """Shows one boot in place. In a plain terminal, where nothing can be replaced, only its end."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = ""

    def __enter__(self) -> "BootScreen":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handle is None and self._last and error is None:
            sys.stdout.write(self._last + "\n")

    def show(self, view: BootView) -> None:
        text = draw(view)
        if text == self._last:
            return
        self._last = text
        if _can_replace():
            from IPython.display import display

            bundle = {"text/plain": text}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


def draw(view: BootView) -> str:
    """A line for every rank, and one below them."""
    lines = []
    for facts, stage in zip(view.ranks, view.stages, strict=True):
        done = STAGES.index(stage) + 1
        bar = "━" * (WIDTH * done // len(STAGES))
        where = facts.device if facts.gpu_id is None else f"GPU {facts.gpu_id} ({facts.device})"
        ready = f"ready → {where}, pid {facts.pid}" if stage is Stage.READY else stage.value
        lines.append(f"rank {facts.rank}  {bar:<{WIDTH}}  {ready}")
    if all(stage is Stage.READY for stage in view.stages):
        count = f"{len(view.ranks)} rank{'s' if len(view.ranks) > 1 else ''}"
        torch = "".join(f", torch {facts.torch}" for facts in view.ranks[:1] if facts.torch)
        lines.append(f"{count} in {view.seconds:.1f} s{torch}")
        lines.append("Plain cells run on all of them; %%rank [0] chooses, %%local stays here.")
    if view.note:
        lines.append(view.note)
    return "\n".join(lines)


def _can_replace() -> bool:
    """Whether what is displayed can be updated: in notebooks it can, in a terminal each update is one more line."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None
