"""`python -m paceline.notebook.rank -f CONNECTION_FILE`: one rank of a notebook."""

import os
import sys


def main() -> None:
    # As in any kernel, files beside the notebook may not hide the standard library while the kernel starts; IPython
    # adds the folder behind the standard library afterwards.
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with a string, and pathlib comes later
        del sys.path[0]
    from paceline.notebook.rank.kernel import RankApp

    RankApp.launch_instance()


if __name__ == "__main__":
    main()
