"""Checkpoints of torch.distributed.checkpoint, saved on one number of ranks and loaded on another."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import interlace
from interlace import nn as inn
from ranks import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VOCABULARY, WIDTH, HEADS, KV = 7, 8, 4, 2


class ShardedModel(nn.Module):
    """A model with every layer; with more than two ranks the key-value heads are replicated."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = inn.VocabParallelEmbedding(VOCABULARY, WIDTH, group=group)
        self.first = inn.LayerNorm(WIDTH, group=group)
        self.attention = inn.QKVParallelLinear(WIDTH, HEADS, KV, group=group)
        self.projection = inn.RowParallelLinear(WIDTH, WIDTH, group=group)
        self.mlp = inn.SequenceParallelMLP(WIDTH, 16, "silu", gated=True, group=group)
        self.last = inn.RMSNorm(WIDTH, group=group)
        self.head = nn.Linear(WIDTH, 2)  # torch's own


class UnshardedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": WIDTH, "k": KV * WIDTH // HEADS, "v": KV * WIDTH // HEADS}
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)  # drawn in this order
        self.first = nn.LayerNorm(WIDTH)
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, n) for name, n in sizes.items()})
        self.projection = nn.Linear(WIDTH, WIDTH)
        up = {name: nn.Linear(WIDTH, 16) for name in ("gate", "up")}
        self.mlp = nn.ModuleDict({**up, "down": nn.Linear(16, WIDTH)})
        self.last = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)


def made(seed: int, group: Any = None, kind: Any = ShardedModel) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = kind() if kind is UnshardedModel else kind(group)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith(("first", "last")):
                value.normal_()  # replicated, and after all else is drawn
    return model


def named(form: str) -> Any:
    """Return the group of all ranks in one of the forms."""
    size = dist.get_world_size()
    if form == "mesh":
        return init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor")), "tensor"
    return {"none": None, "world": dist.group.WORLD, "ranks": list(range(size))}[form]


