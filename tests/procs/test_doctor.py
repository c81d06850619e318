"""`paceline doctor` on this machine, healthy and not."""

import os
import subprocess
import sys


def doctor(**environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "paceline.cli.doctor"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=55, check=False, env={**os.environ, **environment}
    )


def test_a_healthy_machine() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    for about in ("environment", "launcher", "devices", "ports", "limits", "backends", "all-reduce", "choice"):
        assert f"{about:<12} " in done.stdout
    assert "2 ranks over gloo: 25 MiB in " in done.stdout
    assert "2 ranks over paceline's choice: 25 MiB in " in done.stdout
    assert "transport='auto' takes shared memory for CPU tensors" in done.stdout
    assert done.stdout.endswith("nothing is broken\n")


def test_what_is_broken_is_said() -> None:
    done = doctor(RANK="0", GLOO_SOCKET_IFNAME="no-such-interface")
    assert done.returncode == 1
    assert "RANK=0 is set but WORLD_SIZE is not" in done.stdout
    assert "GLOO_SOCKET_IFNAME=no-such-interface; interfaces here: lo" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("broken")
