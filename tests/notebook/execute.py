"""Run as a program: a notebook from standard input, executed as Jupyter does it, goes to standard output."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat as untyped_nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

nbformat: Any = untyped_nbformat
GUTTER = re.compile(r"^\[\d[\d,-]*\] ?", re.MULTILINE)
CELL_S = 40  # a cell that takes longer is interrupted, and fails


def execute(notebook: Any) -> Any:
    """With this interpreter, in a process of its own, so that no sockets and loops are left in the one that tests.

    A cell with the tag raises-exception may fail, any other may not. A cell whose metadata say `stop_after_s` is
    interrupted then, as by the stop button.
    """
    command = [sys.executable, str(Path(__file__))]
    text = nbformat.writes(notebook)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    return nbformat.reads(done.stdout, 4)


def said(notebook: Any, cell_id: str) -> str:
    """What a cell printed, without the numbers of the ranks before its lines."""
    outputs = cell_of(notebook, cell_id).outputs
    return GUTTER.sub("", "".join(output.text for output in outputs if output.output_type == "stream"))


def number(notebook: Any, cell_id: str, behind: str) -> float:
    """The first number behind some words that a cell printed."""
    text = said(notebook, cell_id)
    found = re.search(re.escape(behind) + r"\D*?(-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?)", text)
    assert found, f"no number behind {behind!r} in: {text}"
    return float(found[1].replace(",", ""))


def shown(notebook: Any, cell_id: str, kind: str) -> list[str]:
    """What a cell displayed in some MIME type."""
    outputs = cell_of(notebook, cell_id).outputs
    return [output.data[kind] for output in outputs if "data" in output and kind in output.data]


def errors(notebook: Any) -> dict[str, str]:
    """The message of the error of every cell that failed."""
    return {
        cell.id: output.evalue
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    }


def cell_of(notebook: Any, cell_id: str) -> Any:
    return next(cell for cell in notebook.cells if cell.id == cell_id)


async def run(notebook: Any) -> None:
    kernel = AsyncKernelManager(transport="ipc")
    kernel._kernel_spec = KernelSpec(**get_kernel_dict())  # whatever kernels are installed on this machine
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout_func=lambda cell: cell.metadata.get("stop_after_s", CELL_S),
        interrupt_on_timeout=True,
    )
    try:
        await client.async_execute()
    finally:
        await kernel.shutdown_kernel(now=True)


if __name__ == "__main__":
    given = nbformat.reads(sys.stdin.read(), 4)
    asyncio.run(run(given))
    sys.stdout.write(nbformat.writes(given))
