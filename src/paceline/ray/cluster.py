"""The Ray cluster of a job: an existing one, or one on this machine alone that is started for it."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import UsageError

ANSWER_S = 2.0
LOCAL = "127.0.0.2"  # of loopback; Ray takes the first one there to mean the address in the network
OBJECT_STORE_BYTES = 100 << 20  # Ray's store of objects, which is not used


@contextmanager
def connected(slots: int) -> Iterator[bool]:
    """Connect to a cluster: this process's own if it has one, that of RAY_ADDRESS or of this machine, or else a
    new one with room for `slots` ranks, which ends with the context. Yields whether it is a new one.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            "the engine ray needs Ray, which is not installed: pip install 'paceline[ray]', on every machine of the "
            "cluster in the same version"
        ) from error
    if ray.is_initialized():
        yield False
        return
    address = choose_address(os.environ)
    with _usage_unreported():
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, slots),  # ranks may share a core, as without Ray
                include_dashboard=False,
                _node_ip_address=LOCAL,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    try:
        yield not address
    finally:
        ray.shutdown()


def choose_address(environ: Mapping[str, str]) -> str:
    """The address of the cluster to use; empty for a new one. Raises `UsageError` if there is none where one should be.

    Ray itself would search for a minute for a cluster that has ended.
    """
    asked = environ.get("RAY_ADDRESS", "")
    if asked.startswith("ray://"):
        raise UsageError(
            f"RAY_ADDRESS={asked} is that of a Ray client, and the launcher must run in the cluster: start it there, "
            f"for instance with `ray job submit`"
        )
    if asked == "local":
        return ""
    named = asked if asked not in ("", "auto") else _noted_address(environ)
    if named and _answers(named):
        return named
    if asked:
        raise UsageError(
            f"no Ray cluster answers at RAY_ADDRESS={asked}: start one with `ray start --head`, or unset RAY_ADDRESS "
            f"to use this machine alone"
        )
    return ""


def _noted_address(environ: Mapping[str, str]) -> str:
    """Where `ray start` has noted the cluster of this machine."""
    try:
        return Path(environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _usage_unreported() -> Iterator[None]:
    """Ray reports how it is used, unless it is told not to by a variable of the process that starts it."""
    name = "RAY_USAGE_STATS_ENABLED"
    before = os.environ.get(name)
    os.environ[name] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
