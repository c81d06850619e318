"""A world of one: every collective is complete when it is started."""

from dataclasses import replace

import torch

from paceline.collectives.protocols import (
    Op,
    Traits,
    Watch,
    Work,
    check_all_to_all,
    check_gather,
    check_reducible,
    check_root,
)
from paceline.errors import CollectiveError


class LocalTransport:
    """The transport of a rank that is alone, so that no caller needs an `if distributed`."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.watch: Watch = _Alone()

    def traits(self, device: torch.device) -> Traits:
        return _ON_DEVICE if device.type == "cuda" else _ON_HOST

    def progress(self) -> None:
        pass

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        return _DONE

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, 1)
        return _DONE

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        check_gather(out, part, 1)
        with torch.no_grad():
            out.view(-1).copy_(part.reshape(-1))
        return _DONE

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_all_to_all(out, flat, 1)
        return self.all_gather(out, flat)

    def dup(self, timeout_s: float | None = None) -> "LocalTransport":
        return self

    def close(self) -> None:
        pass


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True


class _Alone:
    def look(self, what: str, waited_s: float) -> None:
        pass

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        return CollectiveError(f"{what} failed after {waited_s:.1f} s in a world of one: {error}")

    def left(self) -> None:
        pass

    def absent(self) -> list[int]:
        return []


_DONE = _Done()
_ON_HOST = Traits(single=True, progress_on_caller=True, native_mean=True, tree_sum=True, all_to_all=True)
_ON_DEVICE = replace(_ON_HOST, stream_ordered=True)
