"""PhysicsNeMo: a layer split over ranks by its parallel regions, another one shared by all of them."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from physicsnemo.distributed import DistributedManager, mark_module_as_shared
from physicsnemo.distributed.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from torch import nn

PACKAGES = ("nvidia-physicsnemo",)
TRAINS = "an MLP by its parallel regions, its last layer a shared module"
TOLD = '`DistributedManager.setup(backend="interlace")`'


class Split(nn.Module):
    """A layer that all ranks share: hidden units by rank, then rows by rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128 // ranks), nn.Linear(128 // ranks, 32, bias=False)
        self.shared = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(copy_to_parallel_region(x, "model"))))
        x = scatter_to_parallel_region(reduce_from_parallel_region(x, "model"), 0, "model")
        rows = [64 // DistributedManager().world_size] * DistributedManager().world_size
        return gather_from_parallel_region(self.shared(x), 0, rows, "model")


def set_up(backend: str) -> tuple[int, int]:
    """Return PhysicsNeMo's manager on this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # It binds the group to its device, which torch refuses of a CPU, and leaves that out on a TypeError.
    init = dist.init_process_group
    dist.init_process_group = lambda name, rank, world_size: init(
        name, rank=rank, world_size=world_size
    )
    DistributedManager.setup(rank, ranks, rank, port=os.environ["MASTER_PORT"], backend=backend)
    return rank, ranks


def train(backend: str, step: Callable[[object], None]) -> None:
    rank, ranks = set_up(backend)
    DistributedManager.create_process_subgroup("model", ranks)
    inputs, targets = torch.randn(2, 64, 32)
    torch.manual_seed(1 + rank)
    model = Split(ranks)
    torch.manual_seed(0)
    model.shared.reset_parameters()
    mark_module_as_shared(model.shared, "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)
