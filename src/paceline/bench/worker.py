"""One rank of one contender: `python -m paceline.bench.worker ADDRESS LABEL RANK`.

It connects to the conductor, does what it is told, and ends with it.
"""

import os
import socket
import sys
import traceback
from typing import Any

from paceline.bench.checkout import import_from
from paceline.bench.spec import AllReduceSpec, HooksSpec, MachinerySpec, StepSpec, from_json
from paceline.bench.tasks import LineUp, Task
from paceline.bench.wire import HungUp, Line, exit_when_closed


def make_task(order: dict[str, Any], rank: int) -> Task:
    """The task that the conductor's first message asks for."""
    kind, label, size, spec = order["kind"], order["label"], order["size"], order["spec"]
    if kind == "torch":
        from paceline.bench.tasks.step import StepTask

        return StepTask(from_json(StepSpec, spec), label, rank, size)
    if kind == "tensorflow":
        from paceline.bench.tasks.tensorflow import TensorFlowTask

        return TensorFlowTask(from_json(StepSpec, spec), rank, size)
    if kind == "allreduce":
        from paceline.bench.tasks.allreduce import AllReduceTask

        return AllReduceTask(from_json(AllReduceSpec, spec), label, rank, size)
    if kind == "hooks":
        from paceline.bench.tasks.hooks import HooksTask

        return HooksTask(from_json(HooksSpec, spec), label, rank, size)
    if kind == "machinery":
        from paceline.bench.tasks.machinery import MachineryTask

        return MachineryTask(from_json(MachinerySpec, spec), label)
    raise AssertionError(f"no such task: {kind}")


def serve(line: Line, rank: int) -> None:
    """Answer the conductor until it says that it is over."""

    def line_up() -> None:
        line.send({"at": "line"})
        line.receive()

    task: Task | None = None
    while True:
        message = line.receive()
        try:
            if task is None:
                task = make_task(message, rank)
                if message["sources"]:
                    import_from(message["sources"])
                answer: dict[str, Any] = {}
            else:
                answer = _answer(task, message, line_up)
        except Exception as error:  # noqa: BLE001 (whatever a peer raises is the contender's result)
            traceback.print_exc()
            line.send({"failed": f"{type(error).__name__}: {error}"})
            continue
        line.send({"answer": answer})
        if message["do"] == "end":
            return


def _answer(task: Task, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
    verb = message["do"]
    if verb == "meet":
        return {"port": task.meet()}
    if verb == "build":
        return task.build(message["ports"])
    if verb == "run":
        return task.run(message, line_up)
    if verb == "finish":
        return task.finish()
    task.close()
    return {}


def main(arguments: list[str]) -> None:
    address, label, rank_text = arguments
    rank = int(os.environ["PMI_RANK"]) if rank_text == "mpi" else int(rank_text)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        exit_when_closed(connection)
        line = Line(connection)
        line.send({"hello": label, "rank": rank, "pid": os.getpid()})
        try:
            serve(line, rank)
        except HungUp:
            sys.exit(1)
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers leave threads behind that can crash an interpreter which ends in good order; there is nothing to save.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
