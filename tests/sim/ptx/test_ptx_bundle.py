"""Bundles run in the place ``ptx`` by their manifests alone: the loader's launches, their PTX.

CuPy is stood for by ``cupy_stand_in.py``; here its launches are run. The right result is that of
interlace's op, unfused. ``build/bundle/test_bundle.py`` compares the launches of every op with the host's.
"""

import functools
import itertools
import pathlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import aot
from interlace.groups.groups import default_group
from interlace.ops.attention.problem import LOG2E
from interlace.ops.experts.routing import Assignment
from interlace.ops.matmul.formats import FORMATS, packed_rows
from interlace.tools.bundle import (
    OPS,
    BundleTarget,
    KernelOptions,
    build_bundles,
    operands_of,
)
from interlace.verify import launch_ptx
from stand_ins import cupy_stand_in

SMALL: dict[int, dict[str, Any]] = {  # by architecture; that for 9.0 loads and stores by TMA
    80: {"block_m": 16, "block_n": 16, "block_k": 16, "copiers": 1},
    90: {"block_m": 64, "block_n": 32, "block_k": 32, "copiers": 1, "output_descriptors": True},
}
ROWS, INNER, COLUMNS = 24, 32, 16
WIDE = 160  # numbers along k of which 128 are not all
WORLD = 2
Numbers = dict[str, Any]
Case = tuple[Numbers, Numbers, list[torch.Tensor], list[torch.Tensor]]
"""Launch values, arguments, what is compared with what."""


class Function:
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, path: str) -> None:
        self.ptx = pathlib.Path(path).with_suffix(".ptx").read_text()

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        assert f".reqntid {block[0]}" in self.ptx
        numbers = [each.item() for each in args]
        launch_ptx(self.ptx, tuple(grid), *numbers, shared_bytes=shared_mem)


class Module(cupy_stand_in.RawModule):
    def get_function(self, name: str) -> Any:
        super().get_function(name)
        return Function(self._facts["path"])


