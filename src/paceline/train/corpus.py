"""The text that is trained on, split into what is trained on and what is held out. Needs no torch."""

import glob
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

HELD_OUT_EVERY = 20  # one of this many documents is held out
SEPARATOR = b"\n\n"
NOT_TEXT = {"site-packages", "encodings"}  # of the standard library: other people's code, and tables
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".json", ".toml", ".c", ".h", ".cpp", ".js", ".ts", ".html", ".css", "")


class CorpusError(UsageError):
    """The data cannot be trained on; the message says which file, and why."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two texts as bytes, and where they came from."""

    train: bytes
    held_out: bytes
    source: str


def read_corpus(data: str) -> Corpus:
    """Read a file, a folder, a glob, or the standard library's sources."""
    files, source = find_files(data)
    documents = [text for file in files if (text := _read(file))]
    if not documents:
        raise CorpusError(
            f"data={data!r}: the {len(files)} files found contain no text; expected at least one that does"
        )
    if len(documents) >= HELD_OUT_EVERY:
        held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [text for index, text in enumerate(documents) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        return Corpus(SEPARATOR.join(train), SEPARATOR.join(held_out), source)
    whole = SEPARATOR.join(documents)
    cut = len(whole) - len(whole) // HELD_OUT_EVERY  # too few files to hold out whole ones: take the end of the text
    return Corpus(whole[:cut], whole[cut:], source)


def find_files(data: str) -> tuple[list[Path], str]:
    """The files that `data` means, in an order that every rank finds, and a name for them."""
    if data == "stdlib":
        home = Path(sysconfig.get_path("stdlib"))
        found = _text_files(path for path in home.rglob("*.py") if not NOT_TEXT & set(path.parts))
        if not found:
            raise CorpusError(
                f"data='stdlib': no source files in {home}: this Python has none; pass a text with --data"
            )
        return found, f"Python's standard library, {len(found)} files"
    path = Path(data).expanduser()
    if path.is_file():
        return [path], str(path)
    if path.is_dir():
        found = _text_files(item for item in path.rglob("*") if item.is_file() and item.suffix in TEXT_SUFFIXES)
        if not found:
            raise CorpusError(f"data={data!r}: no text files in that folder; expected {', '.join(TEXT_SUFFIXES[:-1])}")
        return found, f"{path}, {len(found)} files"
    matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 (the pattern may be absolute)
    found = _text_files(Path(match) for match in matches if Path(match).is_file())
    if not found:
        raise CorpusError(f"data={data!r}: no such file, folder or match; expected a text file, a folder, or a glob")
    return found, f"{data}, {len(found)} files"


def _text_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.parts[-2:]))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise CorpusError(f"{file} cannot be read: {error.strerror or error}") from error
