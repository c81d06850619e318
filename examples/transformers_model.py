"""A small model of the transformers library, built from a configuration: nothing is taken from a hub.

paceline run -n 2 examples/transformers_model.py
"""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

STEPS, BATCH, LENGTH = 60, 8, 64


def main() -> None:
    world = paceline.init()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = paceline.DistributedDataParallel(LlamaForCausalLM(config).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes() * 20), dtype=torch.uint8)
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    loader = paceline.Loader(TensorDataset(windows), BATCH // world.size, seed=0)

    step = 0
    while step < STEPS:
        for (tokens,) in loader:
            tokens = tokens.to(world.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                mean = paceline.all_reduce(loss.detach().cpu(), "mean")
                if world.rank == 0:
                    print(f"step {step:3d}   loss {mean:.3f}", flush=True)
            if step == STEPS:
                break
    paceline.shutdown()


if __name__ == "__main__":
    main()
