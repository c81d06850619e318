"""torch.compile leaves the code of replicas alone, as it does that of torch's own class.

torch's class lies in a file that Dynamo skips. Ours does not, so every function of the core is marked, in two ways: for
Dynamo that comes by a frame, and for Dynamo that would inline a call. What is below, such as the forward of the wrapped
module and the hooks of users, is compiled as ever. Neither needs torch._dynamo, whose import takes a second.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# What runs in a step of anyone's. The reference trainer is not among it: its model is to be compiled.
_CORE = (
    "agree",
    "bucket_plan",
    "collectives",
    "device_clock",
    "kernels",
    "layout",
    "reducer",
    "replica",
    "strategies",
    "trace",
    "traffic",
)

# Called by torch's own forward and hook, which Dynamo inlines where `optimize_ddp="python_reducer"` was chosen.
_TRACED = ("require_backward_grad_sync", "before_module", "run_module", "after_module")

_WHY = "a DistributedDataParallel works outside of graphs"


def keep_out_of_graphs() -> None:
    """Mark every function of the core that has been imported by now."""
    for name in list(sys.modules):
        if name.startswith("paceline.") and name.split(".")[1] in _CORE:
            _mark_module(name)


@cache
def _mark_module(name: str) -> None:
    module = sys.modules[name]
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == name:
            for function in _functions(value):
                if function.__name__ not in _TRACED:
                    function._torchdynamo_disable = True  # type: ignore[attr-defined]
                    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
                if function.__code__.co_filename in (
                    module.__file__,
                    "<string>",
                ):  # else a decorator's, which others use
                    _skip(function.__code__)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions behind a name of a module or of a class, also those inside decorators."""
    if isinstance(value, type):
        for own in list(vars(value).values()):
            yield from _functions(own)
    elif isinstance(value, property):
        yield from _functions(value.fget)
        yield from _functions(value.fset)
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
    if hasattr(value, "__wrapped__"):  # not a function when it was cached
        yield from _functions(value.__wrapped__)


def _skip(code: CodeType) -> None:
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _skip(inner)


def frames_compiled() -> int:
    """How many functions torch.compile has looked at in this process."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))


def before_compiling(call: Callable[[Any], None]) -> Callable[[], None]:
    """Have `call` called when torch.compile is about to look at a function. Returns what takes that back."""
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:  # it was not loaded
        return lambda: None
    callbacks = handler.start_callbacks
    callbacks.append(call)
    return lambda: callbacks.remove(call) if call in callbacks else None  # torch._dynamo.reset() removes all
