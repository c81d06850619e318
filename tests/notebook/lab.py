"""A real JupyterLab on loopback, and a notebook of it open in a real Chromium."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# As root there is no sandbox, and what a browser looks up by itself is not there on a machine without network.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Every process that starts below the server or the browser has this in its environment, also when its parent is gone.
MARK = "PACELINE_TEST_LAB"
SETTINGS: dict[str, dict[str, object]] = {
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells stay in the page, also those out of sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # A busy machine may take longer than a person would wait.
    "completer-extension/manager": {"providerTimeout": 5000},
}
WIDTH = 1000
DONE = re.compile(r"\[\d+\]")


def notebook_of(cells: Sequence[str]) -> dict[str, object]:
    empty: dict[str, object] = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": [{**empty, "id": f"cell-{place}", "source": cell} for place, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


class Lab:
    """A server with one notebook, in a folder of its own. `with` starts it, and ends it with all that it started."""

    def __init__(self, folder: Path, port: int, cells: Sequence[str]) -> None:
        self._folder = folder
        self._port = port
        self._cells = cells
        self._token = secrets.token_hex(16)
        self._server: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            MARK: secrets.token_hex(16),
            "HOME": str(folder),
            "JUPYTER_TOKEN": self._token,
        }
        for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
            self.environment[f"JUPYTER_{name}"] = str(folder / name.lower())
        for name in ("SETTINGS", "WORKSPACES"):
            self.environment[f"JUPYTERLAB_{name}_DIR"] = str(folder / name.lower())
        self.environment["IPYTHONDIR"] = str(folder / "ipython")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/doc/tree/notebook.ipynb?token={self._token}"

    def __enter__(self) -> "Lab":
        self._folder.mkdir()
        for name, setting in SETTINGS.items():
            path = self._folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(setting))
        root = self._folder / "root"
        root.mkdir()
        (root / "notebook.ipynb").write_text(json.dumps(notebook_of(self._cells)))
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
        command += [f"--ServerApp.port={self._port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}"]
        with (self._folder / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                command, cwd=root, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def wait(self) -> None:
        """Until it answers."""
        assert self._server is not None
        deadline = time.monotonic() + 30
        while True:
            assert self._server.poll() is None and time.monotonic() < deadline, self.log()
            with suppress(OSError), urllib.request.urlopen(self.url, timeout=5) as page:
                page.read()
                return
            time.sleep(0.05)

    def log(self) -> str:
        return (self._folder / "server.log").read_text()

    def __exit__(self, *failed: object) -> None:
        """As Ctrl+C does, confirmed: the server ends its kernels. What is still there after that is killed, by id."""
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(15)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        left = self.processes()
        deadline = time.monotonic() + 3
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert failed[0] is not None or not left, f"these processes were left behind: {left}"

    def processes(self) -> dict[int, str]:
        """All that began with this server, or with the browser: number and command."""
        mark = f"{MARK}={self.environment[MARK]}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone meanwhile, or not ours to read
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        return found


class Page:
    """The open notebook, seen and used as a person does: keys, the stop button, and what stands below a cell."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._cells = page.locator(".jp-Notebook .jp-CodeCell")

    def wait(self) -> None:
        """Until the kernel is there, and the first cell has the keyboard."""
        from playwright.sync_api import expect

        expect(self._cells.first).to_be_visible(timeout=30_000)
        # Keys that come before the kernel has answered start nothing.
        expect(self.page.locator("#jp-main-statusbar").get_by_text("| Idle")).to_be_visible(timeout=30_000)
        self._cells.first.locator(".cm-content").click()

    def begin(self) -> None:
        """Start the selected cell and select the next one."""
        self.page.keyboard.press("Shift+Enter")

    def finish(self, cell: int, within_s: float = 20.0) -> str:
        """Wait until a cell is over; returns the text below it."""
        from playwright.sync_api import expect

        expect(self._cells.nth(cell).locator(".jp-InputPrompt")).to_have_text(re.compile(DONE), timeout=within_s * 1000)
        return self.output(cell)

    def run(self, cell: int, within_s: float = 20.0) -> str:
        self.begin()
        return self.finish(cell, within_s)

    def below(self, cell: int) -> Any:
        """A locator of what stands below a cell."""
        return self._cells.nth(cell).locator(".jp-Cell-outputArea")

    def output(self, cell: int) -> str:
        text: str = self.below(cell).inner_text()
        return text

    def is_over(self, cell: int) -> bool:
        return DONE.search(self._cells.nth(cell).locator(".jp-InputPrompt").inner_text()) is not None

    def stop(self) -> None:
        """Press the button."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def type(self, text: str) -> None:
        """Into the selected cell."""
        self.press("Enter")
        self.page.keyboard.type(text)

    def complete(self) -> list[str]:
        """What Tab offers behind the text that was typed last."""
        self.press("Tab")
        names = self.page.locator(".jp-Completer:visible .jp-Completer-match")
        names.first.wait_for(timeout=8000)
        return [str(name) for name in names.all_inner_texts()]

    def source(self, cell: int) -> str:
        text: str = self._cells.nth(cell).locator(".cm-content").inner_text()
        return text

    def picture(self, path: Path, last: int) -> None:
        """Of the notebook until this cell, without what surrounds it."""
        content = self.page.locator(".jp-Notebook .jp-WindowedPanel-outer").first
        self.page.set_viewport_size({"width": WIDTH, "height": 2500})
        content.evaluate("node => { node.scrollTop = 0; }")
        around, end = content.bounding_box(), self._cells.nth(last).bounding_box()
        height = end["y"] + end["height"] - 2 - around["y"]  # the frame of the next cell reaches into this one
        clip = {"x": around["x"], "y": around["y"], "width": around["width"], "height": height}
        self.page.screenshot(path=path, clip=clip)


@contextmanager
def open_page(lab: Lab, chromium: str) -> Iterator[Page]:
    """The notebook of a server in a browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS), env={**lab.environment})
        try:
            page = browser.new_page(viewport={"width": WIDTH, "height": 1400})
            lab.wait()
            page.goto(lab.url)
            opened = Page(page)
            opened.wait()
            yield opened
        finally:
            browser.close()
