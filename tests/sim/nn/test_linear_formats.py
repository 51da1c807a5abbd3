"""Layers that multiply in a block-scaled format: training, and weights of quantised checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import interlace
from interlace import Scaled, nn, quantize
from interlace.nn import DeferredWeightGradients, column_parallel_linear, row_parallel_linear
from interlace.ops.matmul.formats import FORMATS
from ranks import ranks
from support import noise
from tiers import few

SHARD, BATCH, IN, OUT = 10, 2, 96, 64
"""Rows of a shard are no multiple of 32."""


def linear_step(name: str, seen: str, **options: Any) -> list[torch.Tensor]:
    """Return outputs and gradients of a column-parallel and a row-parallel linear, or of the ops."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    x = noise(rank, 1, (SHARD, BATCH, IN)).requires_grad_()
    up = [noise(rank, 2 + i, (OUT, IN)).requires_grad_() for i in range(2)]
    down = noise(rank, 4, (IN, OUT)).requires_grad_()
    weights = [*up, down]
    if "gradient_accumulation_fusion" in options:
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    if seen == "functions":
        outputs = column_parallel_linear(x, up, group=None, format=name, **options)  # type: ignore[arg-type]
        hidden = outputs[0] * outputs[1]
        y = row_parallel_linear(hidden, down, group=None, format=name, **options)  # type: ignore[arg-type]
    else:
        gathered: Any = interlace.all_gather_matmul(x, [w.t() for w in up], format=name)  # type: ignore[arg-type]
        hidden = gathered[0] * gathered[1]
        y = interlace.matmul_reduce_scatter(hidden, down.t(), format=name)  # type: ignore[arg-type, assignment]
    assert y.shape == (SHARD, BATCH, IN), size
    (y * noise(rank, 5, y.shape)).sum().backward()
    if "deferred" in options:
        assert all(w.grad is None for w in weights)
        options["deferred"].run()
    grads = [getattr(w, "main_grad", w.grad) for w in weights]
    return [y.detach(), x.grad, *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("name", few(FORMATS, "mxfp8"))
def test_linear_functions_are_the_ops(name: str) -> None:
    def case() -> None:
        expected = linear_step(name, "ops")
        ways: list[dict[str, Any]] = [
            {"gradient_accumulation_fusion": True},
            {"deferred": DeferredWeightGradients()},
        ]
        for options in ways:
            assert all(map(torch.equal, linear_step(name, "functions", **options), expected))

    interlace.run(case, 2)


@ranks(place="sim")
def test_without_sequence_parallelism_it_is_the_same_to_the_rounding_of_sums() -> None:
    """Shards are whole blocks, so the blocks along rows are the same."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    whole = noise(0, 1, (32 * size, IN))
    found = []
    for sharded in (True, False):
        x = (whole.chunk(size)[rank] if sharded else whole).clone().requires_grad_()
        w = noise(rank, 2, (OUT, IN)).requires_grad_()
        down = noise(rank, 4, (IN, OUT)).requires_grad_()
        how: dict[str, Any] = {"group": None, "sequence_parallel": sharded, "format": "mxfp8"}
        (hidden,) = column_parallel_linear(x, [w], **how)
        y = row_parallel_linear(hidden, down, **how)
        of_y = noise(0, 5, (32 * size, IN))
        (y * (of_y.chunk(size)[rank] if sharded else of_y)).sum().backward()
        of_x = x.grad if sharded else x.grad.chunk(size)[rank]  # type: ignore[union-attr]
        found.append([hidden.detach(), of_x, w.grad, down.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-4)


# -- training ------------------------------------------------------------------------------------------


def training(
    name: str | None, around: Callable[[Any], Callable[..., Any]], steps: int
) -> list[float]:
    """Return losses of a gated block that learns another one, in bfloat16."""
    torch.manual_seed(0)
    wanted = nn.SequenceParallelMLP(32, 64, "silu", gated=True)
    block = nn.SequenceParallelMLP(32, 64, "silu", gated=True, format=name)  # type: ignore[arg-type]
    forward = around(block.bfloat16())
    optimizer = torch.optim.AdamW(block.parameters(), lr=2e-2)
    losses = []
    for step in range(steps):
        x = noise(interlace.get_rank(), step, (24, 32))
        with torch.no_grad():
            y = wanted(x)
        optimizer.zero_grad()
        loss = (forward(x.bfloat16().requires_grad_()).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        interlace.all_reduce(total, op="avg")
        losses.append(total.item())
    return losses


def plain(block: Any) -> Any:
    return block


def checkpointed(block: Any) -> Any:
    return lambda x: checkpoint(block, x, use_reentrant=False)


def compiled(block: Any) -> Any:
    return torch.compile(block, backend="aot_eager")


@pytest.mark.parametrize("name", few(("mxfp8", "fp8_block128"), "mxfp8"))
def test_a_block_learns_as_in_bfloat16(name: str) -> None:
    wide = interlace.run(training, 2, None, plain, 7)[0]
    assert wide[-1] < wide[0] / 2
    found = interlace.run(training, 2, name, plain, 7)[0]
    assert found != wide
    assert all(abs(a - b) < 0.05 * b for a, b in zip(found, wide, strict=True)), (found, wide)


def test_checkpointed_and_compiled_blocks_have_the_same_losses() -> None:
    expected = interlace.run(training, 2, "mxfp8", plain, 2)
    for around in (checkpointed, compiled):
        assert interlace.run(training, 2, "mxfp8", around, 2) == expected


# -- weights of checkpoints ----------------------------------------------------------------------------


def deepseek(rows: int, columns: int) -> Scaled:
    weight = noise(0, 1, (rows, columns)).to(torch.float8_e4m3fn)
    weight_scale_inv = noise(0, 2, (-(-rows // 128), -(-columns // 128))).abs() + 0.1
    return Scaled(weight, weight_scale_inv, "fp8_block128")


def mxfp8(rows: int, columns: int) -> Scaled:
    return quantize(noise(0, 3, (rows, columns)), "mxfp8")


def nvfp4(rows: int, columns: int) -> Scaled:
    """Return a weight with a scale for each half of the rows, as in a merged layer."""
    made = quantize(noise(0, 4, (rows, columns)), "nvfp4")
    whole = torch.tensor([0.25, 2.0]).repeat_interleave(rows // 2)[:, None]
    return Scaled(made.values, made.scales, "nvfp4", whole)


WEIGHTS = [deepseek, mxfp8, nvfp4]


@pytest.mark.parametrize("make", WEIGHTS)
@ranks(2, place="sim")
def test_a_layer_takes_a_scaled_weight(make: Any) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    up, down = make(192, 256), make(256, 512)
    x = noise(rank, 7, (3, 2, 256))
    layer = nn.ColumnParallelLinear(256, 192, bias=False, device="meta")
    layer.load_scaled(up)
    again = nn.ColumnParallelLinear(256, 192, bias=False)
    first, count = 192 // size * rank, 192 // size
    again.load_scaled(up.narrow(0, first, count))
    y, same = layer(x), again(x)
    (from_function,) = column_parallel_linear(x, [up.narrow(0, first, count)], group=None)
    op: Any = interlace.all_gather_matmul(x, up.narrow(0, first, count).t(), format=up.format)
    assert torch.equal(y, same) and torch.equal(y, from_function) and torch.equal(y, op)
    assert y.dtype == x.dtype and not y.requires_grad
    assert not layer.state_dict() and not list(layer.parameters())

    wide = noise(rank, 8, (2 * size, 2, 512 // size))
    row = nn.RowParallelLinear(512, 256)
    row.load_scaled(down)
    part = row(wide)
    columns = down.narrow(1, 512 // size * rank, 512 // size)
    op = interlace.matmul_reduce_scatter(wide, columns.t(), format=down.format)
    assert torch.equal(part, op + row.bias)
    row.reset_parameters()  # it leaves the weight alone
    assert torch.equal(row(wide), op + row.bias)
    assert list(row.state_dict()) == ["bias"]


@pytest.mark.parametrize(("make", "size"), [(deepseek, 2), (mxfp8, 1), (nvfp4, 2)])
def test_blocks_of_layers_take_scaled_weights(make: Any, size: int) -> None:
    def case() -> None:
        block = nn.SequenceParallelMLP(256, 512, "silu", gated=True, bias=False)
        assert block.gate is not None
        for layer, shape in ((block.gate, (512, 256)), (block.up, (512, 256))):
            layer.load_scaled(make(*shape))
        block.down.load_scaled(make(256, 512))
        heads = nn.QKVParallelLinear(256, 8, 1, head_dim=32)
        heads.q.load_scaled(make(256, 256))
        heads.k.load_scaled(make(32, 256))
        x = noise(0, 7, (4, 256))
        with torch.no_grad():
            y, (q, k, v) = block(x), heads(x)
        q.sum().backward() if q.requires_grad else None
        assert y.shape == (4, 256) and q.shape == (4 * size, 256 // size)
        assert k.shape == v.shape == (4 * size, 32)
        numbers = make(512, 256).dequantize(), make(256, 512).dequantize()
        hidden = x @ numbers[0].T
        whole = (torch.nn.functional.silu(hidden) * hidden) @ numbers[1].T
        bound = {"nvfp4": 0.3}.get(make.__name__, 0.08)
        assert (y - whole).norm() <= bound * whole.norm()
        assert torch.equal(heads(x)[1], k)  # the bias has a gradient
        heads(x)[1].sum().backward()
        torch.testing.assert_close(heads.k.bias.grad, torch.full((32,), 4.0 * size * size))  # type: ignore[union-attr]

    interlace.run(case, size)


@ranks(place="sim")
def test_a_compiled_layer_with_a_scaled_weight() -> None:
    layer = nn.ColumnParallelLinear(256, 128)
    layer.load_scaled(deepseek(128, 256))
    x = noise(0, 7, (4, 256))
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda layer, w: layer.load_scaled(w.dequantize()),
            TypeError,
            "must be an interlace.Scaled",
        ),
        (
            lambda layer, w: layer.load_scaled(w.narrow(0, 0, 64)),
            ValueError,
            r"must be \(256, 192\)",
        ),
        (
            lambda layer, w: layer.load_scaled(w.t()),
            ValueError,
            "its blocks along in_features; got",
        ),
        (
            lambda layer, w: nn.RowParallelLinear(192, 256).load_scaled(w),
            ValueError,
            "blocks of 128 numbers along k, but .* is not a range of whole blocks",
        ),
        (
            lambda layer, w: column_parallel_linear(torch.ones(4, 64), [w], group=None),
            ValueError,
            "input must have as many features as a scaled weight",
        ),
        (
            lambda layer, w: row_parallel_linear(torch.ones(4, 192), w, group=None, format="mxfp8"),
            ValueError,
            r"weights\[0\] must have the format 'mxfp8' .* got 'fp8_block128'",
        ),
        (
            lambda layer, w: column_parallel_linear(
                torch.ones(4, 192, requires_grad=True), [w], group=None
            ),
            RuntimeError,
            "a linear function of a scaled weight has no gradient for its input",
        ),
        (
            lambda layer, w: row_parallel_linear(
                torch.ones(4, 192), Scaled(w.values, 0 * w.scales, w.format), group=None
            ),
            ValueError,
            r"weights\[0\]: scales of fp8_block128 must be finite and greater than 0, got 0.0",
        ),
        (
            lambda layer, w: nn.ColumnParallelLinear(192, 256, format="mxfp8", save_gathered=True)(
                torch.ones(2, 192)
            ),
            ValueError,
            "save_gathered must be False with format='mxfp8'",
        ),
        (
            lambda layer, w: nn.ColumnParallelLinear(192, 256, format="fp8")(torch.ones(2, 192)),  # type: ignore[arg-type]
            ValueError,
            "format must be one of fp8_block128, mxfp8",
        ),
        (
            lambda layer, w: nn.ColumnParallelLinear(64, 34, format="nvfp4"),
            ValueError,
            "nvfp4 has two numbers in a byte: out_features must be even on each rank, got 17",
        ),
        (
            lambda layer, w: nn.MoE(64, 33, 4, 2, format="mxfp4"),
            ValueError,
            "mxfp4 has two numbers in a byte: intermediate_size must be even on each rank, got 33",
        ),
    ],
)
@ranks(2, place="sim")
def test_misuse(call: Any, error: type[Exception], words: str) -> None:
    layer, weight = nn.ColumnParallelLinear(192, 256), deepseek(256, 192)
    with pytest.raises(error, match=words):
        call(layer, weight)
