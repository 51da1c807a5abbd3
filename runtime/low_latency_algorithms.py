"""The host half of the one-shot collectives whose words carry their flags (``kernels/low_latency.py``).

Their memory is a buffer of its own, which no other op touches: what lies there is words of older epochs
and nothing else. It holds what the largest message so far has needed, and starts anew, epochs too, when it
grows; all ranks see the same sizes, so theirs does at the same op.

All tensors here are flat and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.kernels import low_latency
from interlace.kernels.signal import HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.runtime.communicator import Communicator
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import WORD, SymmetricBuffer
from interlace.runtime.stream import Event

BLOCK_WORDS = 256  # one for each thread: with more, ptxas spills
MOST_BYTES = 64 << 10  # of a message: a program for each KiB
MOST_PROGRAMS = MOST_BYTES // (4 * BLOCK_WORDS)
NUM_WARPS = 8
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Words:
    """The words of one group, for up to ``programs`` programs.

    Outgrown buffers stay: ops that were enqueued before may still be on their way through them.
    """

    def __init__(
        self,
        buffer: SymmetricBuffer,
        programs: int,
        spin_limit: int,
        outgrown: Sequence[SymmetricBuffer],
    ) -> None:
        self.buffer, self.programs, self.outgrown = buffer, programs, outgrown
        self.epochs_offset = HEADER_WORDS * WORD
        self.words_offset = self.epochs_offset + MOST_PROGRAMS * WORD
        header = buffer.view(buffer.rank, 0, (HEADER_WORDS,), torch.int64)
        header[SPIN_LIMIT_WORD] = spin_limit

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        return self.buffer.nbytes + sum(buffer.nbytes for buffer in self.outgrown)

    @staticmethod
    def bytes_for(programs: int, world_size: int) -> int:
        words = programs * 2 * world_size * BLOCK_WORDS
        return (HEADER_WORDS + MOST_PROGRAMS + words) * WORD


def _words_of(communicator: Communicator, programs: int) -> Words:
    """The group's words, made or enlarged. Collective when it has to be."""
    held: Words | None = communicator.words
    if held is None or held.programs < programs:
        enough = 1
        while enough < programs:
            enough *= 2
        place = communicator.place
        buffer = place.allocate(Words.bytes_for(enough, communicator.world_size))
        outgrown = [] if held is None else [*held.outgrown, held.buffer]
        held = communicator.words = Words(buffer, enough, place.poll_limit(), outgrown)
    return held


def why_not(nbytes: int, *, equal: bool = True) -> str:
    """Why a message of ``nbytes`` cannot go this way; empty if it can."""
    if nbytes % 4:
        return f"it moves words of 4 bytes, got {nbytes} bytes"
    if nbytes > MOST_BYTES:
        return f"it is for at most {MOST_BYTES} bytes, got {nbytes}"
    return "" if equal else "it gathers equal shards only"


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` as int32, or of a copy where it does not begin at 4 bytes."""
    flat = tensor.view(-1) if tensor.data_ptr() % 4 == 0 else tensor.flatten().clone()
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.int32)


def _run(
    communicator: Communicator,
    op: str,
    kernel: Any,
    words: int,
    arguments: dict[str, Any],
    then: Callable[[], None] = lambda: None,
) -> Event:
    place = communicator.place
    programs = -(-words // BLOCK_WORDS)
    held = _words_of(communicator, programs)
    launch = KernelLaunch(
        kernel,
        programs,
        {
            "peers_ptr": held.buffer.peers,
            "rank": communicator.rank,
            "world_size": communicator.world_size,
            "words": words,
            "epochs_offset": held.epochs_offset,
            "words_offset": held.words_offset,
            "WORDS": BLOCK_WORDS,
            "COMPILED": not place.interpreted,
            **arguments,
        },
        op,
        num_warps=NUM_WARPS,
    )
    with place.launching():
        communicator.compute.wait_event(place.record_current())
        communicator.compute.launch(launch)
        then()
        return communicator.compute.record()


def _copied_back(
    communicator: Communicator, tensor: torch.Tensor, words: torch.Tensor
) -> Callable[[], None]:
    """What brings ``words`` into ``tensor``, if they are a copy of it."""

    def copy() -> None:
        if words.data_ptr() != tensor.data_ptr():
            communicator.compute.copy(tensor, words.view(tensor.dtype).view(tensor.shape), "output")

    return copy


def all_gather(communicator: Communicator, input: torch.Tensor, output: torch.Tensor) -> Event:
    """``output`` = all ranks' ``input``, which are equal in size, one behind the other."""
    source, target = as_words(input), as_words(output)
    return _run(
        communicator,
        "all_gather",
        low_latency.low_latency_all_gather_kernel,
        source.numel(),
        {"input_ptr": source, "output_ptr": target},
        _copied_back(communicator, output, target),
    )


def all_reduce(communicator: Communicator, tensor: torch.Tensor, *, average: bool) -> Event:
    """``tensor`` = the sum or the average over ranks."""
    words = as_words(tensor)
    return _run(
        communicator,
        "all_reduce",
        low_latency.low_latency_all_reduce_kernel,
        words.numel(),
        {
            "input_ptr": words,
            "output_ptr": words,
            "DTYPE": NAMES[tensor.dtype],
            "AVERAGE": average,
        },
        _copied_back(communicator, tensor, words),
    )


def broadcast(communicator: Communicator, tensor: torch.Tensor, root: int) -> Event:
    """``tensor`` = that of ``root``."""
    words = as_words(tensor)
    return _run(
        communicator,
        "broadcast",
        low_latency.low_latency_broadcast_kernel,
        words.numel(),
        {"tensor_ptr": words, "root": root},
        _copied_back(communicator, tensor, words),
    )
