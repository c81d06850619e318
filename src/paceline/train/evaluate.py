"""The loss on held-out text, and a sample of what the model writes."""

import torch
from torch.utils.data import default_collate

import paceline
from paceline.progress import Phase, own_progress
from paceline.train.run_state import Run

TEMPERATURE, LIKELIEST = 0.8, 40


@torch.no_grad()
def held_out_loss(run: Run) -> float:
    """The mean loss in nats per token over the same samples at every evaluation.

    It is the same number in every world: so are the microbatches, each is taken by one rank, and sums are in order. A
    rank that has one less than others runs one again, because parameters in shards are gathered by all ranks together.
    """
    text, config = run.text.held_out, run.config
    count = min(config.eval_samples, len(text))
    chosen = [index * len(text) // count for index in range(count)]
    microbatches = [chosen[begin : begin + config.batch] for begin in range(0, count, config.batch)]
    losses = torch.zeros(len(microbatches), dtype=torch.float64, device="cpu")
    run.net.eval()
    rounds = -(-len(microbatches) // run.world.size)
    for number in range(run.world.rank, rounds * run.world.size, run.world.size):
        own_progress().note(Phase.EVALUATE)  # the replica is bypassed, so it cannot note this itself
        again = number >= len(microbatches)
        number = 0 if again else number
        tokens, targets = default_collate([text[index] for index in microbatches[number]])
        with torch.autocast(run.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            loss = run.net(tokens.to(run.device), targets.to(run.device))
        losses[number] += 0.0 if again else float(loss) * len(tokens)
    run.net.train()
    summed = sum(paceline.all_reduce(losses, "sum").tolist())
    return float(summed / count)


@torch.no_grad()
def write_sample(run: Run) -> str:
    """The model's continuation of a few words of held-out text. All ranks call it, and write the same."""
    context = run.config.shape.context
    source = torch.Generator(device="cpu").manual_seed(run.config.seed)
    tokens: list[int] = run.text.held_out[len(run.text.held_out) // 2][0][: min(32, context // 2)].tolist()
    run.net.eval()
    for _ in range(run.config.sample):
        own_progress().note(Phase.EVALUATE)
        logits = run.net(torch.tensor([tokens[-context:]], device=run.device))[0, -1].float().cpu()
        best = (logits / TEMPERATURE).topk(min(LIKELIEST, len(logits)))
        tokens.append(int(best.indices[int(torch.multinomial(best.values.softmax(0), 1, generator=source))]))
    run.net.train()
    return run.text.tokenizer.decode(tokens)
