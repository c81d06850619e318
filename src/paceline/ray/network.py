"""Which network interface carries an address of this machine."""

import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv4Interface

SIOCGIFADDR = 0x8915
SIOCGIFNETMASK = 0x891B


def interface_of(address: str) -> str:
    """The name of the interface for this IPv4 address, as gloo and NCCL want it; empty when there is none."""
    wanted, found = IPv4Address(address), _interfaces()
    exact = [name for name, interface in found.items() if interface.ip == wanted]
    # The kernel tells the first address of an interface only; the others are in the same network.
    near = [name for name, interface in found.items() if wanted in interface.network]
    return next(iter([*exact, *near]), "")


def _interfaces() -> dict[str, IPv4Interface]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asking.fileno(), question, request)[20:24])
                    for question in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:  # it has none
                continue
            found[name] = IPv4Interface(f"{address}/{mask}")
    return found
