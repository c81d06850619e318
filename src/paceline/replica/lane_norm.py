"""The norm of all gradients in lanes: the same bits however parameters are cut into blocks, and over how many ranks."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)

from paceline.collectives.group import Group
from paceline.placement import BLOCK_ELEMENTS, Ownership


def norm_in_lanes(
    grads: Mapping[int, torch.Tensor], ownership: Ownership, norm_type: float, group: Group, device: torch.device
) -> torch.Tensor:
    """The norm of all gradients, `grads` holds this rank's flat blocks of them, by parameter. All ranks call it.

    Blocks are made of leaves of `BLOCK_ELEMENTS`. The rank that holds a leaf adds it up in a fixed order, and then all
    ranks add up all leaves in one order: those of other ranks are 0 here, and adding 0 changes nothing.
    """
    counts = [-(-cuts[-1] // BLOCK_ELEMENTS) for cuts in ownership.cuts]
    leaves = torch.zeros(sum(counts), dtype=torch.float64, device=device)
    by_param = leaves.split(counts)
    cut = ownership.ranks > 1
    for index, grad in grads.items():
        begin = ownership.block(index, group.rank if cut else 0)[0] // BLOCK_ELEMENTS
        own = _leaf_sums(grad, norm_type)
        by_param[index][begin : begin + len(own)] = own
    if cut:
        group.wait(group.transport.all_reduce(leaves), "the norm of all gradients")
    return (leaves.sum() ** (1 / norm_type)).to(torch.float32)


def _leaf_sums(flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Add halves until one number is left, because the order in torch's own sum may depend on their count."""
    rows = F.pad(flat.float(), (0, -flat.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    sums = rows * rows if norm_type == 2.0 else rows.abs().pow(norm_type)
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
