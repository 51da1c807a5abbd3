"""The launch side of the plain collectives: workspace layout, launches, order of signals.

All tensors here are flat and contiguous. Reductions outside kernels are ``reductions.fold``'s, in rank
order. ``stream_engine.py`` describes the algorithms.

The one-shot collectives, whose words carry their flags, have a separate buffer, which no other op touches:
it holds only words of older epochs. It is as large as the largest message so far needed. When it grows, it
starts again, epochs too. All ranks see the same sizes, so their buffers grow at the same op.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas, transfer
from interlace.kernels.arguments import Table
from interlace.kernels.collectives import low_latency, multimem, reduction
from interlace.kernels.signal import HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.kernels.tiling import owner_order, prefix_sums
from interlace.ops.collectives.node_moves import gather_parts
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import (
    WORD,
    Layout,
    SymmetricBuffer,
    Workspace,
    bytes_of,
    peers_of,
)
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.tuning.configuration import Configuration

VECTOR_BYTES = 16  # parts for the switch begin there, so an input that does not is copied
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Staged:
    """``tensor`` goes to byte ``offset`` of the own workspace, where ``readers`` take it from."""

    offset: int
    tensor: torch.Tensor
    readers: Sequence[int]


@dataclass(frozen=True)
class Taken:
    """``destination`` is filled with what ``source`` has staged at byte ``offset``."""

    source: int
    offset: int
    destination: torch.Tensor


def other_ranks(communicator: Communicator) -> list[int]:
    rank, world_size = communicator.rank, communicator.world_size
    return [(rank + step) % world_size for step in range(1, world_size)]


def sources(communicator: Communicator) -> list[int]:
    """All ranks, this one first, then in the order in which they send to it."""
    rank, world_size = communicator.rank, communicator.world_size
    return [(rank - step) % world_size for step in range(world_size)]


def stage(communicator: Communicator, workspace: Workspace, part: Staged, slot: int) -> None:
    """Put ``part`` where all peers can read it, then tell its readers: ``slot`` is ready."""
    stream = communicator.compute
    place = workspace.data(communicator.rank, part.offset, part.tensor.shape, part.tensor.dtype)
    stream.copy(place, part.tensor, "stage")
    for reader in part.readers:
        stream.publish(workspace, reader, slot)


def pull(
    communicator: Communicator,
    op: str,
    nbytes: int,
    staged: Sequence[Staged],
    taken: Sequence[Taken] = (),
    then: Callable[[Workspace], None] | None = None,
) -> Event:
    """Stage parts in the own workspace, take what others have staged in theirs, do what comes ``then``.

    ``nbytes`` is the same on all ranks and what the one that stages most needs. Every rank that takes
    from another is a reader of exactly one of its parts. A rank may take from itself. All is staged
    before anything is taken, so destinations may lie in the memory of staged tensors.
    """
    rank = communicator.rank

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        for part in staged:
            stage(communicator, workspace, part, rank)
        for take in taken:
            if take.source != rank:
                stream.wait(workspace, take.source, take.source)
            to = take.destination
            theirs = workspace.data(take.source, take.offset, to.shape, to.dtype)
            stream.copy(to, theirs, f"part of rank {take.source}")
        if then is not None:
            then(workspace)

    layout = Layout(communicator.world_size, nbytes, pulled=True)
    return communicator.enqueue(op, layout, body)


def all_gather_copy(
    communicator: Communicator, input: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> Event:
    """``outputs[r] = input of rank r``; flat tensors, lengths may differ."""
    rank = communicator.rank
    if communicator.place.nodes is not None:
        parts, before = [bytes_of(output) for output in outputs], communicator.compute.record()
        return gather_parts(communicator, parts, bytes_of(input), before) or before
    nbytes = max(output.numel() for output in outputs) * input.dtype.itemsize
    taken = [
        Taken(source, 0, outputs[source])
        for source in sources(communicator)
        if source != rank or outputs[rank].data_ptr() != input.data_ptr()
    ]
    staged = [Staged(0, input, other_ranks(communicator))]
    return pull(communicator, "all_gather", nbytes, staged, taken)


def gather_made(
    communicator: Communicator, input: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> Event:
    """As :func:`all_gather_copy`, by the engine where no memory of other hosts is mapped."""
    if communicator.place.mapped:
        return all_gather_copy(communicator, input, outputs)
    parts = [bytes_of(output) for output in outputs]
    key = ("parts that were made", tuple(part.numel() for part in parts))
    communicator.engine.all_gather(
        agreed_call(communicator, "all_gather", key), parts, bytes_of(input)
    )
    return communicator.compute.record()


def send_table(communicator: Communicator, rows: Sequence[int], chunk_size: int) -> Table:
    rank, world_size = communicator.rank, communicator.world_size
    lines = communicator.table(
        ("sends", tuple(rows), chunk_size),
        lambda: formulas.send_lines(rank, world_size, rows, chunk_size),
    )
    return Table(lines, formulas.sends_of(rank, world_size, rows, chunk_size))


def send_by_copy_engine(
    communicator: Communicator,
    workspace: Workspace,
    lines: Sequence[formulas.Line],
    tensors: Sequence[tuple[torch.Tensor, int]],
) -> None:
    """Push rows of ``tensors``, by ``lines`` from :func:`send_table`, to byte offsets of workspaces."""
    stream = communicator.copying
    stream.wait_credits(workspace)
    for peer, first, count, row, slot in lines:
        for tensor, offset in tensors:
            shape = (count, *tensor.shape[1:])
            begin = offset + row * math.prod(shape[1:]) * tensor.element_size()
            theirs = workspace.data(peer, begin, shape, tensor.dtype)
            stream.copy(theirs, tensor[first : first + count], f"rows to rank {peer}")
        stream.publish(workspace, peer, slot)


def agreed_call(communicator: Communicator, op: str, key: tuple[Any, ...]) -> Call:
    """The call for an engine, with terms that the ranks have agreed on already."""
    call = communicator.calls.get(key)
    if call is None:
        terms = tuple((str(index), each) for index, each in enumerate(key))
        call = communicator.remember(key, Call(op, terms))
    return call


def resident_programs(
    communicator: Communicator, configuration: Configuration, reserved: int = 0
) -> int:
    """Programs of a grid that stay resident, or as configured; ``reserved`` of them do something else."""
    limit = communicator.place.program_limit
    return min(limit, reserved + configuration.programs) if configuration.programs else limit


def enqueue_kernel(
    communicator: Communicator,
    op: str,
    layout: Layout,
    kernel: object,
    grid: int,
    arguments: dict[str, Any],
    options: dict[str, Any],
    then: Sequence[tuple[object, int, dict[str, Any], dict[str, Any]]] = (),
    finish: Callable[[Workspace], None] | None = None,
) -> Event:
    """An op that is one kernel, or one and ``then`` more; ``arguments``: those besides the workspace.

    ``finish`` enqueues the work after the kernels.
    """

    def body(workspace: Workspace) -> None:
        for each, programs, record, more in ((kernel, grid, arguments, options), *then):
            communicator.compute.launch(workspace.kernel_launch(each, programs, record, **more))
        if finish is not None:
            finish(workspace)

    return communicator.enqueue(op, layout, body)


def all_gather_kernel(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
) -> Event:
    """``output = concat(input of rank 0, 1, ...)``, flat; ``input`` may be its own part, which stays."""
    block = configuration.block_elements
    chunk = formulas.chunk_elements(lengths, block, configuration.chunks)
    rank, world_size = communicator.rank, communicator.world_size
    in_place = output[prefix_sums(lengths)[rank] :].data_ptr() == input.data_ptr()
    sends, slots = send_table(communicator, lengths, chunk), formulas.chunk_slots(lengths, chunk)
    table = communicator.table(
        ("arrivals", tuple(lengths), chunk, in_place),
        lambda: formulas.arrival_lines(rank, world_size, lengths, chunk, not in_place),
    )
    arrivals = Table(table, slots - (formulas.ceil_div(lengths[rank], chunk) if in_place else 0))
    layout = Layout(slots, formulas.gathered_bytes(lengths, output.dtype.itemsize))
    copiers = max(1, min(configuration.copiers, sends.count))
    limit = configuration.programs or communicator.place.program_limit
    grid = formulas.persistent_grid(copiers, arrivals.count, limit)
    arguments = {
        "input_ptr": input,
        "output_ptr": output,
        "sends": sends,
        "arrivals": arrivals,
        "COPIERS": copiers,
        "BLOCK": block,
    }
    # Left alone ptxas takes 80 registers, and on 10.0 spills one of fp32 for it.
    options = {"num_warps": configuration.num_warps, "options": {"maxnreg": 128}}
    kernel = transfer.all_gather_kernel
    return enqueue_kernel(communicator, "all_gather", layout, kernel, grid, arguments, options)


def reduce_scatter_copy(
    communicator: Communicator,
    inputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    *,
    reduction: str,
) -> Event:
    """``output`` = the reduction over ranks of ``inputs[own rank]``; ``inputs[r]`` is r's part."""
    rank, world_size = communicator.rank, communicator.world_size
    layout = Layout()
    offsets = [layout.add_data(part.numel() * output.dtype.itemsize) for part in inputs]
    staged = [
        Staged(offsets[owner], inputs[owner], [owner] if owner != rank else [])
        for owner in owner_order(rank, world_size)
    ]

    def sum_up(workspace: Workspace) -> None:
        fold_staged(communicator, workspace, 0, offsets[rank], output, reduction)

    return pull(communicator, "reduce_scatter", layout.nbytes, staged, then=sum_up)


