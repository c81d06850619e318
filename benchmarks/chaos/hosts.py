"""Two hosts as network namespaces of this machine, and what can happen to the link between them.

Needs root and iproute2.
"""

import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

ADDRESSES = ("10.201.79.1", "10.201.79.2")
NOBODY = "02:00:00:00:00:99"
PORT = 29511


def sh(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """The names of two namespaces and of their ends of the link."""

    names: tuple[str, str]
    interfaces: tuple[str, str]
    over: threading.Event = field(default_factory=threading.Event)  # the job has ended

    def command(self, rank: int, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.names[rank], *words]

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of one rank, as a launcher of several machines sets them."""
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        store = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        return {**place, **store, "GLOO_SOCKET_IFNAME": self.interfaces[rank]}

    def cut(self, side: int) -> None:
        """What this side sends reaches nobody, and nobody tells it so."""
        neighbour = (ADDRESSES[1 - side], "lladdr", NOBODY, "dev", self.interfaces[side], "nud", "permanent")
        sh("ip", "-n", self.names[side], "neigh", "replace", *neighbour)

    def mend(self, side: int) -> None:
        sh("ip", "-n", self.names[side], "neigh", "del", ADDRESSES[1 - side], "dev", self.interfaces[side])

    def slow(self) -> None:
        for name, interface in zip(self.names, self.interfaces, strict=True):
            limit = ("tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *limit)

    def partition(self) -> None:
        self.cut(0)
        self.cut(1)

    def flap(self) -> None:
        for _ in range(2):
            self.partition()
            if self.over.wait(1):
                return
            self.mend(0)
            self.mend(1)
            if self.over.wait(4):
                return

    def happens(self, what: str) -> Callable[[], None]:
        deeds: dict[str, Callable[[], None]] = {
            "partition": self.partition,
            "one-way": partial(self.cut, 1),
            "flap": self.flap,
            "slow": self.slow,
        }
        return deeds[what]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, and take them down again."""
    if os.getuid() != 0:
        raise PermissionError("network namespaces need root")
    mark = secrets.token_hex(3)
    hosts = Hosts((f"chaos-{mark}-a", f"chaos-{mark}-b"), (f"ch{mark}a", f"ch{mark}b"))
    with ExitStack() as undo:
        for name in hosts.names:
            sh("ip", "netns", "add", name)
            undo.callback(sh, "ip", "netns", "del", name)
        sh("ip", "link", "add", hosts.interfaces[0], "type", "veth", "peer", "name", hosts.interfaces[1])
        for name, interface, address in zip(hosts.names, hosts.interfaces, ADDRESSES, strict=True):
            sh("ip", "link", "set", interface, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for device in ("lo", interface):
                sh("ip", "-n", name, "link", "set", device, "up")
        yield hosts
