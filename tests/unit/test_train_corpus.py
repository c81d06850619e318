"""The text of a run."""

import os
from pathlib import Path

import pytest
import torch

from paceline.train.corpus import HELD_OUT_EVERY, CorpusError, find_files, read_corpus
from paceline.train.samples import BPETokenizer, ByteTokenizer, TokenWindows


def test_the_standard_library_is_a_corpus() -> None:
    corpus = read_corpus("stdlib")
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2
    assert b"import" in corpus.held_out


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    for number in range(2 * HELD_OUT_EVERY):
        (tmp_path / f"{number:03d}.txt").write_text(f"document {number:03d}")
    corpus = read_corpus(str(tmp_path))
    assert corpus.held_out == b"document 019\n\ndocument 039"
    assert b"019" not in corpus.train and b"038" in corpus.train


def test_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(65, 91)) * 100)
    corpus = read_corpus(str(file))
    assert corpus.train + corpus.held_out == file.read_bytes()
    assert len(corpus.held_out) == 2600 // HELD_OUT_EVERY


def test_a_glob_finds_files_in_one_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", ".hidden.txt"):
        (tmp_path / name).write_text(name)
    files, _ = find_files(str(tmp_path / "*.txt"))
    assert [file.name for file in files] == ["a.txt", "b.txt"]


def test_what_is_no_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no such file, folder or match"):
        read_corpus(str(tmp_path / "absent"))
    with pytest.raises(CorpusError, match=r"no text files in that folder"):
        read_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=r"contain no text"):
        read_corpus(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("x")
    file.chmod(0)
    with pytest.raises(CorpusError, match=r"secret.txt cannot be read"):
        read_corpus(str(file))


def test_windows_follow_each_other_and_miss_nothing() -> None:
    windows = TokenWindows(torch.arange(21, dtype=torch.uint8), 5, "training")
    assert len(windows) == 4
    assert [windows[index][0].tolist() for index in range(4)] == [list(range(i, i + 5)) for i in (0, 5, 10, 15)]
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in (windows[index] for index in range(4)))
    with pytest.raises(CorpusError, match=r"context=30 is longer than the training text, which has 21 tokens"):
        TokenWindows(torch.arange(21), 30, "training")


def test_bytes_come_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("häß".encode()).tolist()) == "häß"


def test_a_bpe_of_the_corpus_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = b"def f(x):\n    return x + 1\n\n" * 50
    tokenizer = BPETokenizer.trained(text, 300)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.tolist()) == text.decode()
    assert len(tokens) < len(text) / 2
    tokenizer.save(tmp_path / "tokenizer.json")
    assert BPETokenizer.loaded(tmp_path / "tokenizer.json").digest() == tokenizer.digest()