def wait_for_all(communicator: Communicator, workspace: Workspace, slots: int) -> None:
    """Hold the compute stream until every peer has published its slot, from number ``slots`` on."""
    for source in range(communicator.world_size):
        if source != communicator.rank:
            communicator.compute.wait(workspace, source, slots + source)


def fold_staged(
    communicator: Communicator,
    workspace: Workspace,
    slots: int,
    offset: int,
    output: torch.Tensor,
    reduction: str,
) -> None:
    wait_for_all(communicator, workspace, slots)
    parts = [
        workspace.data(source, offset, output.shape, output.dtype)
        for source in range(communicator.world_size)
    ]
    communicator.compute.call(lambda: fold(reduction, parts, output), reduction)


def reduce_copy(
    communicator: Communicator, tensor: torch.Tensor, root: int, *, reduction: str
) -> Event:
    """On ``root``: ``tensor`` = the reduction over ranks. Elsewhere it is only read."""
    is_root = communicator.rank == root

    def sum_up(workspace: Workspace) -> None:
        if is_root:
            fold_staged(communicator, workspace, 0, 0, tensor, reduction)

    staged = [Staged(0, tensor, [] if is_root else [root])]
    return pull(communicator, "reduce", tensor.nbytes, staged, then=sum_up)


def segment_table(
    communicator: Communicator, segments: Sequence[tuple[int, int]], per_tile: int, columns: int
) -> torch.Tensor:
    """Lines (owner, first row, rows, number of the first tile) in the order of production."""
    rank, world_size = communicator.rank, communicator.world_size
    return communicator.table(
        ("segments", tuple(segments), per_tile, columns),
        lambda: formulas.segment_lines(rank, world_size, segments, per_tile, columns),
    )


