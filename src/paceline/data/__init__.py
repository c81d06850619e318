"""Dealing samples to ranks."""

from paceline.data.ledger import Entry, Ledger, LedgerBroken, Reading, Session, read_ledger
from paceline.data.loader import Loader
from paceline.data.mistakes import DataDiffers, check_first_batch
from paceline.data.order import Cursor, deal, order
from paceline.data.sampler import DistributedSampler
from paceline.data.stream import shard
from paceline.data.workers import WorkerDied

__all__ = [
    "Cursor",
    "DataDiffers",
    "DistributedSampler",
    "Entry",
    "Ledger",
    "LedgerBroken",
    "Loader",
    "Reading",
    "Session",
    "WorkerDied",
    "check_first_batch",
    "deal",
    "order",
    "read_ledger",
    "shard",
]
