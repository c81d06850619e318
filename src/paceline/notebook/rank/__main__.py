"""`python -m paceline.notebook.rank -f CONNECTION_FILE`: one rank of a notebook."""

import os
import sys


def main() -> None:
    # As in any kernel, files beside the notebook may not hide the standard library while the kernel starts; IPython
    # adds the folder behind the standard library afterwards.
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with a string, and pathlib comes later
        del sys.path[0]
    _name_cells_alike()
    from paceline.notebook.rank.kernel import RankApp

    RankApp.launch_instance()


def _name_cells_alike() -> None:
    """Without the process id, which ipykernel puts into the file names of cells: a warning that names one is the same
    on all ranks then, and so is an error that comes from a worker of a DataLoader."""
    import tempfile

    from ipykernel import compiler

    folder = os.path.join(tempfile.gettempdir(), "ipykernel_rank")  # noqa: PTH118 - nothing is written there
    compiler.get_tmp_directory = lambda: folder


if __name__ == "__main__":
    main()
