"""Checks of every run: whether its device is large enough, before anything is built; and after the first steps, so that
these start as soon as they can, its memory against the plan and its gradients against those of one process.
"""

import copy
import os

import torch
from torch import nn

import paceline
from paceline.member import in_elastic_job
from paceline.memory_plan.closed_form import PlanSettings
from paceline.memory_plan.measured import Peak
from paceline.memory_plan.result import MemoryPlan
from paceline.rank_report import report
from paceline.train.config import TrainConfig
from paceline.train.model import GPT
from paceline.train.samples import Sample, Text
from paceline.train.sizes import SIZES

SETTLED_AFTER = 3  # steps: by then the optimizer has its states and the buckets are allocated
PLAN_MAY_BE_OFF = 1.1  # the plan may be too high by this factor


class Checks:
    """Create it after the net and before everything else."""

    def __init__(self, net: nn.Module, world: paceline.World) -> None:
        self._net = net
        self._world = world
        self._steps = 0
        warm_up(world.device)
        self._peak = Peak(world.device)
        # On the CPU the peak counts from here, where the net is already.
        self._net_bytes = sum(p.nbytes for p in net.parameters()) if world.device.type == "cpu" else 0
        self.measured: int | None = None
        self.planned: int | None = None
        self.difference: float | None = None

    def after_step(self, config: TrainConfig, text: Text, *, begun_together: bool) -> None:
        """All ranks call it after every step. `begun_together`: no rank has come after others had begun."""
        self._steps += 1
        if self._steps == SETTLED_AFTER and begun_together:
            self.measured = self._peak.nbytes() + self._net_bytes
            if self._world.rank == 0:
                self.planned = memory_plan(config, text, self._world, self._world.size).total
            if config.placement != "zero3":  # it needs copies of the whole model
                self.difference = gradient_difference(self._net, samples_to_compare(text, self._world))
            report("checked", planned=self.planned, measured=self.measured, difference=self.difference)


def warm_up(device: torch.device) -> None:
    """Make torch load the libraries that a step needs: their pages are not the model's."""
    net = GPT(SIZES["nano"], 256).to(device)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)
    net(tokens, tokens).backward()
    torch.optim.AdamW(net.parameters(), fused=True).step()


def check_device(config: TrainConfig, text: Text, world: paceline.World) -> None:
    """Raise on every rank, with what would fit, if this run needs more memory than there is."""
    if world.device.type == "cuda":
        there = int(torch.cuda.get_device_properties(world.device).total_memory)
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
    ranks = world.local_size if in_elastic_job() else world.size  # before the first generation
    plan = memory_plan(config, text, world, ranks, there)
    if plan.by_ranks[0].total_with_outside > PLAN_MAY_BE_OFF * there:
        plan.check_fits()


def memory_plan(
    config: TrainConfig, text: Text, world: paceline.World, ranks: int, device_memory: int | None = None
) -> MemoryPlan:
    """The memory of one rank as `paceline plan` predicts it from the numbers of the model."""
    shape = config.shape
    with torch.device("meta"):
        net = GPT(shape, text.tokenizer.vocabulary)
    settings = PlanSettings(
        params=sum(param.numel() for param in net.parameters()),
        batch=config.batch,
        seq=shape.context,
        vocab=text.tokenizer.vocabulary,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        dtype=config.dtype,
        ranks=(ranks,),
        accumulate=config.accumulate,
        lanes=config.lanes or None,
        update="fused",
        placement=config.placement,
        shard=config.shard or None,
        copies=config.copies or None,
        transport=config.transport,
        checkpointing=config.checkpointing,
        device=world.device.type,
        device_memory=device_memory,
    )
    return settings.plan()


def gradient_difference(net: nn.Module, batch: Sample) -> float:
    """The largest difference between gradients of all ranks' samples, by the ranks and by one process.

    All ranks call it; `net` is not touched. Every rank runs the samples of all ranks alone, on a copy, and the answer
    is the largest difference that any rank saw.
    """
    alone = _copy(net)
    shared = paceline.DistributedDataParallel(_copy(net))
    tokens, targets = (torch.cat(paceline.all_gather(part.cpu())).to(part.device) for part in batch)
    shared(*batch).backward()
    alone(tokens, targets).backward()
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    largest = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
    return float(paceline.all_reduce(torch.tensor(largest, dtype=torch.float64, device="cpu"), "max"))


def _copy(net: nn.Module) -> nn.Module:
    """Without gradients, and without dropout, whose masks depend on the shape of the batch."""
    twin = copy.deepcopy(net).eval()
    twin.zero_grad()
    return twin


def samples_to_compare(text: Text, world: paceline.World) -> Sample:
    """Two for each rank, different ones on every rank."""
    places = [(2 * world.rank + index) % len(text.train) for index in range(2)]
    tokens, targets = zip(*(text.train[place] for place in places), strict=True)
    return torch.stack(tokens).to(world.device), torch.stack(targets).to(world.device)
