"""Hugging Face accelerate: parameters sharded by FSDP2, activations computed again in backward."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

PACKAGES = ("accelerate",)
TRAINS = "a transformer encoder, FSDP2, gradients clipped"
TOLD = '`init_process_group("interlace")` before `Accelerator(cpu=True)`'


def train(backend: str, step: Callable[[object], None]) -> None:
    dist.init_process_group(backend)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    inputs, targets = torch.randn(2, 8, 32, 64)
    for _ in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step(accelerator.reduce(loss.detach(), "mean"))
