"""The phases that a rank notes, and the form in which its launcher reads them."""

import struct
from enum import IntEnum

NOTE = struct.Struct("@qqq")  # time in ns of the monotonic clock, which all processes of a machine share; step; phase


class Phase(IntEnum):
    """What a rank is doing. Numbers grow within a step, so the smallest (step, phase) is the rank furthest behind."""

    STARTING = 0
    IDLE = 1  # before the first step: the script may prepare for as long as it likes
    BETWEEN = 2  # the script's own code, between backwards and optimizer steps
    DATA = 3  # a loop that says so itself is getting its next batch
    FORWARD = 4
    BACKWARD = 5
    OPTIMIZER = 6
    WAITING = 7  # for other ranks, in any phase
    CHECKPOINT = 8
    EVALUATE = 9
    LOAD = 10
    DONE = 11  # the script has returned, and the interpreter is about to exit
