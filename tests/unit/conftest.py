"""What several unit tests need."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps font files open from its first text on."""
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    axes = figure.subplots()
    axes.set_title("µ", weight="bold")
    axes.set_xlabel("µ")
    file: Path = tmp_path_factory.mktemp("fonts") / "first.png"
    figure.savefig(file)
