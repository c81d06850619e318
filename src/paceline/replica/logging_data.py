"""`_get_ddp_logging_data()` like that of torch's class, computed from paceline's settings and trace."""

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.device_clock import by_device
from paceline.trace import Moment, Stamp, Trace

if TYPE_CHECKING:
    from paceline.replica.torch_surface import TorchSurface

# torch samples the first iterations, then every `sample_rate`-th.
ALWAYS_SAMPLED = 10

_ENV_OF_ALL = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_ENV_OF_GLOO = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


class TorchLogger:
    """`model.logger` as code written for torch's C++ logger knows it."""

    def __init__(self) -> None:
        self.iteration = 0  # training forwards so far
        self.sample_at = 1  # which of them samples the times of the one before
        self._sample_rate = 100
        self._facts: dict[str, Any] = {}
        self._runtime: dict[str, Any] = {}
        self._sums: dict[str, int] = {}
        self._samples = 0

    def set_error_and_log(self, error: str) -> None:
        self._facts.update(has_error=1, error=error)

    def _set_comm_hook_name(self, name: str) -> None:
        self._facts["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._facts["join_uneven_inputs"] = 1

    def sample_every(self, rate: int) -> None:
        self._sample_rate = rate
        self.sample_at = self._next_sample(max(0, self.iteration - 1))

    def sample(self, trace: Trace) -> None:
        """An iteration begins at `sample_at`: record the times of the previous one, as often as torch would."""
        times = _times(trace.stamps())
        self._samples += 1
        for name in ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap"):
            self._sums[name] = self._sums.get(name, 0) + times.get(f"{name}_time", 0)
            times[f"avg_{name}_time"] = self._sums[name] // self._samples
        self._runtime = {"iteration": self.iteration, **times}
        self.sample_at = self._next_sample(self.iteration)

    def _next_sample(self, after: int) -> int:
        return after + 1 if after + 1 < ALWAYS_SAMPLED else (after // self._sample_rate + 1) * self._sample_rate

    def data(self, replica: "TorchSurface") -> dict[str, Any]:
        core, settings = replica._core, replica._settings
        metas = core.bucket_set.layout.params
        backend = _backend_name(replica.process_group)
        env = _ENV_OF_ALL | (_ENV_OF_GLOO if "gloo" in backend else {})
        sizes = [sum(metas[place.param].nbytes for place in spec.slots) for spec in core.bucket_set.layout.buckets]
        data: dict[str, Any] = {
            "world_size": core.transport.size,
            "rank": core.transport.rank,
            "module_name": type(replica.module).__name__,
            "device_ids": ", ".join(map(str, replica.device_ids or [])),
            "output_device": -1 if replica.output_device is None else replica.output_device,
            "broadcast_buffers": int(replica.forward_sync_buffers),
            "bucket_cap_bytes": replica.bucket_bytes_cap,
            "find_unused_parameters": int(replica.find_unused_parameters),
            "gradient_as_bucket_view": int(replica.gradient_as_bucket_view),
            "static_graph": int(settings.static_graph),
            "backend_name": backend,
            "iteration": 0,
            "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(m.dtype, str(m.dtype)) for m in metas})),
            "total_parameter_size_bytes": sum(m.nbytes for m in metas),
            "num_parameter_tensors": len(metas),
            "bucket_sizes": ", ".join(map(str, sizes)),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in replica.module.modules())),
            "num_buckets_reduced": core.buckets_reduced,
        }
        data |= {key: os.environ.get(variable, "N/A") for key, variable in env.items()}
        if "gloo" in backend:
            data["gloo_num_threads"] = 2
        if core.uses is not None:
            data["unused_parameter_size"] = sum(m.nbytes for m, n in zip(metas, core.uses, strict=True) if not n)
        if core.planning.order_learned:
            data |= {
                "has_rebuilt_buckets": int(settings.static_graph or not replica.find_unused_parameters),
                "rebuilt_bucket_sizes": data["bucket_sizes"],
                "prev_iteration_grad_ready_order_indices": ", ".join(map(str, core.ready_order)),
                "rebuilt_per_bucket_param_indices": ", ".join(
                    " ".join(str(place.param) for place in spec.slots) for spec in core.bucket_set.layout.buckets
                ),
            }
        if core.last_error is not None:
            self.set_error_and_log(core.last_error)
        return data | self._runtime | self._facts


def _backend_name(group: Any) -> str:
    """The backend's name; a group that Python code made itself is not in torch's list and names itself."""
    if group is None:
        return "none"
    return str(dist.get_backend(group)) if group in dist.distributed_c10d._world.pg_map else str(group.name())


def _times(stamps: list[Stamp]) -> dict[str, int]:
    """Times of the last reduced backward in the trace, in nanoseconds, under torch's names."""
    newest = stamps[-1].generation if stamps else 0  # each counts its backwards anew
    stamps = [s for s in by_device(stamps) if s.generation == newest and (s.bucket >= 0 or s.collective is None)]
    last = max((s.backward for s in stamps if s.moment is Moment.BACKWARD_END), default=0)
    at: dict[Moment, list[int]] = {}
    forward_begin = 0
    for stamp in stamps:
        if stamp.moment is Moment.FORWARD_BEGIN and stamp.backward == last - 1:
            forward_begin = forward_begin or stamp.ns
        elif stamp.backward == last:
            at.setdefault(stamp.moment, []).append(stamp.ns)
    if not at.keys() >= {Moment.BACKWARD_BEGIN, Moment.BACKWARD_END, Moment.LAUNCHED, Moment.WAIT_LEFT}:
        return {}
    begin, end = at[Moment.BACKWARD_BEGIN][0], at[Moment.BACKWARD_END][0]
    comm_begin, comm_end = at[Moment.LAUNCHED][0], at[Moment.WAIT_LEFT][-1]
    forward_begin = forward_begin or begin  # unknown for a step with more microbatches than the trace holds
    return {
        "forward_compute_time": begin - forward_begin,
        "backward_compute_time": end - begin,
        "backward_comm_time": comm_end - comm_begin,
        "backward_compute_comm_overlap_time": max(0, end - comm_begin),
        "forward_compute_time_start": forward_begin,
        "backward_compute_time_start": begin,
        "backward_compute_time_end": end,
        "backward_comm_time_start": comm_begin,
        "backward_comm_time_end": comm_end,
    }
