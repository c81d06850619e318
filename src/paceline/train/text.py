"""The corpus as samples of a fixed length."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

import paceline
from paceline.train.config import TrainConfig
from paceline.train.corpus import Corpus, CorpusError, read_corpus
from paceline.train.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

Sample = tuple[torch.Tensor, torch.Tensor]


class Windows(Dataset[Sample]):
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

    train: Windows
    held_out: Windows
    tokenizer: Tokenizer
    source: str
    bytes_per_token: float  # of the held-out text


def prepare(config: TrainConfig, folder: Path) -> Text:
    """Read and encode the corpus. All ranks call it; a BPE is trained by rank 0 and kept in `folder`."""
    corpus = read_corpus(config.data)
    tokenizer = _tokenizer(config, corpus, folder)
    train, held_out = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    context = config.shape.context
    return Text(
        train=Windows(train, context, "training"),
        held_out=Windows(held_out, context, "held-out"),
        tokenizer=tokenizer,
        source=corpus.source,
        bytes_per_token=len(corpus.held_out) / max(1, len(held_out)),
    )


def _tokenizer(config: TrainConfig, corpus: Corpus, folder: Path) -> Tokenizer:
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    file = folder / "tokenizer.json"
    if paceline.get("rank") == 0 and not file.exists():
        part = file.with_suffix(".part")
        BPETokenizer.trained(corpus.train, config.vocabulary).save(part)
        part.replace(file)
    paceline.barrier()
    return BPETokenizer.loaded(file)
