"""Which Ray cluster a job uses. What it does there is in tests/procs/test_ray.py."""

import socket
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.ray.cluster import choose_address


def note(folder: Path, address: str) -> dict[str, str]:
    """A variable that makes `ray start` note its address in `folder`."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address + "\n")
    return {"RAY_TMPDIR": str(folder)}


def test_the_one_that_is_named_if_it_answers(reserved_port: int) -> None:
    address = f"127.0.0.1:{reserved_port}"
    with pytest.raises(UsageError, match=f"no Ray cluster answers at RAY_ADDRESS={address}"):
        choose_address({"RAY_ADDRESS": address})
    with socket.create_server(("127.0.0.1", reserved_port)):
        assert choose_address({"RAY_ADDRESS": address}) == address


def test_the_one_that_was_started_here_or_none(tmp_path: Path, reserved_port: int) -> None:
    assert choose_address({"RAY_TMPDIR": str(tmp_path)}) == ""
    environ = note(tmp_path, f"127.0.0.1:{reserved_port}")
    assert choose_address(environ) == ""  # it is gone
    with pytest.raises(UsageError, match="RAY_ADDRESS=auto"):
        choose_address({**environ, "RAY_ADDRESS": "auto"})
    with socket.create_server(("127.0.0.1", reserved_port)):
        assert choose_address(environ) == choose_address({**environ, "RAY_ADDRESS": "auto"})
        assert choose_address(environ) == f"127.0.0.1:{reserved_port}"
        assert choose_address({**environ, "RAY_ADDRESS": "local"}) == ""


def test_a_client_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="ray job submit"):
        choose_address({"RAY_ADDRESS": "ray://10.0.0.1:10001"})
