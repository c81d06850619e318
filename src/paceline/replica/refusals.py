"""Why an optimizer step is refused."""

from collections.abc import Sequence

import torch

from paceline.errors import NotWhole, UnreducedGradients
from paceline.replica.owned import OwnedBlocks

SHOWN = 5
IN_BACKWARD = (
    "an optimizer steps inside backward, before the gradients of this step are reduced, so the replicas would drift "
    "apart; use torch.distributed.optim._apply_optimizer_in_backward, which waits for the reduction, or step after it"
)
JOINED = (
    "the loss of rank %d touched no parameter, so it joined the reduction of this step only now, at optimizer.step(): "
    "anything done to gradients before that, such as clipping, had no effect here. Call model.sync_gradients() after "
    "backward to join earlier"
)


def refuse_whole(params: Sequence[torch.Tensor], owned: OwnedBlocks, *, local: bool) -> None:
    """Raise if an optimizer was made over whole parameters whose gradients this rank has in shards, or if it would step
    on local gradients of this rank (`local`), of which other ranks own a part."""
    for param in params:
        if (shard := owned.find(param)) is not None and shard.value is not param:
            raise NotWhole(
                f"this optimizer was created from whole parameters, such as {shard.name}, but under this placement a "
                f"rank has gradients only for its shards; create it with model.optimizer(torch.optim.AdamW, ...), or "
                f"convert it with model.optimizer(optimizer)"
            )
    if local:
        raise NotWhole(
            "an optimizer steps inside no_sync(), on gradients of this rank alone, and under this placement a rank "
            'updates only its shards; step after a backward that is reduced, or use placement="ddp"'
        )


def unreduced_error(names: Sequence[str]) -> UnreducedGradients:
    return UnreducedGradients(
        f"the optimizer was about to step on gradients that were never reduced, so the replicas would drift apart: "
        f"{listed(names)}. Run the last backward of the step outside no_sync(), or call sync_gradients() before "
        f"step(). To step on local gradients on purpose, step inside no_sync(), or pass guard=False."
    )


def listed(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