def pushed_layout(
    communicator: Communicator, rows: Sequence[int], block_m: int, tiles_n: int, row_bytes: int
) -> Layout:
    """The memory of an op in which every rank pushes its contribution to the rows of each owner."""
    world_size = communicator.world_size
    return Layout(
        formulas.reduce_slots(world_size, rows, block_m, tiles_n),
        formulas.contributed_bytes(world_size, rows, row_bytes),
    )


def reduce_scatter_kernel(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    lengths: Sequence[int],
    configuration: Configuration,
    *,
    average: bool,
) -> Event:
    """Reduce and scatter one flat ``input``, cut into ``lengths``, as :func:`reduce_scatter_copy` does."""
    segments = formulas.segments_of(lengths)
    arguments = {
        "input_ptr": input,
        "output_ptr": output,
        "segments_ptr": segment_table(communicator, segments, configuration.block_elements, 1),
        "own_elements": lengths[communicator.rank],
        "AVERAGE": average,
    }
    kernel = reduction.reduce_scatter_kernel
    return _reduce(communicator, "reduce_scatter", kernel, lengths, configuration, arguments)


def _reduce(
    communicator: Communicator,
    op: str,
    kernel: object,
    lengths: Sequence[int],
    configuration: Configuration,
    arguments: dict[str, Any],
) -> Event:
    """An op that is one kernel, which pushes contributions to parts of ``lengths`` and sums them."""
    block, item = configuration.block_elements, arguments["output_ptr"].element_size()
    layout = pushed_layout(communicator, lengths, block, 1, item)
    limit = configuration.programs or communicator.place.program_limit
    grid = formulas.persistent_grid(0, formulas.ceil_div(max(lengths), block), limit)
    known, options = {**arguments, "BLOCK": block}, {"num_warps": configuration.num_warps}
    return enqueue_kernel(communicator, op, layout, kernel, grid, known, options)


