"""Ranks of test_styles.py: interlace's parallel styles beside torch's, on one process group."""

import copy
import functools
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import interlace
import interlace.compile
import interlace.tensor as styles

WIDTH, INNER, SEQUENCE = 8, 16, 4
FORMS = ("module", "copy", "checkpointed", "compiled")
Plan = Callable[[Any], dict[str, Any]]


def model(bias: bool = True, inner: int = INNER) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, inner, bias=bias), nn.GELU(), nn.Linear(inner, WIDTH, bias=bias)
    )


def shape_of(dim: int) -> tuple[int, ...]:
    """[s, h] for dimension 0, [b, s, h] for 1."""
    return (SEQUENCE, WIDTH) if dim == 0 else (3, SEQUENCE, WIDTH)


def both(
    mesh: DeviceMesh,
    make: Callable[[], nn.Module],
    plan: Plan,
    inputs: Callable[[], Any],
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
    """This rank's own shard."""

    def made() -> torch.Tensor:
        torch.manual_seed(1 + dist.get_rank())
        return torch.randn(shape_of(dim))

    return made


def feed_forward(mesh: DeviceMesh, dim: int, bias: bool, scattered: bool, local: bool) -> None:
    def plan(kind: Any) -> dict[str, Any]:
        output = Shard(dim) if scattered else Replicate()
        return {
            "0": kind.ColwiseParallel(input_layouts=Shard(dim)),
            "2": kind.RowwiseParallel(output_layouts=output, use_local_output=local),
        }

    _, said = both(mesh, lambda: model(bias), plan, sequence(dim))
    last = f"matmul_reduce_scatter over dimension {dim}" if scattered else "matmul_all_reduce"
    assert said == {"0": f"all_gather_matmul over dimension {dim}", "2": last}, said


def other_output_layouts(mesh: DeviceMesh) -> None:
    """The product is fused, and goes on as a DTensor does."""

    def plan(kind: Any) -> dict[str, Any]:
        return {"0": kind.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}

    _, said = both(mesh, lambda: nn.Sequential(model()[0]), plan, sequence(1))
    assert said == {"0": "all_gather_matmul over dimension 1"}, said


def dtensor_inputs(mesh: DeviceMesh) -> None:
    """What a DTensor says of itself counts, not input_layouts."""

    def plan(kind: Any) -> dict[str, Any]:
        return {"": kind.ColwiseParallel(input_layouts=Shard(1))}

    for placement, text in (
        (Shard(1), "all_gather_matmul over dimension 1"),
        (
            Replicate(),
            "torch's ColwiseParallel: the input is replicated, not sharded by sequence: nothing",
        ),
    ):

        def made(placement: Any = placement) -> DTensor:
            torch.manual_seed(5)
            return DTensor.from_local(torch.randn(shape_of(1)), mesh, [placement])

        torch.manual_seed(0)
        _, said = both(mesh, lambda: model()[0], plan, made)
        assert said[""].startswith(text), said


def fallbacks(mesh: DeviceMesh) -> None:
    """torch's way, and why."""

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    def column(**options: Any) -> Plan:
        return lambda kind: {"": kind.ColwiseParallel(**options)}

    def row(**options: Any) -> Plan:
        return lambda kind: {"": kind.RowwiseParallel(**options)}

    def features() -> torch.Tensor:
        torch.manual_seed(1 + dist.get_rank())
        return torch.randn(2, SEQUENCE, WIDTH // dist.get_world_size())

    def replicated() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randn(shape_of(1))

    def linear(kind: Any = nn.Linear, inputs: int = WIDTH, outputs: int = INNER) -> Any:
        torch.manual_seed(0)
        return kind(inputs, outputs)

    expected: list[tuple[Any, Plan, Any, str]] = [
        (linear, column(), replicated, "not sharded by sequence"),
        (lambda: linear(Own), column(input_layouts=Shard(1)), sequence(1), "Own may differ"),
        (linear, row(output_layouts=Shard(-1)), features, "neither replicated nor sharded"),
        (linear, row(output_layouts=Partial()), features, "neither replicated nor sharded"),
        (linear, row(input_layouts=Replicate()), replicated, "not sharded by features"),
    ]
    for make, plan, inputs, reason in expected:
        _, said = both(mesh, make, plan, inputs)
        assert reason in said[""] and "torch's" in said[""], (reason, said)
    odd = linear(outputs=INNER + 1)
    odd = torch_styles.parallelize_module(odd, mesh, styles.ColwiseParallel(input_layouts=Shard(1)))
    odd(sequence(1)())
    assert f"out_features length {INNER + 1} of dimension 0 is not divided" in odd.explain()


def embeddings_and_norms(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(12, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.0), *model()
        )

    def plan(kind: Any) -> dict[str, Any]:
        return {
            "0": kind.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1": kind.SequenceParallel(),
            "2": kind.SequenceParallel(use_local_output=True),
            "3": kind.ColwiseParallel(input_layouts=Shard(1)),
            "5": kind.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }

    _, said = both(mesh, make, plan, lambda: torch.arange(2 * SEQUENCE).view(2, SEQUENCE))
    assert "Embedding is no nn.Linear" in said["0"] and "SequenceParallel" in said["1"]
    assert said["3"].startswith("all_gather_matmul") and "reduce_scatter" in said["5"]


def autocast(mesh: DeviceMesh) -> None:
    module = torch_styles.parallelize_module(
        model(), mesh, {"0": styles.ColwiseParallel(input_layouts=Shard(1)),
                        "2": styles.RowwiseParallel(output_layouts=Shard(1))},
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        output = module(sequence(1)())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert module[0].weight.grad.dtype == torch.float32
    assert styles.explain(module)["2"] == "matmul_reduce_scatter over dimension 1"


def optimizers(mesh: DeviceMesh) -> None:
    """A step, and what is left of the model afterwards, is torch's."""
    found = []
    for kind in (torch_styles, styles):
        module = torch_styles.parallelize_module(
            model(), mesh, {"0": kind.ColwiseParallel(input_layouts=Shard(1)),
                            "2": kind.RowwiseParallel(output_layouts=Shard(1))},
        )  # fmt: skip
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(sequence(1)()).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        found.append([whole(each).detach() for each in module.parameters()])
    for each, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


def in_other_forms(mesh: DeviceMesh) -> None:
    """A copy, under activation checkpointing, and compiled as one graph."""
    x, found = sequence(1)(), []
    for kind, form in ((torch_styles, "module"), *((styles, form) for form in FORMS)):
        module = torch_styles.parallelize_module(
            model(), mesh, {"0": kind.ColwiseParallel(input_layouts=Shard(1)),
                            "2": kind.RowwiseParallel(output_layouts=Shard(1))},
        )  # fmt: skip
        module = copy.deepcopy(module) if form == "copy" else module
        call: Any = module
        if form == "checkpointed":
            call = functools.partial(checkpoint, module, use_reentrant=False)
        elif form == "compiled":
            if dist.get_world_size() > 2 or dist.get_backend() == "gloo":
                continue  # Dynamo takes seconds
            torch._dynamo.reset()
            call = torch.compile(module, backend="aot_eager", fullgraph=True)
        input = x.clone().requires_grad_()
        output = call(input)
        output.square().sum().backward()
        gradients = [whole(each.grad) for each in module.parameters()]
        found.append([whole(output), input.grad, *gradients])
        if kind is styles and form != "compiled":
            assert "matmul_reduce_scatter" in styles.explain(module)["2"]
    for each in found[1:]:
        for mine, theirs in zip(each, found[0], strict=True):
            torch.testing.assert_close(mine, theirs)


def cases(world_size: int) -> dict[str, Callable[[DeviceMesh], None]]:
    from multi.tensor import shared_gather_ranks as shared  # which takes what is above

    made: dict[str, Callable[[DeviceMesh], None]] = {}
    for dim, bias, scattered, local in (
        (0, True, True, True),
        (0, False, False, True),
        (1, True, True, False),
        (1, True, False, False),
        (1, False, True, True),
        (1, True, False, True),
    ):
        name = f"feed forward, dim {dim}, bias {bias}, scattered {scattered}, local {local}"
        made[name] = lambda mesh, a=(dim, bias, scattered, local): feed_forward(mesh, *a)  # type: ignore[misc]
    for prepared, local in ((True, True), (True, False), (False, True), (False, False)):
        name = f"one gather, prepared {prepared}, local {local}"
        made[name] = lambda mesh, a=(prepared, local): shared.one_gather(mesh, *a)  # type: ignore[misc]
    for function in (
        shared.nothing_is_kept, shared.gathered_again, shared.read_by_others,
        shared.changed_in_place, shared.gradient_of_the_prepared,
        shared.prepared_in_torchs_way, shared.prepared_outputs_and_kwargs, other_output_layouts,
        dtensor_inputs, fallbacks, embeddings_and_norms, autocast, optimizers, in_other_forms,
    ):  # fmt: skip
        made[function.__name__] = function
    return made


def run_all(backend: str, path: str) -> dict[str, str]:
    """By case the traceback of what failed, else ""."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(path, world_size)
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        found = {}
        for name, case in cases(world_size).items():
            try:
                case(mesh)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
        return found
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    with tempfile.TemporaryDirectory() as folder:
        for name, text in interlace.run(
            run_all, int(sys.argv[2]), sys.argv[1], f"{folder}/store", place="shm"
        )[0].items():
            print(name, text)
