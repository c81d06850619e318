"""One rank of `paceline train`: `python -m paceline.train FOLDER`, started by a launcher."""

import logging
import os
import signal
import sys
from pathlib import Path

from paceline.checkpoint.checkpoint_errors import NotSaved
from paceline.errors import NotFiniteGradients, PacelineError, UsageError
from paceline.rank_report import report
from paceline.train.config import NOT_FINITE_EXIT
from paceline.train.run_folder import RunFolder
from paceline.world.environment import Variables


def main(folder: RunFolder) -> None:
    config = folder.config()
    if config.lanes:  # read when CUDA starts: without it cuBLAS may add in another order the next time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from paceline.train.loop import run_rank

    config = config.settled(on_gpu=config.device != "cpu" and torch.cuda.is_available())
    share = len(os.sched_getaffinity(0)) // max(1, Variables(os.environ).integer("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(config.threads or (1 if config.lanes else max(1, share)))  # lanes: the same in every world
    run_rank(config, folder)


def say_warnings() -> None:
    """Send the library's warnings to the rank's log, marked so that the launcher shows them."""
    said = logging.StreamHandler()
    said.setFormatter(logging.Formatter("Warning: %(message)s"))
    logging.getLogger("paceline").addHandler(said)


def code_of(error: PacelineError) -> int | None:
    """The exit code for an error that needs no traceback."""
    codes = {UsageError: 2, NotFiniteGradients: NOT_FINITE_EXIT, NotSaved: 1}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


if __name__ == "__main__":
    say_warnings()
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # it asks for a checkpoint, and before the first step there is nothing to save
    try:
        main(RunFolder(Path(sys.argv[1])))
    except PacelineError as error:
        if (code := code_of(error)) is None:
            raise
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        report("refused", text=str(error))  # the launcher shows it instead of a failure
        sys.exit(code)
