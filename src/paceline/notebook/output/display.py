"""Where the output of a cell goes: a notebook, a terminal, or a file."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.display import clear_output, publish_display_data

from paceline.launch.tracebacks import without_colours


class Display(Protocol):
    """What a cell can show. Text is whole lines."""

    draws: bool  # figures and tables, not only text
    replaces: bool  # shown items can be replaced or cleared

    def stream(self, name: str, text: str) -> None:
        """Write to "stdout" or "stderr"."""

    def rich(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None, update: bool
    ) -> None: ...

    def live(self, display_id: str, text: str) -> None:
        """Show lines that will change, in the place where they were first shown."""

    def settle(self, display_id: str) -> None:
        """These lines will not change again."""

    def clear(self, waits: bool) -> None: ...


class IPythonDisplay:
    """The output of the cell that this IPython runs now."""

    def __init__(self) -> None:
        shell = get_ipython()
        is_captured = shell is not None and isinstance(shell.display_pub, CapturingDisplayPublisher)
        is_notebook = hasattr(shell, "kernel")
        self.draws = is_notebook or is_captured
        self.replaces = is_notebook and not is_captured
        self._live = _NotebookLines() if self.replaces else _TerminalLines() if sys.stdout.isatty() else _LiveLines()

    def stream(self, name: str, text: str) -> None:
        self._live.erase()
        write(name, text)
        self._live.draw()

    def rich(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None, update: bool) -> None:
        _publish(dict(data), dict(metadata), display_id, update)

    def live(self, display_id: str, text: str) -> None:
        self._live.put(display_id, text)

    def settle(self, display_id: str) -> None:
        self._live.settle(display_id)

    def clear(self, waits: bool) -> None:
        clear_output(wait=waits)


def _publish(data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
    transient = {} if display_id is None else {"display_id": display_id}
    publish_display_data(data, metadata, transient=transient, update=update)


def write(name: str, text: str) -> None:
    """The streams are looked up at each call: `%%capture` replaces them."""
    stream = sys.stderr if name == "stderr" else sys.stdout
    stream.write(text)
    stream.flush()


class _LiveLines:
    """Lines that change, in a file: only their last state is written, because nothing can be redrawn."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, display_id: str, text: str) -> None:
        if text == self._texts.get(display_id):
            return
        self.erase()
        self._texts[display_id] = text
        self.draw()

    def settle(self, display_id: str) -> None:
        self.erase()
        if text := self._texts.pop(display_id, ""):
            write("stdout", text + "\n")
        self.draw()

    def erase(self) -> None:
        """Make room for text above these lines."""

    def draw(self) -> None:
        """Show them again, below that text."""


class _TerminalLines(_LiveLines):
    """On a terminal they are the last lines; text goes above them."""

    def __init__(self) -> None:
        super().__init__()
        self._height = 0

    def erase(self) -> None:
        if self._height:
            write("stdout", f"\x1b[{self._height}A\r\x1b[J")
        self._height = 0

    def draw(self) -> None:
        # A line that wraps would take two rows, and the next drawing would leave one of them behind.
        width = shutil.get_terminal_size().columns - 1
        lines = [_shortened(line, width) for text in self._texts.values() for line in text.split("\n")]
        if lines:
            write("stdout", "".join(f"{line}\n" for line in lines))
        self._height = len(lines)


class _NotebookLines(_LiveLines):
    """A notebook replaces a display by its name; text goes below."""

    def put(self, display_id: str, text: str) -> None:
        if text != self._texts.get(display_id):
            _publish({"text/plain": text}, {}, display_id, display_id in self._texts)
        self._texts[display_id] = text

    def settle(self, display_id: str) -> None:
        self._texts.pop(display_id, None)


def _shortened(line: str, width: int) -> str:
    plain = without_colours(line)
    return line if len(plain) <= width else plain[: width - 1] + "…"
