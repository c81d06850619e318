"""Memory that several processes map. It has no name: a memfd is released with the last process that holds it."""

import ctypes
import mmap
import os
import socket
import weakref
from array import array
from collections.abc import Callable

import torch

from paceline.collectives.shm.room import shortage
from paceline.errors import SharedMemoryFull

Buffer = ctypes.Array[ctypes.c_char]
PAGE = 4096
WORTH_ASKING = 1 << 20  # below this, checking how much memory is left costs more than it saves


class Descriptor:
    """A file descriptor that is closed when it is no longer referenced."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


def receive(connection: socket.socket, nbytes: int, count: int) -> tuple[bytes, list[Descriptor]]:
    """The next message, of at most `nbytes`, with at most `count` descriptors, which no program inherits.

    `socket.recv_fds` of Python 3.11 takes flags and does not pass them on.
    """
    room, flags = socket.CMSG_LEN(count * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    data, told, *_ = connection.recvmsg(nbytes, room, flags)
    numbers = array("i")
    for level, kind, content in told:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) // numbers.itemsize * numbers.itemsize])
    return data, [Descriptor(number) for number in numbers]


def create(nbytes: int, what: str) -> Descriptor:
    """A memfd of `nbytes` whose pages exist: a shortage raises an error here, instead of a SIGBUS later."""
    # Pages of a memfd are overcommitted, and the OOM killer would act later.
    if nbytes >= WORTH_ASKING and (why := shortage(nbytes)):
        raise _full(nbytes, what, why)
    try:
        memory = Descriptor(os.memfd_create("paceline", os.MFD_CLOEXEC))
        os.ftruncate(memory.number, nbytes)
        os.posix_fallocate(memory.number, 0, nbytes)
    except OSError as error:
        raise _full(nbytes, what, str(error.strerror)) from error
    return memory


def map_shared(memory: Descriptor, nbytes: int, *, populate: bool, freed: Callable[[], None] | None = None) -> Buffer:
    """Map a memfd. The buffer unmaps itself when it is collected; `freed` is called just before.

    Why not `mmap.mmap`
    -------------------
    It keeps a descriptor open for as long as the mapping lives (until Python 3.13), one per bucket and peer: 64 ranks
    would run into the usual limit of 1024. And it tells a weak reference of its end only after the address is free, so
    that another thread may already have new memory there, which would be mistaken for this mapping.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, memory.number, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _full(nbytes, "a mapping", os.strerror(ctypes.get_errno()))
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors may outlive the interpreter's last Python code, and the kernel unmaps anyway.
    weakref.finalize(buffer, _unmap, libc.munmap, address, nbytes, freed).atexit = False
    return buffer


def _unmap(munmap: Callable[[int, int], int], address: int, nbytes: int, freed: Callable[[], None] | None) -> None:
    if freed is not None:
        freed()
    munmap(address, nbytes)


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer, kept mapped for as long as the tensor or a view of it lives."""
    with torch.inference_mode(False):  # otherwise the tensor could not be written outside inference mode
        return torch.frombuffer(buffer, dtype=torch.uint8)


def loose_tensor_of(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer, without keeping it mapped."""
    return tensor_of((ctypes.c_char * len(buffer)).from_address(ctypes.addressof(buffer)))


def _full(nbytes: int, what: str, why: str) -> SharedMemoryFull:
    return SharedMemoryFull(f"could not get {nbytes:,} bytes of shared memory for {what}: {why}; free memory first")
