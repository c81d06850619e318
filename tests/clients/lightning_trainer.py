"""Lightning's Trainer. Ours is the strategy that the README shows."""

import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.clients.job import BATCH, EPOCHS, STEPS, Job, Trained, copied, readme_block, samples, small_model

OURS = paceline.DistributedDataParallel


class Lit(pl.LightningModule):
    """The model, and the losses that it had."""

    def __init__(self, ddp: type[nn.Module], *, manual: bool) -> None:
        super().__init__()
        self.ddp = ddp
        self.automatic_optimization = not manual
        self.net = small_model()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        assert type(self.trainer.strategy.model) is self.ddp


def train(job: Job, ddp: type[nn.Module], save: Path, resume: Path | None) -> Trained:
    ours = readme_block("PacelineFabric")["Paceline"]
    strategy = ours(placement=job.placement) if issubclass(ddp, OURS) else DDPStrategy()
    bases = (Lit,) if job.placement == "ddp" else (readme_block("class Clips")["Clips"], Lit)
    model = type("Model", bases, {})(ddp, manual=job.manual)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")  # which would make tiny data slower
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # between Lightning and torch
        warnings.filterwarnings("ignore", "The dirpath has changed")  # a resumed run saves elsewhere
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            precision=job.precision,
            accumulate_grad_batches=job.microbatches,
            gradient_clip_val=job.clip,
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=save,
            callbacks=[ModelCheckpoint(save, "{epoch}", every_n_epochs=1, save_top_k=-1)],
        )
        trainer.fit(model, DataLoader(TensorDataset(samples(job.microbatches)), BATCH), ckpt_path=resume)
    assert trainer.global_step == EPOCHS * STEPS
    return Trained(copied(model.state_dict()), model.losses)


def checkpoint(save: Path) -> Path:
    return save / "epoch=0.ckpt"
