"""The Trainer of transformers, with a GPT-2 that has dropout, so that random numbers count too."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from tests.clients.accelerate_loop import forget
from tests.clients.job import BATCH, EPOCHS, STEPS, Job, Trained, copied, in_the_place_of_torchs, readme_block, sharded

VOCABULARY, LENGTH = 31, 12


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """As many made-up sequences as an epoch of two ranks takes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(100)
        self._ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def gpt2() -> GPT2LMHeadModel:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2))


class Recorded:
    """Keeps the loss of every microbatch; what Trainer logs is rounded, and restored on resume."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(loss.item())
        return loss


def train(job: Job, ddp: type[nn.Module], save: Path, resume: Path | None) -> Trained:
    ddp = sharded(ddp, job.placement)
    base = Trainer if job.placement == "ddp" else readme_block("PacelineTrainer")["PacelineTrainer"]
    try:
        with in_the_place_of_torchs(ddp):
            arguments = TrainingArguments(
                str(save),
                use_cpu=True,
                bf16=job.precision == "bf16-mixed",
                gradient_checkpointing=job.recomputes,
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=job.microbatches,
                max_grad_norm=job.clip or 0.0,
                num_train_epochs=EPOCHS,
                save_strategy="epoch",
                disable_tqdm=True,
                report_to=[],
                logging_strategy="no",
            )
            model = gpt2()
            tokens = Tokens(2 * STEPS * job.microbatches * BATCH)
            trainer: Any = type("Recording", (Recorded, base), {})(model, arguments, train_dataset=tokens)
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            assert type(trainer.model_wrapped) is ddp
            assert trainer.state.global_step == EPOCHS * STEPS
            return Trained(copied(model.state_dict()), trainer.losses)
    finally:
        forget()


def checkpoint(save: Path) -> Path:
    return save / f"checkpoint-{STEPS}"
