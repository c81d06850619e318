"""One rank of one contender: `python -m paceline.bench.worker ADDRESS LABEL RANK`.

It connects to the conductor, carries out its requests, and ends when the conductor does.
"""

import os
import sys
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

from paceline.bench.checkout import import_from
from paceline.bench.contenders import find_contender
from paceline.bench.loading import load_named
from paceline.bench.messages import receive, send
from paceline.bench.processes import Order
from paceline.bench.tasks import Task


def make_task(order: Order, rank: int) -> Task:
    """Make the task that the conductor ordered."""
    own = find_contender(order.contender).task if ".py:" in order.contender else None
    task: Task = (own or load_named(order.task))(order.spec, order.contender, rank, order.size)
    if order.sources:
        import_from(order.sources)
    return task


def serve(connection: Connection, rank: int) -> None:
    """Call the methods of a task as the conductor asks, until it ends."""

    def barrier() -> None:
        send(connection, ("barrier", None))
        receive(connection)

    task: Task | None = None
    while True:
        do, *arguments = receive(connection, settings=True)
        try:
            if do == "load":
                task = make_task(arguments[0], rank)
                answer: Any = task.bind()
            else:
                answer = getattr(task, do)(*arguments, *((barrier,) if do == "run" else ()))
        except Exception as error:  # noqa: BLE001 (whatever a peer raises is the contender's result)
            traceback.print_exc()
            send(connection, ("failed", f"{type(error).__name__}: {error}"))
            continue
        send(connection, ("answer", answer))
        if do == "close":
            return


def main(arguments: list[str]) -> None:
    address, label, rank_text = arguments
    rank = int(os.environ["PMI_RANK"]) if rank_text == "mpi" else int(rank_text)
    with Client(address, "AF_UNIX") as connection:
        send(connection, (label, rank))
        try:
            serve(connection, rank)
        except (EOFError, OSError):
            sys.exit(1)
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers leave threads behind that can crash an interpreter while it shuts down; there is nothing to save.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
