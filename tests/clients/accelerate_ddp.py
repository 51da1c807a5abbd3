"""Hugging Face accelerate: data parallel by DistributedDataParallel, gradients accumulated and clipped."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("accelerate",)
TRAINS = "a classifier, DDP, gradients accumulated over two batches and clipped"
TOLD = '`init_process_group("interlace")` before `Accelerator(cpu=True)`, which knows gloo only'


def train(backend: str, step: Callable[[object], None]) -> None:
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = torch.randn(640, 32)
    data = TensorDataset(examples, examples[:, :8].argmax(1))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            step(accelerator.gather(loss).mean())
