"""Records what a replica computes, as digests, so that two runs of one script can be compared.

`paceline doctor --determinism` starts a script twice with PACELINE_DETERMINISM naming a file. Each line is one
computed value, in order: the weights and buffers at the start of a step, the inputs of a forward, the output of
every module when it is ready (so the innermost comes first), every gradient, and the buffers after a forward. The
process ends after the requested number of steps.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo

from paceline.agree.state_digest import readable, state_digest
from paceline.errors import UsageError
from paceline.kernels import kernel_settings
from paceline.rank_report import RECORD_NAME, RECORD_STEPS_NAME
from paceline.reducer.autograd import tensors_in
from paceline.reducer.lanes import Lanes


def recording_asked(
    module: nn.Module, lanes: Lanes | None, environ: Mapping[str, str] = os.environ
) -> "Recording | None":
    """The recording of a replica of `module`, if the environment asks for one."""
    if not environ.get(RECORD_NAME):
        return None
    steps = environ.get(RECORD_STEPS_NAME, "2")
    if not steps.isdecimal() or not int(steps):
        raise UsageError(f"{RECORD_STEPS_NAME}={steps!r}: expected a whole number of at least 1")
    return Recording(Path(environ[RECORD_NAME]), module, lanes, int(steps))


def end_process() -> NoReturn:
    """Exit at once, without the script's own final work, such as saving."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class Recording:
    """The lines of one replica."""

    def __init__(self, file: Path, module: nn.Module, lanes: Lanes | None, steps: int) -> None:
        self._file, self._module, self._lanes, self._steps = file, module, lanes, steps
        self._begun = 0
        self._step = -1
        known = file.read_text(encoding="utf-8") if file.exists() else ""
        self._number = known.count('"kind": "replica"')  # of the replicas of this script
        self._write("replica", name=type(module).__name__, lanes=None if lanes is None else lanes.count)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        for name, part in module.named_modules():
            part.register_forward_hook(partial(self._after_forward, name))
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.register_hook(partial(self._on_gradient, name))

    def begin(self, step: int) -> None:
        """A step begins; without lanes, that is a forward whose backward may follow."""
        if self._begun == self._steps:
            self._write("complete")
            end_process()
        if not self._begun:
            self._write("settings", settings=kernel_settings(next(self._module.parameters()).device))
        self._begun, self._step = self._begun + 1, step
        for name, param in self._module.named_parameters():
            self._record("weights", name, [param])
        self._record_buffers("buffer before")

    @_disable_dynamo(recursive=True)
    def _before_forward(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._lanes is None and torch.is_grad_enabled():
            self.begin(self._begun)
        named = [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
        for name, value in named:
            self._record("input", name, tensors_in(value), kind_of=type(value).__name__)

    @_disable_dynamo(recursive=True)
    def _after_forward(self, name: str, part: nn.Module, _: Any, output: Any) -> None:
        self._record("output", name, tensors_in(output), kind_of=type(part).__name__)
        if part is self._module:
            self._record_buffers("buffer after")

    @_disable_dynamo(recursive=True)
    def _on_gradient(self, name: str, grad: torch.Tensor) -> None:
        self._record("gradient", name, [grad])

    def _record_buffers(self, kind: str) -> None:
        for name, buffer in self._module.named_buffers():
            self._record(kind, name, [buffer])

    def _record(self, kind: str, name: str, tensors: Iterable[torch.Tensor], kind_of: str = "") -> None:
        lane = None if self._lanes is None or self._lanes.current < 0 else self._lanes.current
        plain = [part for tensor in tensors for part in _plain(tensor.detach())]
        digest = state_digest(plain) if plain and all(map(readable, plain)) else None
        self._write(kind, step=self._step, lane=lane, name=name, kind_of=kind_of, digest=digest)

    def _write(self, kind: str, **fields: Any) -> None:
        # Opened each time: a script may have several replicas, and may end at any time.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "replica": self._number, **fields}) + "\n")


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    return [tensor]
