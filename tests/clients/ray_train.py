"""Ray Train: its torch backend, which makes the process group in actors of Ray."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

PACKAGES = ("ray",)
TRAINS = "a regression, `TorchTrainer` with DDP"
TOLD = '`TorchConfig(backend="interlace")`'


def worker(job: dict[str, str]) -> None:
    """Train as a rank, and return the losses of all ranks together."""
    from clients.run import Steps

    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = Steps()
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(64, 64)
    for _ in range(20):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        steps(loss)
    if dist.get_rank() == 0:
        Path(job["results"]).write_text(json.dumps([steps.losses, steps.seconds]))


def train(backend: str, step: Any) -> None:
    """Ray's actors are the ranks; the process of rank 0 starts them, and the other processes return."""
    if os.environ["RANK"] != "0":
        return
    ranks = int(os.environ["WORLD_SIZE"])
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]
    ray.init(num_cpus=ranks, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            worker,
            train_loop_config={"results": f"{folder}/results"},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 0.5}),
        ).fit()
        step.losses, step.seconds = json.loads(Path(folder, "results").read_text())
    ray.shutdown()