def all_reduce_copy(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    reduction: str,
) -> Event:
    """Two-shot: each rank reduces its segment of all inputs, then everyone reads all segments."""
    rank, world_size = communicator.rank, communicator.world_size
    itemsize = input.dtype.itemsize
    layout = Layout(pulled=True)
    staged = layout.add_slots(world_size)
    summed = layout.add_slots(world_size)
    offset = layout.add_data(input.numel() * itemsize)
    sums_offset = layout.add_data(max(count for _, count in segments) * itemsize)

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        stage(
            communicator, workspace, Staged(offset, input, other_ranks(communicator)), staged + rank
        )
        first, count = segments[rank]
        sums = workspace.data(rank, sums_offset, (count,), input.dtype)
        begin = offset + first * itemsize
        fold_staged(communicator, workspace, staged, begin, sums, reduction)
        for peer in other_ranks(communicator):
            stream.publish(workspace, peer, summed + rank)
        for source in sources(communicator):
            if source != rank:
                stream.wait(workspace, source, summed + source)
            first, count = segments[source]
            theirs = workspace.data(source, sums_offset, (count,), input.dtype)
            stream.copy(output[first : first + count], theirs, f"sums of rank {source}")

    return communicator.enqueue("all_reduce", layout, body)


def all_reduce_kernel(
    communicator: Communicator,
    input: torch.Tensor,
    output: torch.Tensor,
    configuration: Configuration,
    *,
    average: bool,
) -> Event:
    """One-shot all-reduce by kernel; ``input`` and ``output`` may be the same tensor."""
    arguments = {
        "input_ptr": input,
        "output_ptr": output,
        "elements": input.numel(),
        "AVERAGE": average,
    }
    kernel, lengths = reduction.all_reduce_kernel, [input.numel()]
    return _reduce(communicator, "all_reduce", kernel, lengths, configuration, arguments)


