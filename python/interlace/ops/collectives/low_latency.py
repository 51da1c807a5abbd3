"""The one-shot collectives whose words carry their flags: the launch side of their kernels.

Their memory is a buffer of its own, which no other op touches: what lies there is words of older epochs
and nothing else. It holds what the largest message so far has needed, and starts anew, epochs too, when it
grows; all ranks see the same sizes, so theirs does at the same op.

All tensors here are flat and contiguous.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels.collectives import low_latency
from interlace.kernels.signal import HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, SymmetricBuffer, bytes_of, peers_of
from interlace.runtime.core.stream import Event

BLOCK_WORDS = 256  # one for each thread
MOST_BYTES = 64 << 10  # of a message: a block for each KiB
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
        own = buffer.view(buffer.rank, 0, (HEADER_WORDS + MOST_PROGRAMS,), torch.int64)
        own[SPIN_LIMIT_WORD] = place.poll_limit()
        own[HEADER_WORDS:] = 0  # what is below is taken for a program that gave up
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
    own: dict[str, Any],
    blocks: int = 0,
) -> Event:
    """Enqueue ``programs`` of a ``kernel`` of words, with arguments of its ``own``.

    ``blocks``: of words, where a program does several.
    """
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
            **own,
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
    communicator: Communicator, op: str, kernel: Any, units: torch.Tensor, own: dict[str, Any]
) -> Event:
    """A ``kernel`` for a message of ``units``."""
    about = {"units": units.numel(), "UNIT": units.element_size()}
    programs = -(-units.nbytes // (4 * BLOCK_WORDS))
    return run_words(communicator, op, kernel, programs, {**about, **own})


def all_gather(communicator: Communicator, input: torch.Tensor, output: torch.Tensor) -> Event:
    """``output`` = all ranks' ``input``, which are equal in size, one behind the other."""
    source, target = in_units(input, output)
    arguments = {"input_ptr": source, "output_ptr": target}
    kernel = low_latency.low_latency_all_gather_kernel
    return _run(communicator, "all_gather", kernel, source, arguments)


def all_reduce(communicator: Communicator, tensor: torch.Tensor, *, average: bool) -> Event:
    """``tensor`` = the sum or the average over ranks."""
    (units,) = in_units(tensor)
    arguments = {"input_ptr": units, "output_ptr": units, "DTYPE": NAMES[tensor.dtype]}
    kernel = low_latency.low_latency_all_reduce_kernel
    return _run(communicator, "all_reduce", kernel, units, {**arguments, "AVERAGE": average})


def broadcast(communicator: Communicator, tensor: torch.Tensor, root: int) -> Event:
    """``tensor`` = that of ``root``."""
    (units,) = in_units(tensor)
    arguments = {"tensor_ptr": units, "root": root}
    kernel = low_latency.low_latency_broadcast_kernel
    return _run(communicator, "broadcast", kernel, units, arguments)
