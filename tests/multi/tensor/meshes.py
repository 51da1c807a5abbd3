"""Tests on meshes of processes, and interlace's parallel styles and shards beside torch's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._collective_utils as torch_utils
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import interlace.tensor as styles
from ranks import ranks
from tiers import few

FEW = few([("interlace", 2), ("gloo", 2), ("interlace", 4), ("gloo", 4)], ("interlace", 2))


def on_meshes(body: Callable[..., None]) -> Callable[..., Any]:
    """Run a test's body on every rank of a mesh of one dim, which it gets as ``mesh``."""

    def in_world(backend: str, world_size: int, **given: Any) -> None:
        body(mesh=init_device_mesh("cpu", (world_size,)), **given)

    own = list(inspect.signature(in_world).parameters.values())[:2]
    more = [each for name, each in inspect.signature(body).parameters.items() if name != "mesh"]
    functools.update_wrapper(in_world, body)
    in_world.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return pytest.mark.parametrize(("backend", "world_size"), FEW)(ranks()(in_world))


def expected_chunk(parts: list[torch.Tensor], gather_dim: int, shard_dim: int, rank: int) -> Any:
    """Return the chunk that torch defines: all-gather, chunk, and empty chunks at the end."""
    chunks = list(torch.cat(parts, gather_dim).chunk(len(parts), shard_dim))
    missing = len(parts) - len(chunks)
    chunks = torch_utils.fill_empty_tensor_to_shards(chunks, shard_dim, missing)
    return chunks[rank].contiguous()


# -- parallel styles ------------------------------------------------------------------------------------

WIDTH, INNER, SEQUENCE = 8, 16, 4
Plan = Callable[[Any], dict[str, Any]]


def model(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)
    return nn.Sequential(up, nn.GELU(), down)


def shape_of(dim: int) -> tuple[int, ...]:
    """Return [s, h] for dimension 0, [b, s, h] for 1."""
    return (SEQUENCE, WIDTH) if dim == 0 else (3, SEQUENCE, WIDTH)


def both(
    mesh: DeviceMesh, make: Callable[[], nn.Module], plan: Plan, inputs: Callable[[], Any]
) -> tuple[nn.Module, dict[str, str]]:
    """Run ``make()`` under torch's styles and under interlace's, and compare everything."""
    seen = []
    for kind in (torch_styles, styles):
        module = torch_styles.parallelize_module(make(), mesh, plan(kind))
        input = inputs()
        if isinstance(input, torch.Tensor) and input.is_floating_point():
            input.requires_grad_()
        for _ in range(2):  # gradients add up
            output = module(input)
            value = output.full_tensor() if isinstance(output, DTensor) else output
            weights = torch.linspace(0.5, 1.5, value.numel()).view(value.shape)
            (value * weights).square().sum().backward()
        seen.append((module, input, output))
    (reference, x, y), (module, found_x, found_y) = seen
    assert found_y.shape == y.shape and found_y.stride() == y.stride()
    if isinstance(y, DTensor):
        assert found_y.placements == y.placements, (found_y.placements, y.placements)
    compare("output", found_y, y)
    compare("gradient of the input", found_x.grad, x.grad)
    for (name, p), (other, q) in zip(
        module.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == other
        compare(f"gradient of {name}", p.grad, q.grad)
    compare_states(module, reference)
    return module, styles.explain(module)


def whole(tensor: Any) -> Any:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(what: str, found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None), what
    if found is None:
        return
    assert isinstance(found, DTensor) == isinstance(expected, DTensor), what
    torch.testing.assert_close(whole(found), whole(expected), msg=lambda m: f"{what}: {m}")


def compare_states(module: nn.Module, reference: nn.Module) -> None:
    state, expected = module.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert value.placements == expected[name].placements, name
        assert torch.equal(value.to_local(), expected[name].to_local()), name
    module.load_state_dict(expected)


def sequence(dim: int) -> Callable[[], torch.Tensor]:
    def made() -> torch.Tensor:
        torch.manual_seed(1 + dist.get_rank())
        return torch.randn(shape_of(dim))

    return made
