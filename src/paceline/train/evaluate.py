"""The loss on held-out text, and a sample of what the model writes."""

import torch
from torch.utils.data import DataLoader, Subset

import paceline
from paceline.train.run import Run

TEMPERATURE, LIKELIEST = 0.8, 40


@torch.no_grad()
def held_out_loss(run: Run) -> float:
    """The mean loss in nats per token over the same samples at every evaluation, each taken by exactly one rank."""
    text, config = run.text.held_out, run.config
    count = min(config.eval_samples, len(text))
    chosen = Subset(text, [index * len(text) // count for index in range(count)])
    sampler: paceline.DistributedSampler[object] = paceline.DistributedSampler(chosen, shuffle=False, exactly_once=True)
    run.net.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for tokens, targets in DataLoader(chosen, batch_size=config.batch, sampler=sampler):
        with torch.autocast(run.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            loss = run.net(tokens.to(run.device), targets.to(run.device))
        total += torch.tensor([float(loss) * len(tokens), len(tokens)], dtype=torch.float64)
    run.net.train()
    summed, samples = paceline.all_reduce(total, "sum").tolist()
    return float(summed / samples)


@torch.no_grad()
def write_sample(run: Run) -> str:
    """What the model goes on with after a few words of held-out text."""
    context = run.config.shape.context
    source = torch.Generator().manual_seed(run.config.seed)
    tokens: list[int] = run.text.held_out[len(run.text.held_out) // 2][0][: min(32, context // 2)].tolist()
    run.net.eval()
    for _ in range(run.config.sample):
        logits = run.net(torch.tensor([tokens[-context:]], device=run.device))[0, -1].float().cpu()
        best = (logits / TEMPERATURE).topk(min(LIKELIEST, len(logits)))
        tokens.append(int(best.indices[int(torch.multinomial(best.values.softmax(0), 1, generator=source))]))
    run.net.train()
    return run.text.tokenizer.decode(tokens)
