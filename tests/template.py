"""A process that has imported torch, and forks others off itself: they start in milliseconds instead of seconds.

For tests/pool.py. A worker is a child of the template, so the template reaps it, when it is asked to and not before:
until then its id is its own.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

READY_S = 60.0
_PR_SET_PDEATHSIG = 1
_NUMBER = 8  # bytes of an id or exit code on the line
_CODE = "import sys; sys.path[:] = {path!r}; from tests.template import serve; serve({fd}, {parent})"


class TemplateFailed(Exception):
    """The template died, or did not answer."""


class Template:
    """Our end."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(READY_S)
        with theirs:
            code = _CODE.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
            command = [sys.executable, "-X", "faulthandler", "-c", code]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def descriptor(self) -> int:
        return self._line.fileno()

    def fork(self, descriptor: int) -> "Fork":
        """A new process that has run tests/pool.py:serve with its copy of `descriptor`."""
        socket.send_fds(self._line, [b"fork"], [descriptor])
        return Fork(self, self._answer())

    @property
    def closed(self) -> bool:
        return self._process.poll() is not None

    def reap(self, pid: int) -> int:
        if self.closed:
            return -signal.SIGKILL  # its workers die with it
        self._line.send(_packed(pid))
        return self._answer()

    def close(self) -> None:
        """End it, and with it the workers that are left."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> int:
        data = b""
        try:
            data = self._line.recv(_NUMBER)
        except TimeoutError as error:
            raise TemplateFailed(f"no answer within {READY_S:g} s from the template of the workers") from error
        finally:
            if not data:  # it died, or a test's own timeout came: an answer that is still to come would be misread
                self.close()
        if not data:
            raise TemplateFailed("the template of the workers has died")
        return int.from_bytes(data, "little", signed=True)


class Fork:
    """One process that was forked off."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        self._template = template

    @property
    def dead(self) -> bool:
        return self._template.closed or bool(select.select([self.descriptor], [], [], 0)[0])

    def end(self) -> int:
        """Kill and reap. Returns the exit code as subprocess gives it."""
        if not self.dead:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        os.close(self.descriptor)
        return self._template.reap(self.pid)


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER, "little", signed=True)


# --------------------------------------------------------------------------------------------------- in the template


def serve(descriptor: int, parent: int) -> None:
    """Fork and reap as asked, until the other end goes away."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends workers by id
    import torch

    import tests.models  # noqa: F401 - brings paceline
    from tests.pool import serve as work

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # makes torch load its compiler, which takes a second

    line = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, _NUMBER, 1)
        if descriptors:
            line.send(_packed(_fork(line, work, descriptors[0])))
        elif request:
            _, status = os.waitpid(int.from_bytes(request, "little", signed=True), 0)
            line.send(_packed(os.waitstatus_to_exitcode(status)))
        else:
            return


def _fork(line: socket.socket, work: Callable[[int], None], descriptor: int) -> int:
    template = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    code = 1
    try:
        _die_with(template)
        line.close()
        work(descriptor)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _die_with(parent: int) -> None:
    # Whatever happens; the second look covers a parent that was gone before the request.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
