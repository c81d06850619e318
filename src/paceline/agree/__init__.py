"""Do replicas still agree? Words of state, the search for what drifted, and capsules of steps that went wrong."""

from paceline.agree.capsule import Capsule, read_capsule, write_capsule
from paceline.agree.drift import Drift, Element, TensorDrift, heal, locate
from paceline.agree.finite import NotFinite, first_not_finite
from paceline.agree.pieces import Piece
from paceline.agree.rotation import Rotation
from paceline.agree.word import StartedWord, start_word, word_of

__all__ = [
    "Capsule",
    "Drift",
    "Element",
    "NotFinite",
    "Piece",
    "Rotation",
    "StartedWord",
    "TensorDrift",
    "first_not_finite",
    "heal",
    "locate",
    "read_capsule",
    "start_word",
    "word_of",
    "write_capsule",
]
