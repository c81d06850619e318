"""Tensor fusion as Horovod does it: a background thread looks in cycles which gradients all ranks have, copies them
into one buffer, reduces it and copies them back. Horovod itself no longer builds against current torch."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached, update_with
from paceline.bench.gpt import build_model, build_optimizer

CYCLE_S = 0.001  # Horovod's default
THRESHOLD_BYTES = 128 * 1024 * 1024  # likewise


class Fusion:
    """The gradients of one model, reduced by a thread."""

    def __init__(self, params: list[torch.nn.Parameter], device: torch.device) -> None:
        self._params, self._device = params, device
        self._size = dist.get_world_size()
        largest = max(param.numel() for param in params)
        numel = min(sum(param.numel() for param in params), THRESHOLD_BYTES // params[0].element_size())
        self._buffer = torch.empty(max(largest, numel), dtype=params[0].dtype, device=device)
        self._ready = torch.zeros(len(params), dtype=torch.uint8)
        self._error: BaseException | None = None
        self._begun, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._active = False
        self.enabled = True
        self._closing = False
        for index, param in enumerate(params):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._collect(index))
        self._thread = threading.Thread(target=self._serve, name="fusion", daemon=True)
        self._thread.start()

    def _collect(self, index: int) -> None:
        if not self.enabled:
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._ready[index] = 1
        if not self._active:
            self._active = True
            self._begun.release()

    def finish(self) -> None:
        """Wait until all gradients of the step are reduced."""
        self._done.acquire()
        self._active = False
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing = True
        self._begun.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._begun.acquire()
            if self._closing:
                return
            try:
                self._reduce_step()
            except RuntimeError as error:
                self._error = error
            self._done.release()

    def _reduce_step(self) -> None:
        left = set(range(len(self._params)))
        while left:
            begin = time.perf_counter()
            agreed = self._ready.clone()
            dist.all_reduce(agreed, dist.ReduceOp.MIN)
            fresh = [index for index in sorted(left) if agreed[index]]
            left.difference_update(fresh)
            while fresh:
                fresh = self._reduce_some(fresh)
            time.sleep(max(0.0, CYCLE_S - (time.perf_counter() - begin)))
        self._ready.zero_()

    def _reduce_some(self, indices: list[int]) -> list[int]:
        """Reduce as many as fit into the buffer; the others are returned."""
        end, slots = 0, []
        for index in indices:
            numel = self._params[index].numel()
            if end + numel > self._buffer.numel():
                break
            slots.append(self._buffer[end : end + numel])
            end += numel
        grads = [self._params[index].grad for index in indices[: len(slots)]]
        for slot, grad in zip(slots, grads, strict=True):
            assert grad is not None, "its hook has run"
            slot.copy_(grad.view(-1))
        dist.all_reduce(self._buffer[:end])
        self._buffer[:end].div_(self._size)
        for slot, grad in zip(slots, grads, strict=True):
            assert grad is not None
            grad.view(-1).copy_(slot)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return indices[len(slots) :]


def fusion(context: BuildContext) -> Trainee:
    """tensor fusion on a background thread, as Horovod does"""
    model = build_model(context.spec, context.device)
    reducer = Fusion(list(model.parameters()), context.device)
    update = update_with(context.spec, build_optimizer(context.spec, model))

    def finish_and_update() -> None:
        reducer.finish()
        update()

    @contextmanager
    def no_sync() -> Iterator[None]:
        reducer.enabled = False
        try:
            yield
        finally:
            reducer.enabled = True

    sent = all_reduce_bytes(model, context.size)
    return Trainee(model, finish_and_update, detached(model.parameters), sent, no_sync=no_sync, close=reducer.close)
