"""Ranks of test_nn_checkpoints.py: a model in checkpoints of torch.distributed.checkpoint."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace import nn as inn
from multi.process_group.backend_ranks import world

VOCABULARY, WIDTH, HEADS, KV = 7, 8, 4, 2


class Model(nn.Module):
    """Every layer there is; with more than two ranks the key-value heads are replicated."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = inn.VocabParallelEmbedding(VOCABULARY, WIDTH, group=group)
        self.first = inn.LayerNorm(WIDTH, group=group)
        self.attention = inn.QKVParallelLinear(WIDTH, HEADS, KV, group=group)
        self.projection = inn.RowParallelLinear(WIDTH, WIDTH, group=group)
        self.mlp = inn.SequenceParallelMLP(WIDTH, 16, "silu", gated=True, group=group)
        self.last = inn.RMSNorm(WIDTH, group=group)
        self.head = nn.Linear(WIDTH, 2)  # torch's own


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * width)
        self.k, self.v = nn.Linear(WIDTH, KV * width), nn.Linear(WIDTH, KV * width)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)


class Unsharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = FeedForward()
        self.last = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)


def made(seed: int, group: Any = None, kind: Any = Model) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = kind() if kind is Unsharded else kind(group)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith(("first", "last")):
                value.normal_()  # replicated, and after all else is drawn
    return model


def named(form: str) -> Any:
    """The group of all ranks, in one of the forms."""
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
    """A step with gradients that are drawn, each rank's part of the same."""
    own = inn.shardings(model)
    for key, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(100 * step + sum(key.encode()))
        sharding = own.get(key)
        shape = tuple(parameter.shape)
        whole = torch.randn(sharding.full_shape(shape) if sharding else shape, generator=generator)
        parameter.grad = sharding.local(whole).clone() if sharding else whole
    optimizer.step()


def trained(steps: int) -> nn.Module:
    reference = made(1, kind=Unsharded)
    optimizer = adam(reference)
    for step in range(steps):
        train(reference, optimizer, step)
    return reference


def save(path: str, folder: str, form: str) -> None:
    with world(path):
        model = made(1, named(form))
        optimizer = adam(model)
        check(model, trained(0))
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        check(model, trained(2))
        dcp.save(states_of(model, optimizer), checkpoint_id=folder)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": inn.sharded_state_dict(model),
        "optimizer": inn.sharded_optimizer_state_dict(model, optimizer),
    }


def load(path: str, folder: str, form: str) -> None:
    """Into a model with other weights, in place; it goes on as if it had never stopped."""
    with world(path):
        model = made(2, named(form))
        optimizer = adam(model)
        states = states_of(model, optimizer)
        dcp.load(states, checkpoint_id=folder)
        check(model, trained(2))
        again = made(3, named(form))
        again.load_state_dict(states["model"])
        check(again, trained(2))
        train(model, optimizer, 2)
        check(model, trained(3))


def load_alone(folder: str) -> None:
    """One rank, no torch.distributed."""
    model = made(2)
    optimizer = adam(model)
    dcp.load(states_of(model, optimizer), checkpoint_id=folder, no_dist=True)
    train(model, optimizer, 2)
    check(model, trained(3))


def load_elsewhere(path: str) -> None:
    """DTensors that lie otherwise than the parameters are gathered first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with world(path):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        reference = made(1, kind=Unsharded)
        for placement in (Shard(0), Replicate()):
            states = {
                key: distribute_tensor(value, mesh, [placement])
                for key, value in reference.state_dict().items()
                if not key.startswith("head")
            }
            model = made(2)
            model.load_state_dict(states, strict=False)
            with torch.no_grad():
                model.head.load_state_dict(reference.head.state_dict())
            check(model, reference)


def small(group: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(inn.LayerNorm(8, group=group), inn.SequenceParallelMLP(8, 16, group=group))


def load_from_rows(path: str) -> None:
    """What lies over pairs of ranks, however these are named, loads into what lies over all."""
    with world(path):
        pairs = [[0, 1], [2, 3]]
        groups = [dist.new_group(each) for each in pairs]
        own = groups[dist.get_rank() // 2]
        for named in (pairs, pairs[dist.get_rank() // 2], own.group_name):
            rows, over_all = small(named, 1), small(None, 2)
            over_all.load_state_dict(inn.sharded_state_dict(rows))
            expected = inn.full_state_dict(rows)
            for key, value in inn.full_state_dict(over_all).items():
                assert torch.equal(value, expected[key]), key
            if named == own.group_name:
                whole = inn.sharded_state_dict(rows)["1.up.weight"].full_tensor()
                assert torch.equal(whole, expected["1.up.weight"])


def beside_data_parallel(path: str, folder: str, wrap: str) -> None:
    """Two steps of DDP or FSDP2 over one dimension of a mesh, the layers split over the other."""
    from torch.distributed.fsdp import fully_shard

    with world(path):
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
        dcp.save(states_of(model, optimizers[0]), checkpoint_id=folder)
        other_model, other_parallel = wrapped(1)
        other_optimizer = adam(other_parallel)
        states = states_of(other_model, other_optimizer)
        dcp.load(states, checkpoint_id=folder)
        other_model.load_state_dict(states["model"])
        inn.load_optimizer_state_dict(other_model, other_optimizer, states["optimizer"])
        same(other_model, found)
        moments = inn.sharded_optimizer_state_dict(other_model, other_optimizer)
        expected = inn.sharded_optimizer_state_dict(model, optimizers[0])
        assert len(expected) == 3 * len(found)
        for key, value in expected.items():
            assert torch.equal(whole(moments[key]), whole(value)), key
            assert whole(value).abs().sum() > 0, key
        third, _ = wrapped(2)
        third.load_state_dict(found)  # the unsharded one
        same(third, found)


def same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for key, value in inn.full_state_dict(model).items():
        assert torch.equal(value, expected[key]), key


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def refused() -> str:
    try:
        inn.sharded_state_dict(inn.ColumnParallelLinear(2, 4))
    except ValueError as error:
        return str(error)
    return f"nothing on {interlace.get_rank()}"


def refused_state(wrong: str) -> str:
    """What every rank is told if the last has not what the optimizer has."""
    model = inn.RMSNorm(4)
    optimizer = adam(model)
    state = inn.sharded_optimizer_state_dict(model, optimizer)
    if interlace.get_rank() == 1:
        if wrong == "missing":
            del state["weight.exp_avg"]
        else:
            state["weight.exp_avg"] = torch.ones(3) if wrong == "shape" else 1.0
    try:
        inn.load_optimizer_state_dict(model, optimizer, state)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def steps_after(make: Any, asked: bool) -> torch.Tensor:
    """A weight after two steps of the optimizer, of whose state a checkpoint was made before them."""
    model = inn.RMSNorm(4)
    optimizer = make(model.parameters())
    if asked:
        inn.sharded_optimizer_state_dict(model, optimizer)
    for step in range(2):
        model.weight.grad = torch.arange(4.0) + step
        optimizer.step()
    return model.weight.detach()
