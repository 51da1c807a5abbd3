"""The host half of the fused ops: workspace layout, grid, launch sequence, for each algorithm.

``fused``      one Triton kernel communicates and multiplies
``pipelined``  torch matmuls on chunks, each as soon as its chunk is there or leaves when it is done
``unfused``    collective, then matmul (or the other way round); any dtype

Matrices are 2-D here: ``input`` is ``[rows, K]`` with contiguous K, weights are ``[K, N]`` with any
strides, results are contiguous. ``rows`` lists the rows of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels import all_gather_matmul as all_gather_matmul_kernels
from interlace.kernels import matmul_all_reduce as matmul_all_reduce_kernels
from interlace.kernels import matmul_reduce_scatter as matmul_reduce_scatter_kernels
from interlace.kernels.tiling import arrival_order, chunks_of, owner_order, prefix_sums
from interlace.runtime.collective_algorithms import (
    segment_table,
    sum_in_rank_order,
    transfer_tables,
)
from interlace.runtime.communicator import Communicator
from interlace.runtime.configuration import Configuration
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import Layout, Workspace
from interlace.runtime.stream import Event

DESCRIPTOR_ALIGNMENT = 16


@dataclass
class Linear:
    """One weight of an op: ``output = input @ weight + bias``. ``bias_along``: "n" or "m"."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    bias_along: str = "n"


