"""The Ray cluster of a job: one that is there, or one of this machine alone that is started for it."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import UsageError

ANSWER_S = 2.0
LOCAL = "127.0.0.2"  # of loopback; Ray takes the first one there to mean the address in the network
OBJECT_STORE_BYTES = 100 << 20  # Ray's store of objects, of which we use none


@contextmanager
def connected(slots: int) -> Iterator[bool]:
    """Be connected to a cluster: this process's own if it has one, that of RAY_ADDRESS or of this machine, or else a
    new one with room for `slots` ranks, which ends with this. Yields whether it is a new one.
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
    address = os.environ.get("RAY_ADDRESS") or _started_here()
    with _usage_unreported():
        if address and address != "local":
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                raise UsageError(
                    f"no Ray cluster answers at RAY_ADDRESS={address}: start one with `ray start --head`, or unset "
                    f"RAY_ADDRESS to use this machine alone"
                ) from error
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


def _started_here() -> str:
    """The address of a cluster that `ray start` has begun on this machine; empty when none answers.

    Ray keeps it in a file, and looks for a cluster that is gone for a minute.
    """
    try:
        address = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError):
        return ""
    return address


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
