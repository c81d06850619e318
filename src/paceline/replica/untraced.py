"""Keeps torch.compile out of the code of replicas, as it stays out of torch's own class.

torch's class is in a file that Dynamo skips. paceline's is not, so every function of the core is marked in two ways:
for Dynamo entering a frame, and for Dynamo inlining a call. Calls below it, such as the forward of the wrapped module
and user hooks, are compiled as usual. Neither mark needs torch._dynamo, whose import takes a second.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# The packages that run in every training step. The reference trainer is excluded: its model should be compiled.
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

_WHY = "a DistributedDataParallel works outside graphs"


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
                ):  # otherwise it is a decorator's, which others use
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
    """The number of functions that torch.compile has processed in this process."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))


def before_compiling(call: Callable[[Any], None]) -> Callable[[], None]:
    """Call `call` when torch.compile is about to process a function. Returns a function that undoes this."""
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:  # it is not loaded
        return lambda: None
    callbacks = handler.start_callbacks
    callbacks.append(call)
    return lambda: callbacks.remove(call) if call in callbacks else None  # torch._dynamo.reset() removes all
