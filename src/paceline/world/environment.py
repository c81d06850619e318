"""Reads the environment variables of launchers with checks; errors name the variable."""

from collections.abc import Mapping

from paceline.errors import WorldError

# torchrun's default; used where a scheduler names the host of rank 0 and leaves the port to us.
DEFAULT_PORT = 29500
MAX_DIGITS = 18  # of a number: no rank is larger


class Variables:
    """The environment of one process, read with checks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        """The first of `names` that is set and not blank, or an empty string."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), "")

    def has(self, *names: str) -> bool:
        """Whether all of `names` are set and not blank."""
        return all(self.text(name) for name in names)

    def first(self, *names: str) -> str:
        """The first name that is set and not blank; the first of all when none is."""
        return next((name for name in names if self.has(name)), names[0])

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        text = self.text(name)
        if not text and default is not None:
            return default
        # int() alone would also take "1_000" and other scripts' digits, which no launcher means.
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise WorldError(
                f"{name}={text[:80]!r} is not a rank or a count: expected a whole number of at least 0; correct or "
                f"unset it"
            )
        return int(text)

    def port(self, name: str, default: int = 0) -> int:
        """A TCP port, or `default` when the variable is not set."""
        port = self.integer(name, default)
        if self.has(name) and not 0 < port < 65536:
            raise WorldError(f"{name}={port} is not a TCP port: expected 1 to 65535")
        return port

    def rank_and_size(self, rank_name: str, size_name: str, default: tuple[int, int] | None = None) -> tuple[int, int]:
        """A rank and the size it must be below. A variable that is not set has its `default`, made to fit the rank."""
        rank = self.integer(rank_name, None if default is None else default[0])
        size = self.integer(size_name, None if default is None else max(default[1], rank + 1))
        if rank >= size:
            raise WorldError(
                f"{rank_name}={rank} and {size_name}={size} contradict each other: "
                f"expected 0 <= {rank_name} < {size_name}"
            )
        return rank, size


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback address by its form, without a DNS lookup."""
    return address.lower() in ("localhost", "::1") or address.startswith("127.")


def node_of(rank: int, local_rank: int, local_size: int) -> int:
    """The node of `rank` if ranks are placed in blocks, which is every launcher's default."""
    return max(0, rank - local_rank) // max(1, local_size)
