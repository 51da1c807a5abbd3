"""Lightning: its Trainer with the DDP strategy, metrics averaged over ranks."""

import logging
import os
from collections.abc import Callable

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("lightning",)
TRAINS = "an autoencoder, `Trainer` with DDP, the logged loss averaged over ranks"
TOLD = '`DDPStrategy(process_group_backend="interlace")`'


class Autoencoder(lightning.LightningModule):
    def __init__(self, step: Callable[[object], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
        self.step = step

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.step(self.trainer.callback_metrics["loss_step"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(backend: str, step: Callable[[object], None]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(640, 64))
    trainer.fit(Autoencoder(step), DataLoader(data, batch_size=16))
