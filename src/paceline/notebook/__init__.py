"""N ranks behind every cell of a notebook: `%load_ext paceline`."""

from typing import Any


def load(shell: Any) -> None:
    """Add the magics to an IPython shell, and let its cells go to the ranks once there are some."""
    from paceline.notebook.extension import Extension

    Extension.load(shell)


def unload(shell: Any) -> None:
    """End the ranks and take the magics out again."""
    from paceline.notebook.extension import Extension

    Extension.unload(shell)
