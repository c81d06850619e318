"""The corpus as samples of tokens: bytes as they are, or a byte-level BPE trained on the corpus."""

import fcntl
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from paceline.errors import UsageError
from paceline.stored.directory import open_to_write
from paceline.train.config import TrainConfig
from paceline.train.corpus import Corpus, CorpusError, read_corpus

Tokens = torch.Tensor  # one dimension; uint8 or int32
Sample = tuple[torch.Tensor, torch.Tensor]


class ByteTokenizer:
    """A token is a byte."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tokens:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def digest(self) -> str:
        """A hash of the tokenizer: a run cannot be resumed with another one."""
        return "bytes"


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` library."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocabulary: int = inner.get_vocab_size()

    @classmethod
    def trained(cls, text: bytes, vocabulary: int) -> "BPETokenizer":
        tokenizers = _library()
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        inner.train_from_iterator(text.decode(errors="replace").splitlines(keepends=True), trainer)
        return cls(inner)

    @classmethod
    def loaded(cls, file: Path) -> "BPETokenizer":
        return cls(_library().Tokenizer.from_file(str(file)))

    def save(self, file: Path) -> None:
        self._inner.save(str(file))

    def encode(self, text: bytes) -> Tokens:
        lines = text.decode(errors="replace").splitlines(keepends=True)
        encoded = self._inner.encode_batch_fast(lines)
        return torch.tensor([token for line in encoded for token in line.ids], dtype=torch.int32, device="cpu")

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens))

    def digest(self) -> str:
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()


Tokenizer = ByteTokenizer | BPETokenizer


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        raise UsageError(
            "tokenizer='bpe' needs the library tokenizers, which is not installed: pip install 'paceline[train]', "
            "or use tokenizer='bytes'"
        ) from error
    return tokenizers


class TokenWindows(Dataset[Sample]):
    """Sample i is the i-th stretch of `context` tokens, with the token that follows each of them."""

    def __init__(self, tokens: torch.Tensor, context: int, name: str) -> None:
        if len(tokens) <= context:
            raise CorpusError(
                f"context={context} is longer than the {name} text, which has {len(tokens)} tokens; "
                f"expected a shorter context, or more text"
            )
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> Sample:
        begin = index * self._context
        text = self._tokens[begin : begin + self._context + 1].long()
        return text[:-1], text[1:]


@dataclass(frozen=True, slots=True)
class Text:
    """What a run reads."""

    train: TokenWindows
    held_out: TokenWindows
    tokenizer: Tokenizer
    source: str
    bytes_per_token: float  # of the held-out text


def prepare(config: TrainConfig, folder: Path) -> Text:
    """Read and encode the corpus. A BPE is trained by the first rank that needs it, and kept in `folder`."""
    corpus = read_corpus(config.data)
    tokenizer = _tokenizer(config, corpus, folder)
    train, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    context = config.shape.context
    return Text(
        train=TokenWindows(train, context, "training"),
        held_out=TokenWindows(held_out, context, "held-out"),
        tokenizer=tokenizer,
        source=corpus.source,
        bytes_per_token=len(corpus.held_out) / max(1, len(held_out)),
    )


def _tokenizer(config: TrainConfig, corpus: Corpus, folder: Path) -> Tokenizer:
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    file = folder / "tokenizer.json"
    with os.fdopen(open_to_write(folder / ".tokenizer.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks may not have formed a group yet
        if not file.exists():
            part = file.with_suffix(".part")
            BPETokenizer.trained(corpus.train, config.vocabulary).save(part)
            part.replace(file)
    return BPETokenizer.loaded(file)
