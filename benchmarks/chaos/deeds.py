"""What is done to a job from outside: to its processes, its sockets, its files, its memory.

Needs Linux; some of it needs root, `ss` of iproute2, or strace.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FSYNC_S = 2.0  # so long every fsync fails: a save comes after 10 steps
KILL_SAVE_S = 20.0  # within which a save has to come
MEMORY = Path("/sys/fs/cgroup/memory")  # version 1
LISTENS, ESTABLISHED = "0A", "01"  # as /proc/net/tcp has them
GARBAGE = (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\0" * 64, b"\xff" * 4096, b"")


def signals(name: str) -> Callable[[Mapping[int, int], int], None]:
    """To the launcher."""
    return lambda _, launcher: os.kill(launcher, getattr(signal, f"SIG{name}"))


def reset_sockets(ranks: Mapping[int, int], _: int) -> None:
    """Reset every TCP connection between two ranks."""
    owner = {inode: pid for pid in ranks.values() for inode in _inodes(pid)}
    here = {(local, remote): owner[inode] for state, local, remote, inode in _tcp() if inode in owner}
    pairs = {pair for pair, pid in here.items() if here.get((pair[1], pair[0]), pid) != pid}
    if not pairs:
        raise RuntimeError("there is no connection between ranks to reset")
    for local, remote in pairs:
        expression = ["sport", "=", f":{local}", "and", "dport", "=", f":{remote}"]
        subprocess.run(["ss", "-K", "-tn", *expression], check=True, capture_output=True, timeout=10)


def fail_fsync(ranks: Mapping[int, int], _: int) -> None:
    with ExitStack() as undo:
        for pid in ranks.values():
            undo.enter_context(_strace(pid, "fsync,fdatasync", "error=EIO"))
        time.sleep(FSYNC_S)


def kill_in_save(ranks: Mapping[int, int], _: int) -> None:
    """Kill rank 0 as it renames what it has written."""
    with _strace(ranks[0], "rename,renameat,renameat2", "signal=KILL:when=1") as tracer, suppress(TimeoutError):
        tracer.wait(KILL_SAVE_S)


@contextmanager
def _strace(pid: int, calls: str, what: str) -> "Iterator[subprocess.Popen[bytes]]":
    words = ["strace", "-f", "-o", os.devnull, "-p", str(pid), "-e", f"trace={calls}", "-e", f"inject={calls}:{what}"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tracer:
        yield tracer
        tracer.terminate()


def visit_as_strangers(ranks: Mapping[int, int], launcher: int) -> None:
    """Connect to all that the job listens on, say what does not belong there, and leave a connection idle."""
    owned = {inode for pid in (launcher, *ranks.values()) for inode in _inodes(pid)}
    ports = sorted({local for state, local, _, inode in _tcp() if state == LISTENS and inode in owned})
    if not ports:
        raise RuntimeError("the job listens on no port")
    draw = random.Random(1)
    with ExitStack() as kept:
        for port in ports:
            for garbage in (*GARBAGE, draw.randbytes(512)):
                with suppress(OSError):
                    stranger = kept.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                    stranger.sendall(garbage)
        time.sleep(1)


DEEDS: dict[str, Callable[[Mapping[int, int], int], None]] = {
    "TERM": signals("TERM"),
    "reset": reset_sockets,
    "fsync": fail_fsync,
    "kill-save": kill_in_save,
    "strangers": visit_as_strangers,
}


def _inodes(pid: int) -> Iterator[str]:
    """Of the sockets of a process."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]


def _tcp() -> Iterator[tuple[str, int, int, str]]:
    """State, local port, remote port and inode of every TCP socket."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            local, remote = (int(fields[number].rpartition(":")[2], 16) for number in (1, 2))
            yield fields[3], local, remote, fields[9]


# ------------------------------------------------------------------------------------------------------------- files


def damage(folder: Path, what: str) -> None:
    """Do something to the newest checkpoint in a job's folder."""
    if what == "lose-one":
        newest = _newest(folder / "rank-1")
        (shutil.rmtree if newest.is_dir() else Path.unlink)(newest)
        return
    newest = _newest(folder)
    largest = max(
        (path for path in [newest, *newest.rglob("*")] if path.is_file()), key=lambda path: path.stat().st_size
    )
    size = largest.stat().st_size
    with largest.open("r+b") as file:
        if what == "truncate":
            file.truncate(size // 2)
            return
        file.seek(size // 2)
        byte = file.read(1)[0]
        file.seek(size // 2)
        file.write(bytes([byte ^ 1 << 6]))


def _newest(folder: Path) -> Path:
    """torch's file, or the folder of our newest snapshot."""
    found = sorted((folder / "checkpoints").glob("step-*")) or sorted(folder.glob("checkpoint.pt"))
    if not found:
        raise RuntimeError("there is no checkpoint to damage")
    return found[-1]


# ------------------------------------------------------------------------------------------------------------ memory


@contextmanager
def memory_group(mib: int) -> Iterator[list[str]]:
    """The words before a command that put it into a control group of so much memory."""
    group = MEMORY / f"chaos-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(mib << 20))
        yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
        until = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        group.rmdir()
