"""Machines that are network namespaces of this one, joined by a switch, and what can happen to their cables.

Needs root and iproute2; a test that asks for them is skipped where they cannot be made.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SUBNET = "10.201.80"  # known inside the namespaces only
INTERFACE = "eth0"


class NotPossible(Exception):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Host:
    """One machine. The first is where the switch is, so only the cables of the others can be cut."""

    namespace: str
    switch: str
    port: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` there, under a host name of its own. No other process comes between."""
        named = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"', self.namespace)
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def cut(self) -> None:
        """Pull its cable: nothing arrives any more, and nobody on the other side is told."""
        sh("ip", "-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        sh("ip", "-n", self.switch, "link", "set", self.port, "up")

    def slow_down(self, rate: str, burst: str = "32kb") -> None:
        """Let no more than `rate` leave it or come to it; both as `tc` takes them."""
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
        sh("tc", "-n", self.namespace, "qdisc", "add", "dev", INTERFACE, *limit)
        sh("tc", "-n", self.switch, "qdisc", "add", "dev", self.port, *limit)


@contextmanager
def joined_hosts(count: int) -> Iterator[list[Host]]:
    """Make them, and take them down again. Raises NotPossible."""
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        raise NotPossible(f"there is no `{missing[0]}` here to make network namespaces with")
    mark = secrets.token_hex(3)
    switch = f"paceline-{mark}-0"
    hosts = [
        Host(f"paceline-{mark}-{number}", switch, f"port{number}", f"{SUBNET}.{number + 1}") for number in range(count)
    ]
    with ExitStack() as undo:
        try:
            for host in hosts:
                sh("ip", "netns", "add", host.namespace)
                # Interfaces go with their namespace.
                undo.callback(sh, "ip", "netns", "del", host.namespace)
                sh("ip", "-n", host.namespace, "link", "set", "lo", "up")
            sh("ip", "-n", switch, "link", "add", INTERFACE, "type", "bridge")
            for host in hosts[1:]:
                ends = ("type", "veth", "peer", "name", host.port, "netns", switch)
                sh("ip", "-n", host.namespace, "link", "add", INTERFACE, *ends)
                sh("ip", "-n", switch, "link", "set", host.port, "master", INTERFACE, "up")
            for host in hosts:
                sh("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
                sh("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
        except OSError as error:
            raise NotPossible(f"network namespaces cannot be made here: {error}") from error
        yield hosts


def sh(*words: str) -> None:
    """Run a command that changes the network."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}`: {done.stderr.strip()}")