def check(model: nn.Module, reference: nn.Module) -> None:
    found = inn.full_state_dict(model)
    assert list(found) == list(reference.state_dict())
    for key, expected in reference.state_dict().items():
        assert torch.equal(found[key], expected), key
    reference.load_state_dict(found, strict=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step with random gradients; each rank has its part of the same gradients."""
    own = inn.shardings(model)
    for key, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(100 * step + sum(key.encode()))
        sharding = own.get(key)
        shape = tuple(parameter.shape)
        whole = torch.randn(sharding.full_shape(shape) if sharding else shape, generator=generator)
        parameter.grad = sharding.local(whole).clone() if sharding else whole
    optimizer.step()


def trained(steps: int) -> nn.Module:
    reference = made(1, kind=UnshardedModel)
    optimizer = adam(reference)
    for step in range(steps):
        train(reference, optimizer, step)
    return reference


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": inn.sharded_state_dict(model),
        "optimizer": inn.sharded_optimizer_state_dict(model, optimizer),
    }


@ranks(backend="interlace")
def save(world_size: int, folder: Path, form: str) -> None:
    model = made(1, named(form))
    optimizer = adam(model)
    check(model, trained(0))
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    check(model, trained(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=folder / "checkpoint")


@ranks(backend="interlace")
def load(world_size: int, folder: Path, form: str) -> None:
    """Load into a model with other weights in place, and continue the training."""
    model = made(2, named(form))
    optimizer = adam(model)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder / "checkpoint")
    check(model, trained(2))
    again = made(3, named(form))
    again.load_state_dict(states["model"])
    check(again, trained(2))
    train(model, optimizer, 2)
    check(model, trained(3))


@ranks(1)
def load_alone(folder: Path) -> None:
    model = made(2)
    optimizer = adam(model)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder / "checkpoint", no_dist=True)
    train(model, optimizer, 2)
    check(model, trained(3))


@pytest.mark.parametrize("size, forms", [(4, ("mesh", "world")), (2, ("none", "ranks"))])
def test_saved_on_some_ranks_loads_on_others(
    tmp_path: Path, size: int, forms: tuple[str, str]
) -> None:
    save(world_size=size, folder=tmp_path, form=forms[0])
    for number in (1, 2, 4):
        load(world_size=number, folder=tmp_path, form=forms[1])
    load_alone(folder=tmp_path)


@ranks(backend="interlace")
def test_dtensors_that_lie_otherwise_are_gathered() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference = made(1, kind=UnshardedModel)
    for placement in (Shard(0), Replicate()):
        states = {
            key: distribute_tensor(value, mesh, [placement])
            for key, value in reference.state_dict().items()
            if not key.startswith("head")
        }
        model = made(2)
        model.load_state_dict(states, strict=False)
        model.head.load_state_dict(reference.head.state_dict())  # type: ignore[union-attr, operator]
        check(model, reference)


def small(group: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(inn.LayerNorm(8, group=group), inn.SequenceParallelMLP(8, 16, group=group))


def check_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for key, value in inn.full_state_dict(model).items():
        assert torch.equal(value, expected[key]), key


@ranks(4, backend="interlace")
def test_dtensors_over_some_ranks_load_over_all() -> None:
    pairs = [[0, 1], [2, 3]]
    groups = [dist.new_group(each) for each in pairs]
    own = groups[dist.get_rank() // 2]
    for named in (pairs, pairs[dist.get_rank() // 2], own.group_name):
        rows, over_all = small(named, 1), small(None, 2)
        over_all.load_state_dict(inn.sharded_state_dict(rows))
        expected = inn.full_state_dict(rows)
        check_same(over_all, expected)
        if named == own.group_name:
            whole = inn.sharded_state_dict(rows)["1.up.weight"].full_tensor()
            assert torch.equal(whole, expected["1.up.weight"])


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
@ranks(4, backend="interlace")
def test_beside_data_parallel(tmp_path: Path, wrap: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def wrapped(seed: int) -> tuple[nn.Module, nn.Module]:
        model = small((mesh, "tensor"), seed)
        if wrap == "fully_shard":
            return model, fully_shard(model, mesh=mesh["data"])
        group = mesh.get_group("data")
        return model, nn.parallel.DistributedDataParallel(model, process_group=group)

    model, parallel = wrapped(0)
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    reference = nn.Sequential(nn.LayerNorm(8), up, nn.GELU(), down)
    optimizers = [adam(each) for each in (parallel, reference)]
    for step in range(2):
        batches = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(step))
        mine = batches[mesh.get_local_rank("data")]
        mine = mine.chunk(2)[mesh.get_local_rank("tensor")]
        parallel(mine).square().sum().backward()
        (reference(batches.flatten(0, 1)).square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = inn.full_state_dict(model)
    for one, other in zip(found.values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)
    dcp.save(states_of(model, optimizers[0]), checkpoint_id=tmp_path / "checkpoint")
    other_model, other_parallel = wrapped(1)
    other_optimizer = adam(other_parallel)
    states = states_of(other_model, other_optimizer)
    dcp.load(states, checkpoint_id=tmp_path / "checkpoint")
    other_model.load_state_dict(states["model"])
    inn.load_optimizer_state_dict(other_model, other_optimizer, states["optimizer"])
    check_same(other_model, found)
    moments = inn.sharded_optimizer_state_dict(other_model, other_optimizer)
    expected = inn.sharded_optimizer_state_dict(model, optimizers[0])
    assert len(expected) == 3 * len(found)
    for key, value in expected.items():
        assert torch.equal(whole(moments[key]), whole(value)), key
        assert whole(value).abs().sum() > 0, key
    third, _ = wrapped(2)
    third.load_state_dict(found)  # the unsharded one
    check_same(third, found)


@ranks()
def test_dtensors_need_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"a group of the ranks \[0, 1\] needs torch.distributed"):
        inn.sharded_state_dict(inn.ColumnParallelLinear(2, 4))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (None, "has no entry weight.exp_avg"),
        (torch.ones(3), r"weight.exp_avg must have shape \(4,\), got \(3,\)"),
        (1.0, "weight.exp_avg is a float"),
    ],
)
@ranks(place="sim")
def test_state_that_is_not_the_optimizers(wrong: Any, said: str) -> None:
    model = inn.RMSNorm(4)
    optimizer = adam(model)
    state = inn.sharded_optimizer_state_dict(model, optimizer)
    if interlace.get_rank() == 1:
        del state["weight.exp_avg"]
        state |= {} if wrong is None else {"weight.exp_avg": wrong}
    with pytest.raises((ValueError, TypeError), match=said):
        inn.load_optimizer_state_dict(model, optimizer, state)
