"""Torch's ways to train in parallel give the numbers of one process on the backend."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import ranks

WORLD_SIZE, ROWS, WIDTH, RATE = 2, 4, 6, 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(WORLD_SIZE * ROWS, WIDTH, generator=generator)


def mine() -> torch.Tensor:
    return batch().chunk(WORLD_SIZE)[dist.get_rank()]


def trained(steps: int = 2) -> nn.Module:
    """Train the model on whole batches in one process."""
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        reference(batch()).square().mean().backward()
        optimizer.step()
    return reference


def train(parallel: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(mine()).square().mean().backward()
        optimizer.step()


def sgd(parallel: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.parameters(), lr=RATE)


def check(found: Any, reference: nn.Module) -> None:
    for (name, value), expected in zip(found, reference.parameters(), strict=True):
        torch.testing.assert_close(
            value.detach(), expected.detach(), msg=lambda m, n=name: f"{n}: {m}"
        )


def ddp(**options: Any) -> None:
    parallel = nn.parallel.DistributedDataParallel(model(), **options)
    train(parallel, sgd(parallel))
    check(parallel.module.named_parameters(), trained())


def ddp_with_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    parallel = nn.parallel.DistributedDataParallel(model())
    parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    train(parallel, sgd(parallel))
    check(parallel.module.named_parameters(), trained())


def zero_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, lr=RATE)
    train(parallel, optimizer)
    check(parallel.module.named_parameters(), trained())


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    parallel = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(parallel, sgd(parallel))
    with FullyShardedDataParallel.summon_full_params(parallel):
        check(parallel.module.named_parameters(), trained())


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model(), mesh=cpu_mesh())


def cpu_mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))


def full(parallel: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.full_tensor()) for name, value in parallel.named_parameters()]


def fsdp2() -> None:
    parallel = sharded()
    train(parallel, sgd(parallel))
    check(full(parallel), trained())


def fsdp2_divide_factor() -> None:
    """Half the world size as divisor gives gradients twice as large; gloo has no such reduction."""
    parallel, reference = sharded(), model()
    parallel.set_gradient_divide_factor(WORLD_SIZE / 2)
    parallel(mine()).square().mean().backward()
    reference(batch()).square().mean().backward()
    for value, expected in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value.grad.full_tensor(), expected.grad * 2)


def dtensor() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, whole = cpu_mesh(), batch()[:7]  # 7 rows on 2 ranks are uneven
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Replicate(), Shard(1)):
        assert torch.equal(rows.redistribute(mesh, [placement]).full_tensor(), whole)
    for kind, expected in (("sum", 2 * whole), ("avg", whole), ("max", whole)):
        partial = DTensor.from_local(whole, mesh, [Partial(kind)])
        for placement in (Replicate(), Shard(0)):
            found = partial.redistribute(mesh, [placement]).full_tensor()
            torch.testing.assert_close(found, expected)
    left = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    right = distribute_tensor(batch()[:WIDTH], mesh, [Shard(0)])
    (left @ right).full_tensor().sum().backward()
    torch.testing.assert_close((left @ right).full_tensor(), whole @ batch()[:WIDTH])
    expected = torch.ones(7, WIDTH) @ batch()[:WIDTH].t()
    torch.testing.assert_close(left.grad.full_tensor(), expected)


def compiled_ddp() -> None:
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model()))
    torch._dynamo.reset()
    compiled = torch.compile(parallel, backend="aot_eager")
    train(compiled, sgd(parallel))
    check(parallel.module.named_parameters(), trained())


CASES: dict[str, Callable[..., None]] = {
    "DDP": ddp,
    "DDP, static graph": lambda: ddp(static_graph=True, gradient_as_bucket_view=True),
    "DDP, communication hook": ddp_with_hook,
    "DDP, compiled": compiled_ddp,
    "ZeRO optimizer": zero_optimizer,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "FSDP2, gradient divide factor": fsdp2_divide_factor,
    "DTensor": dtensor,
}


@pytest.mark.parametrize("name", CASES)
@ranks(WORLD_SIZE, backend="interlace")
def test_framework(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CASES[name]()
