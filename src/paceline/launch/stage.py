"""The stages of an elastic job, and their allowed order: see `launch/coordinator.py`."""

from enum import Enum, auto


class Stage(Enum):
    FOUNDING = auto()
    GATHERING = auto()
    FORMING = auto()
    WORKING = auto()
    FINISHING = auto()
    OVER = auto()


LEGAL = {
    Stage.FOUNDING: {Stage.FORMING, Stage.OVER},
    Stage.GATHERING: {Stage.FORMING, Stage.FINISHING, Stage.OVER},
    Stage.FORMING: {Stage.GATHERING, Stage.WORKING, Stage.OVER},
    Stage.WORKING: {Stage.GATHERING, Stage.FINISHING, Stage.OVER},
    Stage.FINISHING: {Stage.OVER},
    Stage.OVER: set[Stage](),
}
