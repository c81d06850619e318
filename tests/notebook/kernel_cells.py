"""Run as a program: runs cells (a JSON list on standard input) in a real kernel and writes what it published."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

KINDS = ("error", "stream", "display_data", "update_display_data", "execute_result", "clear_output")


def run_cells(cells: list[str]) -> list[list[dict[str, Any]]]:
    """In a process of its own, so that no sockets are left in the one that tests."""
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def run_one(client: BlockingKernelClient, code: str) -> list[dict[str, Any]]:
    """Messages of one cell, each with its type as `kind`; the reply is the last."""
    sent = client.execute(code)
    found = []
    while True:
        message = client.get_iopub_msg(timeout=40)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
        if message["msg_type"] in KINDS:
            found.append({"kind": message["msg_type"], **message["content"]})
    while True:
        reply = client.get_shell_msg(timeout=40)
        if reply["parent_header"].get("msg_id") == sent:
            return [*found, {"kind": "reply", **reply["content"]}]


def main() -> None:
    # A folder of its own: by default sockets get names in the working folder that other kernels have too.
    with TemporaryDirectory() as folder:
        _run(KernelManager(transport="ipc", ip=f"{folder}/kernel", connection_file=f"{folder}/kernel.json"))


def _run(kernel: KernelManager) -> None:
    kernel.start_kernel()
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=40)
        sys.stdout.write(json.dumps([run_one(client, code) for code in json.load(sys.stdin)]))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