@dataclass(frozen=True)
class BySwitch:
    """The collectives of a group, each one kernel. Interpreted kernels reach the ranks one by one."""

    communicator: Communicator
    configuration: Configuration

    @property
    def _block(self) -> int:
        """Elements of a block: at least a vector of any dtype."""
        return max(VECTOR_BYTES, self.configuration.block_elements)

    def _run(
        self,
        op: str,
        kernel: object,
        layout: Layout,
        blocks: int,
        arguments: dict[str, Any],
        sums: int | None = None,
    ) -> Event:
        """Enqueue ``kernel`` alone; ``sums`` is where in the data region its sums are, if it has any."""
        place, configuration = self.communicator.place, self.configuration
        grid = formulas.persistent_grid(0, blocks, configuration.programs or place.program_limit)

        def body(workspace: Workspace) -> None:
            multicast = workspace.buffer.multicast
            assert multicast or place.interpreted, "which the engine has made sure of"
            reducing: dict[str, int] = {}
            if sums is not None:
                reducing = {"blocks": blocks, "sums_offset": workspace.data_offset + sums}
            known = {
                **arguments,
                **reducing,
                "multicast": multicast,
                "BLOCK": self._block,
                "MULTIMEM": multicast != 0,
            }
            warps = configuration.num_warps
            self.communicator.compute.launch(
                workspace.kernel_launch(kernel, grid, known, num_warps=warps)
            )

        return self.communicator.enqueue(op, layout, body)

    def _parts(self, lengths: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        block = self._block
        table = self.communicator.table(
            ("multimem parts", tuple(lengths), block, dtype),
            lambda: formulas.multimem_parts(lengths, block, dtype.itemsize),
        )
        return table, sum(formulas.ceil_div(length, block) for length in lengths)

    def all_gather(
        self, input: torch.Tensor, output: torch.Tensor, lengths: Sequence[int]
    ) -> Event:
        table, blocks = self._parts(lengths, input.dtype)
        layout = Layout(blocks, formulas.multimem_bytes(lengths, input.element_size()))
        aligned = input if input.data_ptr() % VECTOR_BYTES == 0 else input.clone()
        arguments = {"input_ptr": aligned, "output_ptr": output, "parts_ptr": table}
        kernel = multimem.multimem_all_gather_kernel
        return self._run("all_gather", kernel, layout, blocks, arguments)

    def reduce_scatter(
        self, input: torch.Tensor, output: torch.Tensor, lengths: Sequence[int]
    ) -> Event:
        """``output`` = the sum over ranks of the own part of ``input``, whose parts have ``lengths``."""
        block, item, world_size = self._block, input.element_size(), self.communicator.world_size
        table, blocks = self._parts(lengths, input.dtype)
        layout = Layout(world_size * blocks, blocks * block * item, pulled=True)
        sums = layout.add_data(formulas.ceil_div(max(lengths), block) * block * item)
        arguments = {"input_ptr": input, "output_ptr": output, "parts_ptr": table}
        kernel = multimem.multimem_reduce_scatter_kernel
        return self._run("reduce_scatter", kernel, layout, blocks, arguments, sums)

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor) -> Event:
        """``output`` = the sum over ranks of ``input``, which may be the same tensor."""
        block, item, elements = self._block, input.element_size(), input.numel()
        blocks, world_size = formulas.ceil_div(elements, block), self.communicator.world_size
        layout = Layout((world_size + 1) * blocks, blocks * block * item, pulled=True)
        sums = layout.add_data(blocks * block * item)
        arguments = {"input_ptr": input, "output_ptr": output, "elements": elements}
        kernel = multimem.multimem_all_reduce_kernel
        return self._run("all_reduce", kernel, layout, blocks, arguments, sums)


BLOCK_WORDS = 256  # one for each thread
MOST_BYTES = 64 << 10  # per message: a block for each KiB
MOST_PROGRAMS = MOST_BYTES // (4 * BLOCK_WORDS)
EPOCHS_OFFSET = HEADER_WORDS * WORD
WORDS_OFFSET = EPOCHS_OFFSET + MOST_PROGRAMS * WORD
NUM_WARPS = 8
MAX_REGISTERS = 96  # left alone, ptxas takes 32 for the sake of occupancy, and spills
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass
class GroupWords:
    """The words of a group, for so many blocks. Outgrown buffers stay: ops and graphs may use them."""

    buffer: SymmetricBuffer
    blocks: int
    outgrown: list[SymmetricBuffer]

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + sum(buffer.nbytes for buffer in self.outgrown)


def _words_of(communicator: Communicator, blocks: int) -> GroupWords:
    """The group's words, made or enlarged. Collective when it has to be."""
    held: GroupWords | None = communicator.arena.words
    if held is None or held.blocks < blocks:
        enough, place = 1 << (blocks - 1).bit_length(), communicator.place
        words = enough * 2 * communicator.world_size * BLOCK_WORDS
        buffer = place.allocate(WORDS_OFFSET + words * WORD)
        of_rank = buffer.view(buffer.rank, 0, (HEADER_WORDS + MOST_PROGRAMS,), torch.int64)
        of_rank[SPIN_LIMIT_WORD] = place.poll_limit()
        of_rank[HEADER_WORDS:] = 0  # an epoch below 0 stands for a program that has timed out
        outgrown = [] if held is None else [*held.outgrown, held.buffer]
        held = communicator.arena.words = GroupWords(buffer, enough, outgrown)
    return held


