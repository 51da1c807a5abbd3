"""Ops that are built ahead of time: their kernels in the order of their launches, and their formulas.

Formulas are over *launch values*, which whoever launches knows: the kernels' own arguments, and those of
``VALUES``. They call the functions of the launch side (``launch_formulas.py``); tests compare
what both come to. In upper case are constants of one build: constexprs of the kernels, and

    CHUNKS     chunks per shard           ITEMSIZE   bytes of an element
    GATHERS    results that all ranks get of rows that are normed, 0 to 2
"""

from collections.abc import Callable

from interlace.kernels.experts.dispatch import COUNT_NUMBERS
from interlace.kernels.signal import HEADER_WORDS
from interlace.ops.collectives.low_latency import (
    BLOCK_WORDS,
    MOST_PROGRAMS,
)
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.tools.bundle.attention_ops import ATTENTION
from interlace.tools.bundle.options import RANKS, ROWS, WORDS, BundleOp, Make
from interlace.tools.bundle.options import KernelOptions as KernelOptions
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.catalogue import Entry

VALUES = {
    "rank": "this rank, from 0",
    "world_size": "number of ranks",
    "rows": "rows of every rank, by rank; of a flat tensor: its elements; of attention: its tokens",
    "splits": "rows of every rank for each of all experts, one rank after another",
    "tokens": "rows of the input",
    "programs": "programs of the kernel, alike on all ranks",
    "home_rows": "rows of the rank to which most come home",
    "most_tokens": "tokens of the rank that has most",
    "senders": "programs that send to one rank, alike on all ranks",
    "query_rows": "heads of queries that see one head of keys, times the tokens of a sequence",
    "resident": "programs of this kernel that the device keeps resident at once: one for each of its "
    "multiprocessors, less what else runs there meanwhile",
}


def _collective(op: str) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        how = options.dtype, options.configuration(arch)
        return [catalogue.collective(arch, op, *how, average=options.average)]

    return made


def _by_columns(made: Callable[..., Entry]) -> Make:
    def of_options(arch: int, options: KernelOptions) -> list[Entry]:
        if options.bias == "m":
            raise ValueError("bias is 'm': this op has a bias per column only")
        return [made(arch, options.operands(arch))]

    return of_options


def _reduced(fused: Callable[..., Entry]) -> Make:
    return lambda arch, options: [fused(arch, options.operands(arch), average=options.average)]


def _normed(fused: Callable[..., Entry]) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        _can_be_fp8(arch, options)
        return [fused(arch, options.operands(arch), options.variant, average=options.average)]

    return made


def _reduce_norm(arch: int, options: KernelOptions) -> list[Entry]:
    _can_be_fp8(arch, options)
    made = arch, options.dtype, options.variant, options.configuration(arch)
    columns, average = options.columns, options.average
    return [catalogue.reduce_norm(*made, columns=columns, average=average)]


def _low_latency_norm(arch: int, options: KernelOptions) -> list[Entry]:
    _can_be_fp8(arch, options)
    made, columns = (arch, options.dtype, options.variant), options.columns
    return [catalogue.low_latency_norm(*made, columns=columns, average=options.average)]


def _can_be_fp8(arch: int, options: KernelOptions) -> None:
    if options.quantize and arch < 89:
        raise ValueError(f"quantize: Triton makes no float8_e4m3fn for sm_{arch}")


def _experts_rows(*kernels: str) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        found = catalogue.experts_rows(
            arch,
            options.dtype,
            weighted=True,
            routed=options.routed,
            columns=options.columns,
            overrides=options.overrides,
        )
        return [each for each in found if each.kernel in kernels]

    return made


def _one(kernel: str, grid: str) -> dict[str, str]:
    return {f"{kernel}_kernel": grid}


_SPLITS = ("num_experts > 0", "min(splits) >= 0", "max(splits) > 0")
_FUSED = ("weight", "bias", "path", "columns", "inner")
_NORM = ("average", "norm", "quantize")
_ROUTED = ("topk", "experts", "columns")
_SENT = (*RANKS, "senders > 0", "most_tokens > 0")


def _after(byte: str) -> str:
    """The next multiple at which a region of data begins."""
    return f"ceil_div({byte}, {DATA_ALIGNMENT}) * {DATA_ALIGNMENT}"


