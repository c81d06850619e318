"""Text to tokens and back: bytes as they are, or a byte-level BPE trained on the corpus."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.errors import UsageError

Tokens = torch.Tensor  # one dimension; uint8 or int32


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    vocabulary: int

    def encode(self, text: bytes) -> Tokens: ...

    def decode(self, tokens: list[int]) -> str: ...

    def digest(self) -> str:
        """Equal for equal tokenizers: a run is not resumed with another one."""
        ...


class ByteTokenizer:
    """A token is a byte."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tokens:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def digest(self) -> str:
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
