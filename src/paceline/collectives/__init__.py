"""Communication between ranks: transports, bounded waits, and the public collectives."""

from paceline.collectives.checked import all_gather, all_reduce, barrier, broadcast
from paceline.collectives.group import finish
from paceline.collectives.local import LocalTransport
from paceline.collectives.protocols import Op, Transport, Watch, Work
from paceline.collectives.threads import ThreadTransport, ThreadWorld, run
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.watch import StoreWatch

__all__ = [
    "LocalTransport",
    "Op",
    "StoreWatch",
    "ThreadTransport",
    "ThreadWorld",
    "TorchDistTransport",
    "Transport",
    "Watch",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "finish",
    "run",
]