def why_not(nbytes: int, *, equal: bool = True) -> str:
    """Why a message of ``nbytes`` cannot go this way; empty if it can."""
    if nbytes > MOST_BYTES:
        return f"it is for at most {MOST_BYTES} bytes, got {nbytes}"
    return "" if equal else "it gathers equal shards only"


def why_no_rows(rows: torch.Tensor, *, scattered: bool = False) -> str:
    """Why ``rows``, which are normed, cannot go this way; empty if they can."""
    if scattered:
        return "every rank has all rows in the end; use all_reduce_norm"
    *lengths, columns = rows.shape
    nbytes = math.prod(lengths) * blocks_of_row(columns, rows.element_size()) * 4 * BLOCK_WORDS
    if nbytes > MOST_BYTES:
        return (
            f"it is for at most {MOST_BYTES} bytes, each row in whole blocks of {4 * BLOCK_WORDS}, got "
            f"{nbytes}"
        )
    return ""


def blocks_of_row(columns: int, itemsize: int) -> int:
    """How many blocks a row takes: a block holds words of one row."""
    return -(-columns * itemsize // (4 * BLOCK_WORDS))


def in_units(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The memory of flat ``tensors`` as integers of 4 bytes, or of 2 or 1 if one needs that."""
    whole = [bytes_of(tensor) for tensor in tensors]
    for dtype in (torch.int32, torch.int16):
        size = dtype.itemsize
        if not any(
            each.data_ptr() % size or each.numel() % size or each.storage_offset() % size
            for each in whole
        ):
            return [each.view(dtype) for each in whole]
    return [each.view(torch.int8) for each in whole]


def run_words(
    communicator: Communicator,
    op: str,
    kernel: Any,
    programs: int,
    more: dict[str, Any],
    blocks: int = 0,
) -> Event:
    """Enqueue ``programs`` of a ``kernel``, with arguments ``more``, for so many ``blocks`` of words."""
    place = communicator.place
    held = _words_of(communicator, blocks or programs)
    launch = KernelLaunch(
        kernel,
        programs,
        {
            "peers": peers_of(held.buffer, communicator.world_size),
            "epochs_offset": EPOCHS_OFFSET,
            "words_offset": WORDS_OFFSET,
            "WORDS": BLOCK_WORDS,
            "COMPILED": place.compiled,
            **more,
        },
        op,
        num_warps=NUM_WARPS,
        options={"maxnreg": MAX_REGISTERS},
    )
    with place.launching():
        communicator.compute.wait_event(place.record_current())
        if place.recorder is not None:
            place.recorder.begins(None, words=(held.buffer, programs))
        communicator.compute.launch(launch)
        communicator.compute.counted(held.buffer, programs)
        return communicator.compute.record()


def _run(
    communicator: Communicator, op: str, kernel: Any, units: torch.Tensor, more: dict[str, Any]
) -> Event:
    about = {"units": units.numel(), "UNIT": units.element_size()}
    programs = -(-units.nbytes // (4 * BLOCK_WORDS))
    return run_words(communicator, op, kernel, programs, {**about, **more})


def all_gather(communicator: Communicator, input: torch.Tensor, output: torch.Tensor) -> Event:
    """``output`` = all ranks' ``input``, which are equal in size, one behind the other."""
    source, target = in_units(input, output)
    arguments = {"input_ptr": source, "output_ptr": target}
    kernel = low_latency.low_latency_all_gather_kernel
    return _run(communicator, "all_gather", kernel, source, arguments)


def all_reduce(communicator: Communicator, tensor: torch.Tensor, *, average: bool) -> Event:
    (units,) = in_units(tensor)
    arguments = {"input_ptr": units, "output_ptr": units, "DTYPE": NAMES[tensor.dtype]}
    kernel = low_latency.low_latency_all_reduce_kernel
    return _run(communicator, "all_reduce", kernel, units, {**arguments, "AVERAGE": average})


def broadcast(communicator: Communicator, tensor: torch.Tensor, root: int) -> Event:
    (units,) = in_units(tensor)
    arguments = {"tensor_ptr": units, "root": root}
    kernel = low_latency.low_latency_broadcast_kernel
    return _run(communicator, "broadcast", kernel, units, arguments)
