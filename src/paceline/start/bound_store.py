"""The addresses at which this process listens for its group: the store, and gloo."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore

_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE = "lo"


def host_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens at `address` and nowhere else, at any free port for 0. Raises OSError or DistNetworkError.

    By default torch's store listens on all interfaces and trusts every client. It must do so where `address` is a host
    name, which may mean something else on another machine or, behind an address translation, not belong to this
    machine.
    """
    listener = _listener(address, port)
    if listener is not None:
        port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket | None:
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except socket.gaierror:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener


def is_loopback(address: str) -> bool:
    """Whether an address is only reachable from this machine."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


@contextmanager
def gloo_on_loopback(wanted: bool) -> Iterator[None]:
    """Make gloo groups formed inside listen on loopback, if `wanted` and unless the user has named an interface.

    By default gloo listens at the address of this machine's host name, which is often its network address; a variable
    is the only way to tell torch otherwise.
    """
    if not wanted or os.environ.get(_INTERFACE):
        yield
        return
    os.environ[_INTERFACE] = LOOPBACK_INTERFACE
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