def _scattered(tiles_n: str) -> dict[str, str]:
    """Quantities of a reduce-scatter of rows, and of the gather of what is made of them."""
    return {
        "sum_slots": f"reduce_slots(world_size, rows, BLOCK_M, {tiles_n})",
        "sum_bytes": "contributed_bytes(world_size, rows, N * ITEMSIZE)",
        "segments": f"segment_lines(rank, world_size, segments_of(rows), BLOCK_M, {tiles_n})",
        "slices": "slice_slots(1, rows, ROWS)",
        "slots_byte": f"sum_slots * {WORD}",
        "normed_byte": _after("sum_bytes"),
        "sum_byte": _after("normed_byte + sum(rows) * N * NORMED_ITEMSIZE"),
        "scale_byte": _after("sum_byte + (sum(rows) * N * ITEMSIZE if GATHERS == 2 else 0)"),
        "slots": "sum_slots + (slice_slots(world_size, rows, ROWS) if GATHERS else 0)",
        "data_bytes": "scale_byte + (sum(rows) * 4 if QUANTIZE else 0) if GATHERS else sum_bytes",
    }


OPS = {
    "all_gather_matmul": BundleOp(
        lambda arch, options: [catalogue.all_gather_matmul(arch, options.operands(arch))],
        _FUSED,
        _one("all_gather_matmul", "persistent_grid(COPIERS, tiles, resident)"),
        {
            "chunk_size": "chunk_rows(rows, BLOCK_M, CHUNKS)",
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            "slots": "chunk_slots(rows, chunk_size)",
            "data_bytes": "gathered_bytes(rows, K * ITEMSIZE)",
            "sends": "send_lines(rank, world_size, rows, chunk_size)",
            "num_sends": "sends_of(rank, world_size, rows, chunk_size)",
            "chunks": "chunk_lines(rank, world_size, rows, chunk_size, BLOCK_M, tiles_n)",
            "num_chunks": "len(chunks)",
            "multicast": "0",  # bundles send to each rank by itself
        },
        {"sends_ptr": "sends", "chunks_ptr": "chunks"},
        # without columns nobody would wait for what arrives, and it would hit the next op
        (*RANKS, *ROWS, "N > 0", "resident > COPIERS"),
    ),
    "matmul_reduce_scatter": BundleOp(
        _reduced(catalogue.matmul_reduce_scatter),
        (*_FUSED, "average"),
        _one("matmul_reduce_scatter", "persistent_grid(0, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, rows, BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, rows, N * ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK_M, tiles_n)",
            "own_rows": "rows[rank]",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *ROWS),
    ),
    "matmul_all_reduce": BundleOp(
        _reduced(catalogue.matmul_all_reduce),
        (*_FUSED, "average"),
        _one("matmul_all_reduce", "persistent_grid(0, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of([M], BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, [M], BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, [M], N * ITEMSIZE)",
        },
        conditions=RANKS,
    ),
    "matmul_reduce_scatter_norm": BundleOp(
        _normed(catalogue.matmul_reduce_scatter_norm),
        (*_FUSED, *_NORM, "gather"),
        _one("matmul_reduce_scatter_norm", "persistent_grid(0, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            **_scattered("tiles_n"),
        },
        {"segments_ptr": "segments"},
        (*RANKS, *ROWS),
    ),
    "matmul_all_reduce_norm": BundleOp(
        _normed(catalogue.matmul_all_reduce_norm),
        (*_FUSED, *_NORM),
        _one("matmul_all_reduce_norm", "persistent_grid(0, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of([M], BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, [M], BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, [M], N * ITEMSIZE)",
        },
        conditions=RANKS,
    ),
    "reduce_norm": BundleOp(
        _reduce_norm,
        ("columns", *_NORM, "gather"),
        _one("reduce_norm", "persistent_grid(0, tiles_of(rows, ROWS, 1), resident)"),
        _scattered("1"),
        {"segments_ptr": "segments"},
        (*RANKS, *ROWS, "N <= BLOCK_N"),
    ),
    "low_latency_norm": BundleOp(
        _low_latency_norm,
        ("columns", *_NORM),
        _one("low_latency_norm", "tokens"),
        {
            "blocks": f"tokens * ceil_div(N * ITEMSIZE, {4 * BLOCK_WORDS})",
            **WORDS,
        },
        conditions=(*RANKS, f"0 < blocks <= {MOST_PROGRAMS}", "N * ITEMSIZE % UNIT == 0"),
        words=True,
    ),
    "dispatch": BundleOp(
        _experts_rows("dispatch_send_kernel", "dispatch_receive_kernel"),
        _ROUTED,
        {
            f"dispatch_{way}_kernel": "persistent_grid(0, world_size * senders, resident)"
            for way in ("send", "receive")
        },
        {
            "slots": "world_size * (1 + senders)",
            "facts": "3 * TOPK",
            "counts_byte": "0",
            "x_byte": _after(f"world_size * ({COUNT_NUMBERS} + experts) * 8"),
            "scales_byte": _after("x_byte + world_size * most_tokens * x_words * 4"),
            "facts_byte": "scales_byte",
            "scale_words": "facts",  # of none
            "data_bytes": "facts_byte + world_size * most_tokens * facts * 4",
        },
        conditions=(*_SENT, "experts <= EXPERTS"),
    ),
    "combine": BundleOp(
        _experts_rows("combine_kernel"),
        _ROUTED,
        _one("combine", "persistent_grid(0, world_size * senders, resident)"),
        {
            "slots": "world_size * senders",
            "data_bytes": "most_tokens * TOPK * N * ITEMSIZE",
            "tokens": "0",
        },
        conditions=(*_SENT, "experts <= EXPERTS"),
    ),
    "grouped_matmul_combine": BundleOp(
        lambda arch, options: [
            catalogue.grouped_matmul_combine(arch, options.operands(arch), options.routed)
        ],
        ("weight", "path", "columns", "inner", "topk", "experts"),
        _one("grouped_matmul_combine", "programs"),
        {"slots": "world_size * programs", "data_bytes": "home_rows * N * ITEMSIZE"},
        conditions=(*RANKS, "0 < programs <= resident", "home_rows > 0", "num_experts <= EXPERTS"),
    ),
    **{
        op: BundleOp(
            _by_columns(catalogue.grouped_matmul),
            _FUSED,
            _one("grouped_matmul", "persistent_grid(COPIERS, tiles, resident)"),
            {
                "segments": "expert_segment_lines(rank, world_size, splits, num_experts)",
                "received": "[expert_offsets(r, world_size, splits, num_experts)[-1] "
                "for r in range(world_size)]",
                "chunk_rows": "chunk_size",
                "chunk_size": "chunk_rows(splits, BLOCK_M, CHUNKS)",
                "tiles_n": "ceil_div(N, BLOCK_N)",
                "tiles": "tiles_of([line[1] for line in segments], BLOCK_M, tiles_n)",
                "slots": "num_experts * world_size + max(received) // chunk_size + 1",
                "data_bytes": "max(received) * K * ITEMSIZE",
                "sends": "expert_send_lines(rank, world_size, splits, num_experts, chunk_size)",
                "num_sends": "len(sends)",
            },
            {"sends_ptr": "sends", "segments_ptr": "segments"},
            # without columns nobody would wait for what arrives, and it would hit the next op
            (*RANKS, *_SPLITS, experts, "N > 0", "resident > COPIERS"),
        )
        for op, experts in (
            ("all_gather_grouped_matmul", "len(splits) == world_size * num_experts"),
            ("all_to_all_grouped_matmul", "len(splits) == world_size * world_size * num_experts"),
        )
    },
    "matmul_all_to_all": BundleOp(
        _by_columns(catalogue.matmul_all_to_all),
        _FUSED,
        _one("matmul_all_to_all", "persistent_grid(0, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "own_tiles": "tiles_of([rows[rank]], BLOCK_M, tiles_n)",
            "tiles": "max(own_tiles * world_size, tiles_of([max(rows)], BLOCK_M, tiles_n))",
            "slots": "tiles_of(rows, BLOCK_M, tiles_n)",
            "data_bytes": "gathered_bytes(rows, N * ITEMSIZE)",
            "shards": "shard_lines(rows, BLOCK_M, tiles_n)",
        },
        {"shards_ptr": "shards"},
        (*RANKS, *ROWS),
    ),
    "all_to_all_matmul": BundleOp(
        _by_columns(catalogue.all_to_all_matmul),
        ("weight", "bias", "columns", "inner"),
        _one("all_to_all_matmul", "persistent_grid(COPIERS, tiles, resident)"),
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of([rows[rank]], BLOCK_M, tiles_n)",
            "own_rows": "rows[rank]",
            "first_row": "sum(rows[:rank])",
            "chunk_size": "chunk_rows(rows, BLOCK_M, CHUNKS)",
            "chunk_rows": "chunk_size",
            "chunks": "ceil_div(max(rows), chunk_size)",
            "slots": "world_size * chunks",
            "data_bytes": "contributed_bytes(world_size, rows, K * ITEMSIZE)",
            "sends": "head_send_lines(rank, world_size, rows, chunk_size, chunks)",
            "num_sends": "len(sends)",
        },
        {"sends_ptr": "sends"},
        # without a tile nobody would wait for what arrives, and it would hit the next op
        (*RANKS, *ROWS, "min(rows) > 0", "N > 0", "resident > COPIERS"),
    ),
    **ATTENTION,
    "all_gather": BundleOp(
        _collective("all_gather"),
        (),
        _one("all_gather", "persistent_grid(COPIERS, num_arrivals, resident)"),
        {
            "chunk_size": "chunk_elements(rows, BLOCK, CHUNKS)",
            "slots": "chunk_slots(rows, chunk_size)",
            "data_bytes": "gathered_bytes(rows, ITEMSIZE)",
            "sends": "send_lines(rank, world_size, rows, chunk_size)",
            "num_sends": "sends_of(rank, world_size, rows, chunk_size)",
            "arrivals": "arrival_lines(rank, world_size, rows, chunk_size, True)",
            "num_arrivals": "slots",
        },
        {"sends_ptr": "sends", "arrivals_ptr": "arrivals"},
        (*RANKS, *ROWS, "resident > COPIERS"),
    ),
    "reduce_scatter": BundleOp(
        _collective("reduce_scatter"),
        ("average",),
        _one("reduce_scatter", "persistent_grid(0, ceil_div(max(rows), BLOCK), resident)"),
        {
            "slots": "reduce_slots(world_size, rows, BLOCK, 1)",
            "data_bytes": "contributed_bytes(world_size, rows, ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK, 1)",
            "own_elements": "rows[rank]",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *ROWS),
    ),
    "all_reduce": BundleOp(
        _collective("all_reduce"),
        ("average",),
        _one("all_reduce", "persistent_grid(0, ceil_div(elements, BLOCK), resident)"),
        {
            "slots": "reduce_slots(world_size, [elements], BLOCK, 1)",
            "data_bytes": "contributed_bytes(world_size, [elements], ITEMSIZE)",
        },
        conditions=RANKS,
    ),
    "broadcast": BundleOp(
        lambda arch, options: catalogue.broadcast(arch, options.dtype),
        (),
        _one("low_latency_broadcast", "blocks"),
        {"blocks": f"ceil_div(units * UNIT, {4 * BLOCK_WORDS})", **WORDS},
        conditions=(*RANKS, "0 <= root < world_size", f"0 < blocks <= {MOST_PROGRAMS}"),
        words=True,
    ),
}

# One op at a time; of several on one buffer, the largest. Slots and data never change places.
WORKSPACE = {
    "slot_offset": f"{HEADER_WORDS * WORD}",
    "data_offset": _after(f"slot_offset + slots * {WORD}"),
    "buffer_bytes": "data_offset + data_bytes",
}
# A buffer for such ops alone: what lies there is words of older epochs.
WORDS_SPACE = {"buffer_bytes": f"words_offset + blocks * 2 * world_size * {BLOCK_WORDS * WORD}"}


def descriptor_conditions(entry: Entry) -> tuple[str, ...]:
    """Conditions that descriptors (TMA) put on the operands, besides multiples of 16."""
    rows_of_weight = {"kn": "weight_stride_k >= N", "nk": "weight_stride_n >= K"}
    path = entry.fixed.get("DESCRIPTORS")
    if path in rows_of_weight:
        return "K > 0", "input_stride >= K", rows_of_weight[path]
    return ("keys_stride >= batches * key_heads * (HEAD_DIM + VALUE_DIM)",) if path else ()
