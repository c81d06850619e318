"""Standard output and error of a rank, as Python code sees them."""

from typing import Any

from ipykernel.iostream import OutStream


class RankStream(OutStream):
    """Sends text to the notebook. What is written to the descriptor itself is read there from outside of the rank.

    Stock ipykernel puts a pipe in the place of descriptors 1 and 2 and reads it in a thread of the same process: what a
    crash says last would stay in that pipe. So descriptors are left alone (`--IPKernelApp.capture_fd_output=False`).
    """

    flush_interval = 0.05

    def fileno(self) -> int:
        """For those who hand the stream to a child."""
        return 1 if self.name == "stdout" else 2

    def write(self, string: str) -> int:
        """Half of a surrogate pair is no Unicode: the message with it, and all else in it, could not be sent."""
        if isinstance(string, str) and not string.isascii():
            string = string.encode(errors="backslashreplace").decode()
        return int(super().write(string) or 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "watchfd": False})  # type: ignore[no-untyped-call]
