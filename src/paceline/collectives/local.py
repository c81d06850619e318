"""A world of one: every collective is complete when it is started."""

import torch

from paceline.collectives.api import Op, Watch, Work, check_exchange, check_gather, check_reducible, check_root
from paceline.errors import CollectiveError


class LocalTransport:
    """The transport of a rank that is alone, so that no caller needs an `if distributed`."""

    def __init__(self) -> None:
        self._watch = _Alone()

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    @property
    def watch(self) -> Watch:
        return self._watch

    @property
    def alone(self) -> bool:
        return True

    @property
    def inline(self) -> bool:
        return True

    def averages(self, device: torch.device) -> bool:
        return True

    def trees(self, device: torch.device) -> bool:
        return True

    def queues(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def exchanges(self, device: torch.device) -> bool:
        return True

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

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_exchange(out, flat, 1)
        with torch.no_grad():
            out.view(-1).copy_(flat.reshape(-1))
        return _DONE

    def apart(self, timeout_s: float | None = None) -> "LocalTransport":
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