def some(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def all_gather_matmul(rank: int) -> Case:
    shard, weight = some(rank, ROWS, INNER), some(rank + 9, INNER, COLUMNS)
    output = torch.empty(WORLD * ROWS, COLUMNS, dtype=torch.bfloat16)
    values = {"rows": [ROWS] * WORLD, "N": COLUMNS, "K": INNER, "resident": 3}
    arguments = {
        "input_ptr": shard,
        "input_stride": INNER,
        "weight_ptr": weight,
        "weight_stride_k": COLUMNS,
        "output_ptr": output,
    }
    expected = interlace.all_gather_matmul(shard, weight, algorithm="unfused")
    return values, arguments, [output], [expected]


def block_scaled_gather(format: str, rank: int) -> Case:
    """Operands have more than 128 numbers along k.

    The right bits are those of the same kernel by Triton: what is interpreted sums in another order.
    """
    numbers = some(rank, ROWS, WIDE), some(rank + 9, COLUMNS, WIDE)
    x, weight = (interlace.quantize(each, format).packed() for each in numbers)  # type: ignore[arg-type]
    stride = x.kind.row_bytes(WIDE)
    output = torch.empty(WORLD * ROWS, COLUMNS, dtype=torch.bfloat16)
    arguments = {
        **{"input_ptr": packed_rows(x), "input_stride": stride, "output_ptr": output},
        **{"weight_ptr": packed_rows(weight), "weight_stride_n": stride},
    }
    values = {"rows": [ROWS] * WORLD, "N": COLUMNS, "K": stride, "resident": 3}
    with interlace.configured(**SMALL[80]):
        right = interlace.all_gather_matmul(x, weight.t(), algorithm="fused")
    return values, arguments, [output], [right]


def reduce_norm(rank: int) -> Case:
    """With the normed rows on all ranks."""
    input, weight = some(rank, 5, 32), some(7, 32)
    residual = some(8, 5, 32)[:3] if rank == 0 else some(8, 5, 32)[3:]
    total, whole = torch.empty_like(residual), torch.empty_like(input)
    arguments = {
        "input_ptr": input,
        "residual_ptr": residual,
        "norm_weight_ptr": weight,
        "normed_ptr": whole[3 * rank :],
        "all_normed_ptr": whole,
        "output_ptr": total,
    }
    norm = interlace.RMSNorm(weight, 1e-6)
    how: Any = {"norm": norm, "residual": residual, "gather_normed": True}
    right = interlace.reduce_scatter_norm(input, algorithm="fused", **how)
    values = {"rows": [3, 2], "N": 32, "resident": 2}
    return values, arguments, [whole, total], list(right)


def block_scaled_norm(format: str, rank: int) -> Case:
    """The normed rows are packed, of more than 128 numbers."""
    input, weight, residual = some(rank, 3, WIDE), some(7, WIDE), some(8, 3, WIDE)
    total = torch.empty_like(input)
    normed = torch.empty(3, FORMATS[format].row_bytes(WIDE), dtype=torch.uint8)
    arguments = {
        **{"input_ptr": input, "residual_ptr": residual, "norm_weight_ptr": weight},
        **{"normed_ptr": normed, "output_ptr": total},
    }
    how: Any = {"norm": interlace.RMSNorm(weight, 1e-6), "residual": residual, "quantize": format}
    rows, sums = interlace.all_reduce_norm(input, algorithm="low_latency", **how)
    return {"tokens": 3, "N": WIDE}, arguments, [normed, total], [packed_rows(rows), sums]


def routed(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their two experts of four, and weights."""
    tokens = some(rank, 5 + rank, 32)
    first = torch.arange(len(tokens)) + rank
    chosen = torch.stack([first, first + 1 + rank], 1) % (2 * WORLD)
    return tokens, chosen, some(rank + 5, len(tokens), 2, dtype=torch.float32)


def _received(rank: int) -> tuple[Any, Any, Assignment]:
    tokens, chosen, weights = routed(rank)
    received, handle = interlace.experts.dispatch(
        tokens, chosen, weights, 2 * WORLD, algorithm="unfused"
    )
    return received, handle, Assignment(chosen, 2 * WORLD, WORLD)


def dispatch(rank: int) -> Case:
    tokens, _, weights = routed(rank)
    received, _, assignment = _received(rank)
    sent = assignment.sent(weights)
    rows, of_rows = torch.empty_like(received.x), torch.empty_like(received.topk_weights)
    segments = torch.empty(2, WORLD, 3, dtype=torch.int64)
    arguments = {
        **{"x_ptr": tokens.view(torch.int32), "x_words": 16, "scales_ptr": sent.facts},
        **{"facts_ptr": sent.facts, "tokens_ptr": sent.tokens, "counts_ptr": sent.lines},
        **{"rows_ptr": rows.view(torch.int32), "row_scales_ptr": sent.facts},
        **{"row_weights_ptr": of_rows.view(torch.int32), "segments_ptr": segments},
        **{"tokens": len(tokens), "most_tokens": 6, "experts": 2, "senders": 1, "expert_rows": 0},
    }
    right = [received.x, received.topk_weights]
    return {"resident": 4}, arguments, [rows, of_rows], right


def _segments(rank: int) -> torch.Tensor:
    from interlace.ops.experts.routing import known_segments

    lines = [Assignment(routed(r)[1], 2 * WORLD, WORLD).counts for r in range(WORLD)]
    return known_segments(torch.stack(lines), rank, 2)


def grouped_matmul_combine(rank: int) -> Case:
    received, _, assignment = _received(rank)
    _, chosen, weights = routed(rank)
    weight = some(rank + 20, 2, 32, COLUMNS)
    output = torch.empty(len(weights), COLUMNS, dtype=torch.bfloat16)
    arguments = {
        **{"inverse_ptr": assignment.inverse, "slot_weights_ptr": weights, "output_ptr": output},
        **{"input_ptr": received.x, "input_stride": 32, "weight_ptr": weight},
        **{"weight_stride_e": 32 * COLUMNS, "weight_stride_k": COLUMNS, "num_experts": 2},
        **{"segments_ptr": _segments(rank), "N": COLUMNS, "K": 32, "own_tokens": len(weights)},
    }
    right = interlace.grouped_matmul_combine(
        received.x, weight, received.splits, chosen, weights, algorithm="unfused"
    )
    values = {"programs": 2, "home_rows": 12, "resident": 2}
    return values, arguments, [output], [right]


def context_parallel_attention(rank: int) -> Case:
    rows, heads, size = [20, 18], 2, 16
    own = rows[rank]
    query = some(rank, 1, own, heads, size) / 4
    key, value = (some(rank + seed, 1, own, 1, size) / 4 for seed in (3, 5))
    output, lse = torch.empty_like(query), torch.empty(1, heads, own)
    packed = torch.stack([key[0], value[0]], 1)[:, :, None].contiguous()
    arguments = {
        **{"keys_ptr": packed, "keys_stride": 2 * size, "queries_ptr": query},
        **{"queries_stride": heads * size, "queries_stride_b": heads * size},
        **{"queries_stride_h": size, "output_ptr": output, "output_stride": heads * size},
        **{"output_stride_b": heads * size, "output_stride_h": size, "lse_ptr": lse},
        **{"partials_ptr": torch.empty(WORLD, heads, own, size)},
        **{"partials_lse_ptr": torch.empty(WORLD, heads, own)},
        **{"batches": 1, "heads": heads, "key_heads": 1, "scale": 0.25 * LOG2E},
    }
    attend: Any = interlace.nn.functional.context_parallel_attention
    right = attend(query, key, value, causal=True, algorithm="fused", return_lse=True)
    return {"rows": rows, "resident": 3}, arguments, [output, lse], list(right)


"""What is left to whoever launches: of outputs, what is compared."""


def distributed_decode(rank: int) -> Case:
    tokens, heads, size = 40, 2, 16
    query = some(1, 1, 4, size) / 4
    key, value = (some(rank + seed, 1, tokens, heads, size) / 4 for seed in (3, 5))
    output, lse, sums = torch.empty_like(query), torch.empty(1, 4), torch.empty(1, 4)
    lengths = torch.tensor([tokens - 3 * rank])
    arguments = {
        **{"keys_ptr": key, "value_ptr": value, "keys_stride": heads * size},
        **{"keys_stride_b": tokens * heads * size, "keys_stride_h": size, "queries_ptr": query},
        **{
            "value_stride": heads * size,
            "value_stride_b": tokens * heads * size,
            "value_stride_h": size,
        },
        **{"queries_stride": size, "queries_stride_b": 4 * size, "queries_stride_h": 2 * size},
        **{"lengths_ptr": lengths.repeat(2), "partials_ptr": torch.empty(32, heads, 2, size)},
        **{"partials_lse_ptr": torch.empty(32, heads, 2), "batches": 1, "heads": heads},
        **{"most": tokens, "scale": 0.25 * LOG2E, "lse_ptr": lse},
        **{"input_ptr": torch.empty(heads, 2, size), "output_stride": size},
        **{"output_stride_b": heads * 2 * size, "output_stride_h": 2 * size},
        **{"output_ptr": output, "output_lse_ptr": sums},
    }
    decode: Any = interlace.distributed_decode
    how = {"lengths": lengths, "algorithm": "fused", "return_lse": True}
    with interlace.configured(block_m=16, block_n=16):  # pieces are those of the bundle
        right = decode(query, (key, value), **how)
    return {"query_rows": 2}, arguments, [output, sums], list(right)


ROUTED = {"topk": 2, "experts": 2, "columns": 32}
CASES: dict[str, tuple[Callable[[int], Case], KernelOptions]] = {
    "reduce_norm": (reduce_norm, KernelOptions(columns=32, gather="normed")),
    "dispatch": (dispatch, KernelOptions(**ROUTED, overrides={"copy_rows": 4})),
    "grouped_matmul_combine": (
        grouped_matmul_combine,
        KernelOptions(**{**ROUTED, "columns": COLUMNS, "inner": 32}, rows=16, overrides=SMALL[80]),
    ),
    "context_parallel_attention": (
        context_parallel_attention,
        KernelOptions(head_dim=16, overrides={"block_m": 16, "block_n": 16, "copiers": 1}),
    ),
    "distributed_decode": (
        distributed_decode,
        KernelOptions(head_dim=16, overrides={"block_n": 16}),
    ),
}


def on_rank(folder: str, made: Callable[[int], Case]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Launches twice by the manifest, with other poison in the results."""
    place, rank = default_group().place, interlace.get_rank()
    given, arguments, outputs, expected = made(rank)
    bundle = aot.load(folder)
    values = {"rank": rank, "world_size": WORLD, **given}
    known = values | {name: each for name, each in arguments.items() if isinstance(each, int)}
    space = bundle.workspace(known)
    buffer = place.allocate(space.get("buffer_bytes", 256))
    limit = bundle.manifest["workspace"]["header_words"]["spin_limit"]
    buffer.view(rank, 8 * limit, (1,), torch.int64).fill_(place.poll_limit())
    interlace.barrier()
    peers = torch.tensor(buffer.addresses, dtype=torch.int64)
    tensors: dict[str, Any] = {
        argument: torch.tensor(bundle.evaluate(table, known), dtype=torch.int64)
        for argument, table in bundle.manifest["tables"].items()
    }
    tensors |= ({"peers_ptr": peers} if space else {}) | arguments
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor):
            place.announce(tensor)  # the loader passes addresses, which say nothing of sizes
    addresses = {
        name: each.data_ptr() if isinstance(each, torch.Tensor) else each
        for name, each in tensors.items()
    }
    addresses |= {name: space[name] for name in ("slot_offset", "data_offset") if name in space}
    for poison in (7, 8):
        for output in outputs:
            output.fill_(poison + 10 * rank)
        bundle.run(values, addresses)
    return list(zip(outputs, expected, strict=True))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for CuPy, and runs what it is to launch."""
    monkeypatch.setitem(sys.modules, "cupy", cupy_stand_in)
    monkeypatch.setattr(cupy_stand_in, "RawModule", Module)
    kept = []

    def alloc(nbytes: int) -> SimpleNamespace:
        """Scratch memory for tensor maps."""
        memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
        default_group().place.announce(memory)
        kept.append(memory)
        return SimpleNamespace(ptr=memory.data_ptr() + -memory.data_ptr() % 128)

    monkeypatch.setattr(cupy_stand_in.cuda, "alloc", alloc)


def run(target: BundleTarget, made: Callable[[int], Case]) -> None:
    assert not any(report.problems() for report in build_bundles([target]))
    (arch,) = target.arches
    with mock.patch.object(cupy_stand_in.cuda.Device, "compute_capability", str(arch)):
        ranks = interlace.run(on_rank, WORLD, str(target.out), made, place="ptx", arch=arch)
    for output, expected in itertools.chain(*ranks):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("arch", SMALL)
def test_a_bundle_runs_by_its_manifest(arch: int, tmp_path: pathlib.Path, cupy: None) -> None:
    options = KernelOptions(rows=ROWS, columns=COLUMNS, inner=INNER, overrides=SMALL[arch])
    run(BundleTarget("all_gather_matmul", options, [arch], tmp_path), all_gather_matmul)


@pytest.mark.thorough
@pytest.mark.parametrize("op", CASES)
def test_bundles_of_a_layer_run_by_their_manifests(
    op: str, tmp_path: pathlib.Path, cupy: None
) -> None:
    made, options = CASES[op]
    assert op in OPS
    run(BundleTarget(op, options, [80], tmp_path), made)


@pytest.mark.thorough
@pytest.mark.parametrize("format", FORMATS)
def test_bundles_of_block_scaled_operands(format: str, tmp_path: pathlib.Path, cupy: None) -> None:
    how = {"rows": ROWS, "columns": COLUMNS, "inner": WIDE, "overrides": SMALL[80]}
    options = KernelOptions(weight="nk", format=format, **how)  # type: ignore[arg-type]
    made = functools.partial(block_scaled_gather, format)
    run(BundleTarget("all_gather_matmul", options, [80], tmp_path), made)


@pytest.mark.thorough
@pytest.mark.parametrize("format", ("mxfp8", "nvfp4"))
def test_bundles_of_rows_normed_in_a_format(
    format: str, tmp_path: pathlib.Path, cupy: None
) -> None:
    options = KernelOptions(columns=WIDE, quantize=format)
    made = functools.partial(block_scaled_norm, format)
    run(BundleTarget("low_latency_norm", options, [80], tmp_path), made)
    with pytest.raises(ValueError, match="gather is 'both': no bundle gathers rows in mxfp8"):
        operands_of(KernelOptions(quantize="mxfp8", gather="both"), 80)
    with pytest.raises(ValueError, match="weight is 'kn': columns of mxfp4 are packed"):
        operands_of(KernelOptions(format="mxfp4"), 80)
