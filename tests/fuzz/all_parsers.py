"""Every parser of paceline of bytes that come from a socket, a pipe, a store, a file or the environment."""

from pathlib import Path

from tests.fuzz.files import bench_frames, notebook_frames, run_frames, value_frames
from tests.fuzz.messages import launcher_frames, store_frames, word_frames
from tests.fuzz.parser import Parser


def all_parsers(folder: Path) -> list[Parser]:
    """`folder` is empty, and for frames that have to be files."""
    return [
        *launcher_frames(),
        *store_frames(),
        *word_frames(),
        *value_frames(),
        *run_frames(folder),
        *notebook_frames(),
        *bench_frames(),
    ]
