"""The effect of each kind of fault on its process."""

import ctypes
import errno
import gc
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import IllegalMove, PacelineError
from paceline.faults.fault import FOR_EVER, Fault
from paceline.process_status import memory_limit

OOM_CHUNK = 64 << 20
_OPENS = {"open": 2, "os.mkdir": -1}  # audit events that need room on a disk, and where their flags are
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NOT_ON_DISK = ("/dev/", "/proc/", "/sys/")


class InjectedFault(PacelineError, RuntimeError):
    """What the fault `raise` raises."""


def inject(fault: Fault) -> None:
    """Make the fault happen now. Returns when it is over, if it ends."""
    _ACTIONS[fault.kind](fault)


# ------------------------------------------------------------------------------------------------------- the process


def _signal(number: int) -> Callable[[Fault], None]:
    return lambda _: os.kill(os.getpid(), number)


def _exit(fault: Fault) -> None:
    os._exit(fault.code)


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"this is the injected fault {fault}")


def _stop(fault: Fault) -> None:
    if fault.seconds == FOR_EVER:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    wake = subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    wake.wait()


def _freeze(fault: Fault) -> None:
    """Wait for a mutex that is never released: unlike a sleep, no signal ends that."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)  # PyDLL holds the interpreter's lock
    libc.pthread_mutex_lock(mutex)
    if fault.seconds == FOR_EVER:
        libc.pthread_mutex_lock(mutex)
    until = time.time() + fault.seconds
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))


def _spin(fault: Fault) -> None:
    end = time.monotonic() + fault.seconds
    while time.monotonic() < end:
        pass


def _sleep(fault: Fault) -> None:
    end = time.monotonic() + fault.seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 3600.0))


# --------------------------------------------------------------------------------------------------------- resources


def _out_of_memory(fault: Fault) -> None:
    limit = memory_limit()
    if limit is None:
        raise IllegalMove(
            f"the fault {fault} is refused: this control group has no memory limit, so the whole machine would run out "
            f"of memory; run the job in one that has, for instance with `systemd-run --user --scope -p MemoryMax=4G`"
        )
    Path("/proc/self/oom_score_adj").write_text("1000")  # this process and no other
    taken = []
    for _ in range(limit // OOM_CHUNK + 1):
        taken.append(bytearray(os.urandom(1) * OOM_CHUNK))
    raise IllegalMove(
        f"the fault {fault} took {limit} bytes of memory, the limit of the control group, and was not killed"
    )


def _fill_disk(fault: Fault) -> None:
    end = time.monotonic() + fault.seconds

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event not in _OPENS or time.monotonic() >= end:
            return
        path = args[0]
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        if isinstance(path, str | bytes | os.PathLike) and not os.fsdecode(path).startswith(_NOT_ON_DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))

    sys.addaudithook(refuse)


def _no_files(_: Fault) -> None:
    """Lower the limit to the open descriptors, and fill the gaps."""
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1  # noqa: PTH208 - numbers, not paths
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise


def _to_worker(number: int) -> Callable[[Fault], None]:
    def act(fault: Fault) -> None:
        pids = sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)
        if not pids:
            raise IllegalMove(f"the fault {fault} is not possible: this rank has no DataLoader worker now")
        os.kill(pids[0], number)

    return act


# ----------------------------------------------------------------------------------------------------------- numbers


def _parameter(fault: Fault) -> tuple[Any, Any]:
    """The optimizer and the parameter that the fault changes."""
    import torch

    # Not isinstance(), which asks objects that do more than answer.
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
    pairs = {id(param): (one, param) for one in optimizers for group in one.param_groups for param in group["params"]}
    if fault.tensor >= len(pairs):
        raise IllegalMove(
            f"the fault {fault} is not possible: the optimizers of this rank have {len(pairs)} parameters; expected "
            f"tensor= below that"
        )
    return list(pairs.values())[fault.tensor]


def _flip(fault: Fault) -> None:
    flip_bit(_parameter(fault)[1], fault)


def _flip_state(fault: Fault) -> None:
    optimizer, param = _parameter(fault)
    tensors = [
        value for value in optimizer.state.get(param, {}).values() if getattr(value, "shape", None) == param.shape
    ]
    if not tensors:
        raise IllegalMove(f"the fault {fault} is not possible: the optimizer keeps no state of that parameter yet")
    flip_bit(tensors[0], fault)


def flip_bit(tensor: Any, fault: Fault) -> None:
    """Flip one bit of the first element, hidden from autograd."""
    import torch

    size = tensor.element_size()
    if fault.bit >= 8 * size:
        raise IllegalMove(f"the fault {fault} is not possible: elements have {8 * size} bits; expected bit= below that")
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    first = tensor.data.as_strided((1,), (1,), tensor.storage_offset()).view(whole)
    mask = 1 << fault.bit
    first ^= mask - (1 << 8 * size) if size > 1 and fault.bit == 8 * size - 1 else mask


def _on_next_gradient(change: Callable[[Fault, Any], Any]) -> Callable[[Fault], None]:
    def act(fault: Fault) -> None:
        def changed(gradient: Any) -> Any:
            handle.remove()
            return change(fault, gradient)

        handle = _parameter(fault)[1].register_hook(changed)

    return act


def _with_nan(_: Fault, gradient: Any) -> Any:
    spoilt = gradient.clone()
    spoilt.view(-1)[0] = math.nan
    return spoilt


_ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _signal(signal.SIGKILL),
    "crash": _signal(signal.SIGSEGV),
    "exit": _exit,
    "raise": _raise,
    "preempt": _signal(signal.SIGTERM),
    "stop": _stop,
    "freeze": _freeze,
    "spin": _spin,
    "sleep": _sleep,
    "slow": _sleep,
    "oom": _out_of_memory,
    "disk-full": _fill_disk,
    "no-files": _no_files,
    "kill-worker": _to_worker(signal.SIGKILL),
    "stop-worker": _to_worker(signal.SIGSTOP),
    "flip": _flip,
    "flip-state": _flip_state,
    "nan": _on_next_gradient(_with_nan),
    "scale": _on_next_gradient(lambda fault, gradient: gradient * fault.factor),
}
