"""Where the output of a cell goes: a notebook's page, a terminal, or a file."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.display import clear_output, publish_display_data

from paceline.notebook.page.tracebacks import without_colours


class Show(Protocol):
    """What a cell can show. Text is whole lines."""

    draws: bool  # figures and tables, not only text
    replaces: bool  # what was shown can be shown anew, or cleared

    def stream(self, name: str, text: str) -> None:
        """Write to "stdout" or "stderr"."""

    def rich(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None, update: bool
    ) -> None: ...

    def live(self, display_id: str, text: str) -> None:
        """Show lines that are going to change, in the place where they were first shown."""

    def settle(self, display_id: str) -> None:
        """These lines do not change any more."""

    def clear(self, waits: bool) -> None: ...


class IPythonShow:
    """The output of the cell that this IPython runs now."""

    def __init__(self) -> None:
        shell = get_ipython()
        is_captured = shell is not None and isinstance(shell.display_pub, CapturingDisplayPublisher)
        has_page = hasattr(shell, "kernel")
        self.draws = has_page or is_captured
        self.replaces = has_page and not is_captured
        self._live = _Page() if self.replaces else _Terminal() if sys.stdout.isatty() else _LastStates()

    def stream(self, name: str, text: str) -> None:
        self._live.lift()
        write(name, text)
        self._live.draw()

    def rich(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None, update: bool) -> None:
        transient = {} if display_id is None else {"display_id": display_id}
        _publish(dict(data), dict(metadata), transient, update)

    def live(self, display_id: str, text: str) -> None:
        self._live.put(display_id, text)

    def settle(self, display_id: str) -> None:
        self._live.settle(display_id)

    def clear(self, waits: bool) -> None:
        clear_output(wait=waits)


def _publish(data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, str], update: bool) -> None:
    publish_display_data(data, metadata, transient=transient, update=update)


def write(name: str, text: str) -> None:
    """Looked up at each call: `%%capture` puts others in their place."""
    stream = sys.stderr if name == "stderr" else sys.stdout
    stream.write(text)
    stream.flush()


class _Live(Protocol):
    def put(self, display_id: str, text: str) -> None: ...

    def settle(self, display_id: str) -> None: ...

    def lift(self) -> None:
        """Make room for text above the lines that change."""

    def draw(self) -> None: ...


class _Page:
    """A notebook's page replaces a display by its name."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def put(self, display_id: str, text: str) -> None:
        update = display_id in self._known
        self._known.add(display_id)
        _publish({"text/plain": text}, {}, {"display_id": display_id}, update)

    def settle(self, display_id: str) -> None:
        self._known.discard(display_id)

    def lift(self) -> None:
        """Text goes below."""

    def draw(self) -> None:
        """It stands there already."""


class _Terminal:
    """The lines that change are the last ones on a terminal; text goes above them."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._height = 0

    def put(self, display_id: str, text: str) -> None:
        self.lift()
        self._texts[display_id] = text
        self.draw()

    def settle(self, display_id: str) -> None:
        self.lift()
        if text := self._texts.pop(display_id, ""):
            write("stdout", text + "\n")
        self.draw()

    def lift(self) -> None:
        if self._height:
            write("stdout", f"\x1b[{self._height}A\r\x1b[J")
        self._height = 0

    def draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        lines = [_narrow(line, width) for text in self._texts.values() for line in text.split("\n")]
        if lines:
            write("stdout", "".join(f"{line}\n" for line in lines))
        self._height = len(lines)


class _LastStates:
    """A file cannot be drawn in: of lines that change it gets the last state."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, display_id: str, text: str) -> None:
        self._texts[display_id] = text

    def settle(self, display_id: str) -> None:
        if text := self._texts.pop(display_id, ""):
            write("stdout", text + "\n")

    def lift(self) -> None:
        """There is nothing to make room for."""

    def draw(self) -> None:
        """Only when they are settled."""


def _narrow(line: str, width: int) -> str:
    """A line that wraps would take two rows, and the next drawing would leave one of them behind."""
    plain = without_colours(line)
    return line if len(plain) <= width else plain[: width - 1] + "…"
