"""One rank of `paceline train`: `python -m paceline.train FOLDER`, started by a launcher."""

import os
import signal
import sys
from pathlib import Path

from paceline.checkpoint.faults import NotSaved
from paceline.errors import PacelineError, UsageError
from paceline.tell import tell
from paceline.train.folder import RunFolder


def main(folder: RunFolder) -> None:
    config = folder.config()
    import torch

    from paceline.train.loop import run_rank

    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, share))
    run_rank(config, folder)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # "save and go on": there is nothing to save before the first step
    try:
        main(RunFolder(Path(sys.argv[1])))
    except PacelineError as error:
        if not isinstance(error, UsageError | NotSaved):
            raise
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        tell("refused", text=str(error))  # the launcher shows it in the place of a failure
        sys.exit(2 if isinstance(error, UsageError) else 1)