def multiply(
    output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """``output = input @ weight (+ bias)`` by torch, rounding once more where dtypes differ."""
    if output.dtype != input.dtype:
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        product = input.to(wide) @ weight.to(wide)
        output.copy_(product if bias is None else product + bias.to(wide))
    elif bias is None:
        torch.mm(input, weight, out=output)
    else:
        torch.addmm(bias, input, weight, out=output)


def _aligned(tensor: torch.Tensor, row_stride: int) -> bool:
    return (
        tensor.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
        and row_stride * tensor.element_size() % DESCRIPTOR_ALIGNMENT == 0
    )


def descriptor_path(configuration: Configuration, input: torch.Tensor, weight: torch.Tensor) -> str:
    """Which path of ``kernels/matmul.py`` these operands allow: "", "kn" or "nk"."""
    inner = input.shape[1]
    usable = configuration.descriptors and inner > 0 and _aligned(input, inner)
    if not usable or not _aligned(input, input.stride(0)):
        return ""
    if weight.stride(1) == 1 and weight.shape[1] > 1 and _aligned(weight, weight.stride(0)):
        return "kn"
    if weight.stride(0) == 1 and inner > 1 and _aligned(weight, weight.stride(1)):
        return "nk"
    return ""


def input_precision(dtype: torch.dtype) -> str:
    """How fp32 products are taken: as ``torch.set_float32_matmul_precision`` says."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def _operands(
    communicator: Communicator,
    configuration: Configuration,
    input: torch.Tensor,
    linear: Linear,
) -> dict[str, Any]:
    """The arguments of the matmul loop that all fused kernels share."""
    weight = linear.weight
    return {
        "input_ptr": input,
        "input_stride": input.stride(0),
        "weight_ptr": weight,
        "weight_stride_k": weight.stride(0),
        "weight_stride_n": weight.stride(1),
        "bias_ptr": linear.output if linear.bias is None else linear.bias,
        "output_ptr": linear.output,
        "N": weight.shape[1],
        "K": weight.shape[0],
        "BLOCK_M": configuration.block_m,
        "BLOCK_N": configuration.block_n,
        "BLOCK_K": configuration.block_k,
        "GROUP_M": configuration.group_m,
        "DESCRIPTORS": descriptor_path(configuration, input, weight),
        "BIAS": "" if linear.bias is None else linear.bias_along,
        "INPUT_PRECISION": input_precision(input.dtype),
    }


def _options(configuration: Configuration) -> dict[str, int]:
    return {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}


def _programs(
    communicator: Communicator, configuration: Configuration, tiles: int, reserved: int = 0
) -> int:
    """Programs of a persistent grid: no more than tiles, and than the place keeps resident.

    ``reserved`` programs of the grid do something else.
    """
    resident = communicator.place.program_limit() - reserved
    return max(1, min(configuration.programs or resident, resident, tiles))


# -- all-gather + matmul -----------------------------------------------------------------------


def chunk_rows(configuration: Configuration, rows: Sequence[int]) -> int:
    """Rows per chunk: whole tiles, and the longest shard in about ``configuration.chunks`` chunks."""
    tiles = -(-max(rows) // configuration.block_m)
    return -(-tiles // configuration.chunks) * configuration.block_m


def _chunk_table(
    communicator: Communicator,
    configuration: Configuration,
    rows: Sequence[int],
    columns: int,
) -> tuple[torch.Tensor, int, int]:
    """Lines of ``all_gather_matmul_kernel``'s ``chunks``; their number; the number of tiles."""
    rank, world_size = communicator.rank, communicator.world_size
    size = chunk_rows(configuration, rows)
    chunks = [chunks_of(count, size) for count in rows]
    counts = [len(part) for part in chunks]
    order = arrival_order(rank, world_size, counts)
    first_slots, first_rows = prefix_sums(counts), prefix_sums(rows)
    tiles_n = -(-columns // configuration.block_n)
    lines, start = [], 0
    for source, chunk in order:
        first, count = chunks[source][chunk]
        slot = first_slots[source] + chunk
        lines.append([source, first, count, first_rows[source] + first, slot, start])
        start += -(-count // configuration.block_m) * tiles_n
    key = ("chunks", tuple(rows), size, configuration.block_m, tiles_n)
    return communicator.table(key, lambda: lines), len(lines), start


def all_gather_matmul_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[Linear],
    rows: Sequence[int],
    gathered: torch.Tensor | None,
    configuration: Configuration,
) -> Event:
    """One kernel per weight; the first carries the copiers, or the copy engine sends."""
    rank, inner = communicator.rank, input.shape[1]
    total = sum(rows)
    size = chunk_rows(configuration, rows)
    sends, num_sends, _, _, slots = transfer_tables(communicator, rows, size)
    layout = Layout()
    layout.add_slots(slots)
    layout.add_data(total * inner * input.element_size())

    def body(workspace: Workspace) -> None:
        most = max(1, communicator.place.program_limit() // 4)
        copiers = min(configuration.copiers, num_sends, most)
        if not copiers:
            _send_by_copy_engine(communicator, workspace, input, rows, size)
        for index, linear in enumerate(linears):
            columns = linear.weight.shape[1]
            chunks, num_chunks, tiles = _chunk_table(communicator, configuration, rows, columns)
            mine = copiers if index == 0 else 0
            operands = _operands(communicator, configuration, input, linear)
            aligned = _aligned(input, inner) and _aligned(input, input.stride(0))
            communicator.compute.launch(
                KernelLaunch(
                    all_gather_matmul_kernels.all_gather_matmul_kernel,
                    mine + _programs(communicator, configuration, tiles, mine),
                    {
                        **workspace.kernel_arguments(),
                        **operands,
                        "sends_ptr": sends,
                        "num_sends": num_sends,
                        "chunks_ptr": chunks,
                        "num_chunks": num_chunks,
                        "COPIERS": mine,
                        "COPY_ROWS": configuration.copy_rows,
                        "COPY_COLUMNS": configuration.copy_columns,
                        "ALIGNED": aligned,
                        "COMPILED": not communicator.place.interpreted,
                    },
                    "all_gather_matmul",
                    **_options(configuration),
                )
            )
        if not any(linear.weight.shape[1] for linear in linears):
            # No tile, so no program has waited; but what arrives late would hit the next op.
            counts = [len(chunks_of(count, size)) for count in rows]
            for source, chunk in arrival_order(rank, communicator.world_size, counts):
                if source != rank:
                    communicator.compute.wait(workspace, source, sum(counts[:source]) + chunk)
        if gathered is not None:
            arrived = workspace.data(rank, 0, (total, inner), input.dtype)
            first = sum(rows[:rank])
            for begin, end in ((0, first), (first + rows[rank], total)):
                if begin < end:
                    communicator.compute.copy(gathered[begin:end], arrived[begin:end], "gathered")
            if rows[rank]:
                communicator.compute.copy(gathered[first : first + rows[rank]], input, "own shard")

    return communicator.enqueue("all_gather_matmul", layout, body)


def _send_by_copy_engine(
    communicator: Communicator,
    workspace: Workspace,
    input: torch.Tensor,
    rows: Sequence[int],
    size: int,
) -> None:
    """Push the chunks of the own shard on the copy stream, in ``send_order``."""
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    stream = communicator.copying
    counts = [len(chunks_of(count, size)) for count in rows]
    first_slot, first_row = sum(counts[:rank]), sum(rows[:rank])
    stream.wait_credits(workspace)
    for chunk, (first, count) in enumerate(chunks_of(rows[rank], size)):
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            begin = (first_row + first) * inner * input.element_size()
            theirs = workspace.data(peer, begin, (count, inner), input.dtype)
            stream.copy(theirs, input[first : first + count], f"chunk {chunk} to rank {peer}")
            stream.publish(workspace, peer, first_slot + chunk)


def all_gather_matmul_pipelined(
    communicator: Communicator,
    input: torch.Tensor,
    linears: Sequence[Linear],
    rows: Sequence[int],
    gathered: torch.Tensor | None,
    configuration: Configuration,
) -> Event:
    """Torch matmuls on chunks in the order of arrival.

    Every rank stages its shard in its own workspace, chunk by chunk. Where a peer's memory is as good
    as the own, matmuls read it there; elsewhere the copy stream brings each chunk over first.
    """
    rank, world_size, inner = communicator.rank, communicator.world_size, input.shape[1]
    itemsize = input.element_size()
    direct = communicator.place.direct_access
    # a CPU gains more from large matmuls than from finer overlap
    size = max(1, -(-max(rows) // (1 if direct else configuration.chunks)))
    chunks = [chunks_of(count, size) for count in rows]
    counts = [len(part) for part in chunks]
    first_slots, first_rows = prefix_sums(counts), prefix_sums(rows)
    layout = Layout(pulled=True)
    layout.add_slots(first_slots[-1])
    staged = layout.add_data(max(rows) * inner * itemsize)
    if gathered is None and not direct:
        gathered = torch.empty(sum(rows), inner, dtype=input.dtype, device=input.device)

    def body(workspace: Workspace) -> None:
        stream, copying = communicator.compute, communicator.copying
        copying.wait_credits(workspace)
        for chunk, (first, count) in enumerate(chunks[rank]):
            mine = workspace.data(
                rank, staged + first * inner * itemsize, (count, inner), input.dtype
            )
            copying.copy(mine, input[first : first + count], f"stage chunk {chunk}")
            for step in range(1, world_size):
                peer = (rank + step) % world_size
                copying.publish(workspace, peer, first_slots[rank] + chunk)
        for source, chunk in arrival_order(rank, world_size, counts):
            first, count = chunks[source][chunk]
            row = first_rows[source] + first
            operand = input[first : first + count]
            if source != rank:
                slot = first_slots[source] + chunk
                begin = staged + first * inner * itemsize
                theirs = workspace.data(source, begin, (count, inner), input.dtype)
                if direct:
                    stream.wait(workspace, source, slot)
                    operand = theirs
                else:
                    assert gathered is not None
                    copying.wait(workspace, source, slot)
                    copying.copy(
                        gathered[row : row + count], theirs, f"chunk {chunk} of rank {source}"
                    )
                    stream.wait_event(copying.record())
                    operand = gathered[row : row + count]
            for linear in linears:
                part = linear.output[row : row + count]
                stream.call(
                    lambda part=part, operand=operand, linear=linear: multiply(  # type: ignore[misc]
                        part, operand, linear.weight, linear.bias
                    ),
                    f"matmul chunk {chunk} of rank {source}",
                )
            if gathered is not None and (direct or source == rank):
                stream.copy(gathered[row : row + count], operand, "gathered")

    return communicator.enqueue("all_gather_matmul", layout, body)


# -- matmul + reduce-scatter -------------------------------------------------------------------


def matmul_reduce_scatter_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
    configuration: Configuration,
    *,
    average: bool,
) -> Event:
    """One kernel; ``segments`` are (first row, rows) by owner, ``linear.output`` the own part."""
    rank, world_size = communicator.rank, communicator.world_size
    columns = linear.weight.shape[1]
    tiles_n = -(-columns // configuration.block_n)
    rows = [count for _, count in segments]
    tiles = [-(-count // configuration.block_m) * tiles_n for count in rows]
    layout = Layout()
    layout.add_slots(world_size * max(tiles))
    layout.add_data(world_size * max(rows) * columns * linear.output.element_size())

    def body(workspace: Workspace) -> None:
        communicator.compute.launch(
            KernelLaunch(
                matmul_reduce_scatter_kernels.matmul_reduce_scatter_kernel,
                _programs(communicator, configuration, sum(tiles)),
                {
                    **workspace.kernel_arguments(),
                    **_operands(communicator, configuration, input, linear),
                    "segments_ptr": segment_table(
                        communicator, segments, configuration.block_m, tiles_n
                    ),
                    "own_rows": rows[rank],
                    "AVERAGE": average,
                },
                "matmul_reduce_scatter",
                **_options(configuration),
            )
        )

    return communicator.enqueue("matmul_reduce_scatter", layout, body)


def matmul_reduce_scatter_pipelined(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
    *,
    average: bool,
) -> Event:
    """A torch matmul per owner, straight into the owner's workspace; then sums in rank order."""
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = linear.weight.shape[1], linear.output.dtype
    layout = Layout()
    slots = layout.add_slots(world_size)
    region = max(count for _, count in segments) * columns * dtype.itemsize
    offset = layout.add_data(world_size * region)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        for owner in owner_order(rank, world_size):
            first, count = segments[owner]
            theirs = workspace.data(owner, offset + rank * region, (count, columns), dtype)
            part = input[first : first + count]
            stream.call(
                lambda theirs=theirs, part=part: multiply(theirs, part, linear.weight, None),  # type: ignore[misc]
                f"matmul for rank {owner}",
            )
            if owner != rank:
                stream.publish(workspace, owner, slots + rank)
        for source in range(world_size):
            if source != rank:
                stream.wait(workspace, source, slots + source)
        parts = [
            workspace.data(rank, offset + source * region, linear.output.shape, dtype)
            for source in range(world_size)
        ]
        stream.call(lambda: sum_with_bias(parts, linear, average=average), "sum")

    return communicator.enqueue("matmul_reduce_scatter", layout, body)


def sum_with_bias(parts: Sequence[torch.Tensor], linear: Linear, *, average: bool) -> None:
    """Sum in rank order, add the bias once, round once."""
    if linear.bias is None:
        sum_in_rank_order(parts, linear.output, average=average)
        return
    wide = torch.float64 if linear.output.dtype == torch.float64 else torch.float32
    total = torch.empty(linear.output.shape, dtype=wide, device=linear.output.device)
    sum_in_rank_order(parts, total, average=average)
    bias = linear.bias.to(wide)
    linear.output.copy_(total + (bias if linear.bias_along == "n" else bias[:, None]))


def matmul_reduce_scatter_unfused(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
    *,
    average: bool,
) -> Event:
    """The whole product first, staged in the own workspace; then everyone sums its part of all."""
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = linear.weight.shape[1], linear.output.dtype
    layout = Layout(pulled=True)
    slots = layout.add_slots(world_size)
    offset = layout.add_data(input.shape[0] * columns * dtype.itemsize)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        product = workspace.data(rank, offset, (input.shape[0], columns), dtype)
        stream.call(lambda: multiply(product, input, linear.weight, None), "matmul")
        for step in range(1, world_size):
            stream.publish(workspace, (rank + step) % world_size, slots + rank)
        first, count = segments[rank]
        begin = offset + first * columns * dtype.itemsize
        for source in range(world_size):
            if source != rank:
                stream.wait(workspace, source, slots + source)
        parts = [
            workspace.data(source, begin, (count, columns), dtype) for source in range(world_size)
        ]
        stream.call(lambda: sum_with_bias(parts, linear, average=average), "sum")

    return communicator.enqueue("matmul_reduce_scatter", layout, body)


# -- matmul + all-reduce -----------------------------------------------------------------------


def matmul_all_reduce_fused(
    communicator: Communicator,
    input: torch.Tensor,
    linear: Linear,
    configuration: Configuration,
    *,
    average: bool,
) -> Event:
    """One-shot: one kernel, every tile to every rank."""
    world_size = communicator.world_size
    rows, columns = linear.output.shape
    tiles = -(-rows // configuration.block_m) * -(-columns // configuration.block_n)
    layout = Layout()
    layout.add_slots(world_size * tiles)
    layout.add_data(world_size * rows * columns * linear.output.element_size())

    def body(workspace: Workspace) -> None:
        communicator.compute.launch(
            KernelLaunch(
                matmul_all_reduce_kernels.matmul_all_reduce_kernel,
                _programs(communicator, configuration, tiles),
                {
                    **workspace.kernel_arguments(),
                    **_operands(communicator, configuration, input, linear),
                    "M": rows,
                    "AVERAGE": average,
                },
                "matmul_all_reduce",
                **_options(configuration),
            )
        )

    return communicator.enqueue("matmul_all_reduce", layout, body)
