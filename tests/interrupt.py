"""Ctrl-C for a rank that is blocked in a wait for another."""

import os
import signal
import subprocess
import sys
import time


def interrupt_blocked_rank(script: str, *arguments: str) -> None:
    """Run `script` on two ranks, interrupt rank 0 once both are ready, and see that it is felt and that it exits.

    The script takes its rank as first argument, says "ready", and on KeyboardInterrupt "interrupted" and exits with 7.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        blocked = ranks[0]
        assert blocked.stdout is not None
        started = time.monotonic()
        blocked.send_signal(signal.SIGINT)
        assert blocked.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started < 0.3
        assert blocked.wait(timeout=10) == 7
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
