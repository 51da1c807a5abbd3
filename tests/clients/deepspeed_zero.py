"""DeepSpeed: parameters, gradients and the optimizer's state partitioned by ZeRO stage 3."""

import os
from collections.abc import Callable

import torch
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

PACKAGES = ("deepspeed",)
TRAINS = "a deep MLP, ZeRO stages 1, 2 and 3 one after another"
TOLD = '`deepspeed.init_distributed(dist_backend="interlace")`'


def train(backend: str, step: Callable[[object], None]) -> None:
    deepspeed.init_distributed(dist_backend=backend)
    rank = int(os.environ["RANK"])
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 1.0,
            },
        )
        torch.manual_seed(1 + rank)
        inputs, targets = torch.randn(2, 16, 64)
        for _ in range(10):
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            step(loss)
