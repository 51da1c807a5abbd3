"""Kernels of ``fake_cuda``: the same effect on memory as the real ones, by torch, without their structure.

A model is a generator: it yields conditions, and goes on once they hold. It knows tensors by address, as
a kernel does. Signals are the real ones; how a fused kernel moves and multiplies is not modelled: whole
chunks move, then torch multiplies.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.kernels.signal import (
    ABORT_WORD,
    CLAIMED_WORD,
    CREDIT_WORDS,
    EPOCH_WORD,
    SPIN_LIMIT_WORD,
)
from interlace.kernels.transfer import TRANSFER_COLUMNS
from interlace.runtime.compat.torch_groups import tensor_over
from interlace.runtime.core.memory import WORD
from interlace.runtime.numerics import norms

Steps = Iterator[Callable[[], bool]]
View = tuple[Sequence[int], Sequence[int]]
Memory = Callable[[int, View | None], torch.Tensor]
CPU = torch.device("cpu")
LINGER_POLLS = 100


def word(address: int) -> Any:
    return ctypes.c_int64.from_address(address)


class Arguments:
    """The arguments of a launch: ``arguments.rank``; ``arguments.tensor("input_ptr")``."""

    def __init__(self, values: dict[str, Any], tensor: Memory) -> None:
        self._values, self._tensor = values, tensor

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    def tensor(self, name: str, view: View | None = None) -> torch.Tensor:
        """Return the tensor ``name``, or another view of the same memory by shape and strides."""
        return self._tensor(self._values[name], view)

    def lines(self, name: str, count: int, columns: int) -> list[list[int]]:
        return [
            [int(each) for each in line]
            for line in self.tensor(name)[: count * columns].view(count, columns).tolist()
        ]

    def base(self, rank: int) -> int:
        return int(self.tensor("peers_ptr")[rank])

    @property
    def epoch(self) -> int:
        return int(word(self.base(self.rank) + EPOCH_WORD * WORD).value) + 1

    @property
    def void(self) -> bool:
        """Return whether a wait in this channel timed out on this rank, or the group was aborted."""
        return bool(word(self.base(self.rank) + ABORT_WORD * WORD).value)

    def data(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``count`` elements of the data region of ``rank`` from element ``offset`` on."""
        address = self.base(rank) + self.data_offset + offset * dtype.itemsize
        return tensor_over(address, count * dtype.itemsize, CPU).view(dtype)

    def publish(self, rank: int, slot: int, epoch: int) -> None:
        word(self.base(rank) + self.slot_offset + slot * WORD).value = epoch

    def arrived(self, slot: int, epoch: int) -> Callable[[], bool]:
        address = self.base(self.rank) + self.slot_offset + slot * WORD
        return lambda: bool(word(address).value >= epoch)

    def credit(self, peer: int, epoch: int) -> Callable[[], bool]:
        address = self.base(self.rank) + (CREDIT_WORDS + peer) * WORD
        return lambda: bool(word(address).value >= epoch - 1)


def publish_kernel(a: Arguments) -> Steps:
    if not a.void:
        word(a.base(a.peer) + a.slot_byte).value = a.epoch
    return iter(())


def _wait(a: Arguments, source: int, slot_byte: int, expected: int) -> Steps:
    """``signal.wait``: bounded by SPIN_LIMIT; a timeout is recorded and aborts all ranks' channels."""
    header = a.base(a.rank)
    slot, polls = word(header + slot_byte), itertools.count(1)
    most = word(header + SPIN_LIMIT_WORD * WORD).value
    yield lambda: slot.value >= expected or a.void or next(polls) > most
    claimed = word(header + CLAIMED_WORD * WORD)
    if slot.value < expected and not claimed.value:
        claimed.value = 1
        if not a.void:
            for number, value in enumerate((source, slot_byte, expected, slot.value, 0), 1):
                word(header + (CLAIMED_WORD + number) * WORD).value = value
            for rank in range(a.world_size):
                word(a.base(rank) + ABORT_WORD * WORD).value = expected


def wait_kernel(a: Arguments) -> Steps:
    yield from _wait(a, a.source, a.slot_byte, a.epoch)


def wait_credits_kernel(a: Arguments) -> Steps:
    epoch = a.epoch
    for peer in range(a.world_size):
        slot_byte = (CREDIT_WORDS + peer) * WORD
        yield from _wait(a, peer, slot_byte, epoch - 1)
        credit, polls = word(a.base(a.rank) + slot_byte), itertools.count(1)
        yield (
            lambda credit=credit, polls=polls: (
                not 0 <= credit.value < epoch - 1 or next(polls) > LINGER_POLLS
            )
        )


def finish_kernel(a: Arguments) -> Steps:
    epoch, void = a.epoch, a.void
    for peer in range(a.world_size):
        word(a.base(peer) + (CREDIT_WORDS + a.rank) * WORD).value = -epoch if void else epoch
    if not void:
        word(a.base(a.rank) + EPOCH_WORD * WORD).value = epoch
    return iter(())


def _send(a: Arguments, input: torch.Tensor, columns: int) -> Steps:
    yield from send_lines(a, input, columns, a.num_sends)


def send_lines(a: Arguments, input: torch.Tensor, columns: int, count: int) -> Steps:
    for peer, first, rows, gathered, slot in a.lines("sends_ptr", count, TRANSFER_COLUMNS):
        yield a.credit(peer, a.epoch)
        part = input[first : first + rows].reshape(-1)
        a.data(peer, gathered * columns, rows * columns, input.dtype).copy_(part)
        a.publish(peer, slot, a.epoch)


def all_gather_kernel(a: Arguments) -> Steps:
    input, output, epoch = a.tensor("input_ptr").view(-1), a.tensor("output_ptr").view(-1), a.epoch
    yield from _send(a, input, 1)
    for source, first, rows, gathered, slot in a.lines(
        "arrivals_ptr", a.num_arrivals, TRANSFER_COLUMNS
    ):
        part = input[first : first + rows]
        if source != a.rank:
            yield a.arrived(slot, epoch)
            part = a.data(a.rank, gathered, rows, input.dtype)
        output[gathered : gathered + rows].copy_(part)


def all_gather_matmul_kernel(a: Arguments) -> Steps:
    input, output, epoch = a.tensor("input_ptr"), a.tensor("output_ptr"), a.epoch
    weight = a.tensor("weight_ptr")
    if a.COPIERS:
        yield from _send(a, input, a.K)
    lines = a.lines("chunks_ptr", a.num_chunks, TRANSFER_COLUMNS + 1)
    for source, first, rows, gathered, slot, _ in lines:
        part = input[first : first + rows]
        if source != a.rank:
            yield a.arrived(slot, epoch)
            part = a.data(a.rank, gathered * a.K, rows * a.K, input.dtype).view(rows, a.K)
        output[gathered : gathered + rows] = (part.float() @ weight.float()).to(output.dtype)


def grouped_matmul_kernel(a: Arguments) -> Steps:
    input, output, epoch = a.tensor("input_ptr"), a.tensor("output_ptr"), a.epoch
    strides = a.weight_stride_e, a.weight_stride_k, a.weight_stride_n
    weight = a.tensor("weight_ptr", ((a.num_experts, a.K, a.N), strides))  # given is the first
    if a.COPIERS:
        yield from _send(a, input, a.K)
    count = a.num_experts * a.world_size * 3
    segments = a.tensor("segments_ptr")[:count].view(a.num_experts, a.world_size, 3).tolist()
    for step in range(a.world_size):
        source = (a.rank - step) % a.world_size
        for expert in range(a.num_experts):
            segment = expert * a.world_size + source
            begin, rows, own = segments[expert][source]
            part = input[own : own + rows]
            if source != a.rank:
                for chunk in range(-(-rows // a.chunk_rows)):
                    yield a.arrived(segment + begin // a.chunk_rows + chunk, epoch)
                part = a.data(a.rank, begin * a.K, rows * a.K, input.dtype).view(-1, a.K)
            output[begin : begin + rows] = (part.float() @ weight[expert].float()).to(output.dtype)


def _reduced(a: Arguments, parts: list[torch.Tensor], output: torch.Tensor) -> Steps:
    """Send ``parts[owner]`` to every owner, a slot per source, and sum this rank's into ``output``."""
    yield from _contributed(a, parts)
    yield from _summed(a, output)


def _contributed(a: Arguments, parts: list[torch.Tensor]) -> Steps:
    for owner, part in enumerate(parts):
        yield a.credit(owner, a.epoch)
        a.data(owner, a.rank * part.numel(), part.numel(), part.dtype).copy_(part.reshape(-1))
        a.publish(owner, a.rank, a.epoch)


def _summed(a: Arguments, output: torch.Tensor) -> Steps:
    total = torch.zeros(output.numel())
    for source in range(a.world_size):
        yield a.arrived(source, a.epoch)
        total += a.data(a.rank, source * output.numel(), output.numel(), output.dtype).float()
    if a.AVERAGE:
        total /= a.world_size
    output.copy_(total.view(output.shape).to(output.dtype))


def all_reduce_kernel(a: Arguments) -> Steps:
    input = a.tensor("input_ptr")
    return _reduced(a, [input] * a.world_size, a.tensor("output_ptr"))


def _segments(a: Arguments, whole: torch.Tensor) -> list[torch.Tensor]:
    lines = sorted(a.lines("segments_ptr", a.world_size, 4))
    return [whole[first : first + count] for _, first, count, _ in lines]


def reduce_scatter_kernel(a: Arguments) -> Steps:
    whole = a.tensor("input_ptr").view(-1)
    return _reduced(a, _segments(a, whole), a.tensor("output_ptr"))


def _product(a: Arguments) -> torch.Tensor:
    input = a.tensor("input_ptr")
    return (input.float() @ a.tensor("weight_ptr").float()).to(input.dtype)


def matmul_reduce_scatter_kernel(a: Arguments) -> Steps:
    return _reduced(a, _segments(a, _product(a)), a.tensor("output_ptr"))


def matmul_reduce_scatter_roles_kernel(a: Arguments) -> Steps:
    return _contributed(a, _segments(a, _product(a)))


def sum_tiles_kernel(a: Arguments) -> Steps:
    return _summed(a, a.tensor("output_ptr"))


def matmul_all_reduce_kernel(a: Arguments) -> Steps:
    return _reduced(a, [_product(a)] * a.world_size, a.tensor("output_ptr"))


# -- norms of rows --------------------------------------------------------------------------------------


def _matrix(a: Arguments, name: str, rows: int, columns: int) -> torch.Tensor:
    """Return a dense matrix. Own rows and all rows may have one address, which gives no shape."""
    return a.tensor(name, ((rows, columns), (columns, 1)))


def _norm_own(a: Arguments, parts: list[torch.Tensor]) -> Steps:
    """Send ``parts[owner]`` to every owner; sum and norm this rank's rows, and send them by ``GATHER``."""
    rows = parts[a.rank].shape[0]
    output, made = (_matrix(a, name, rows, a.N) for name in ("output_ptr", "normed_ptr"))
    yield from _contributed(a, parts)
    yield from _summed(a, output)
    if a.RESIDUAL:
        output += _matrix(a, "residual_ptr", rows, a.N)
    weight, bias = (
        a.tensor(f"norm_{name.lower()}_ptr", ((a.N,), (1,)))
        if a.__getattr__(f"NORM_{name}")
        else None
        for name in ("WEIGHT", "BIAS")
    )
    norm = norms.RowNorm(a.KIND, a.EPS, weight, bias)
    scale = _matrix(a, "scale_ptr", rows, 1) if a.QUANTIZE else None
    norms.NormTail(norm, None, made, scale).finish(output)
    if a.GATHER:
        sent = [(made, a.normed_byte, "all_normed_ptr")]
        sent += [(output, a.sum_byte, "all_sums_ptr")] if a.GATHER == "both" else []
        sent += [] if scale is None else [(scale, a.scale_byte, "all_scales_ptr")]
        yield from _gather_rows(a, sent)


def _gather_rows(a: Arguments, sent: list[tuple[torch.Tensor, int, str]]) -> Steps:
    """Send this rank's rows to all peers, and copy theirs from the workspace into whole results."""
    lines = a.lines("segments_ptr", a.world_size, 4)
    parts = {owner: (first, rows) for owner, first, rows, _ in lines}
    total = sum(rows for _, rows in parts.values())

    def region(rank: int, owner: int, like: torch.Tensor, byte: int) -> torch.Tensor:
        (first, rows), width = parts[owner], like.shape[1] * like.element_size()
        address = a.base(rank) + a.data_offset + byte + first * width
        return tensor_over(address, rows * width, CPU).view(like.dtype).view(rows, -1)

    for peer in range(a.world_size):
        if peer != a.rank:
            for tensor, byte, _ in sent:
                region(peer, a.rank, tensor, byte).copy_(tensor)
            a.publish(peer, a.slots_byte // WORD + a.rank * a.slices, a.epoch)
    for owner, (first, rows) in parts.items():
        if owner != a.rank:
            yield a.arrived(a.slots_byte // WORD + owner * a.slices, a.epoch)
            for tensor, byte, name in sent:
                whole = _matrix(a, name, total, tensor.shape[1])
                whole[first : first + rows].copy_(region(a.rank, owner, tensor, byte))


def matmul_reduce_scatter_norm_kernel(a: Arguments) -> Steps:
    return _norm_own(a, _segments(a, _product(a)))


def matmul_all_reduce_norm_kernel(a: Arguments) -> Steps:
    return _norm_own(a, [_product(a)] * a.world_size)


def reduce_norm_kernel(a: Arguments) -> Steps:
    return _norm_own(a, _segments(a, a.tensor("input_ptr")))


# -- words that carry their flag ----------------------------------------------------------------------


def _words(a: Arguments, rank: int, program: int, epoch: int, source: int) -> torch.Tensor:
    region = (program * 2 + epoch % 2) * a.world_size + source
    address = a.base(rank) + a.words_offset + region * a.WORDS * WORD
    return tensor_over(address, a.WORDS * WORD, CPU).view(torch.int64)


def _all_there(words: torch.Tensor, flag: int) -> Callable[[], bool]:
    return lambda: bool((words >> 32 == flag).all())


def _exchanged(a: Arguments, own: torch.Tensor) -> Any:
    """Return ``own`` of every rank, as a tensor each."""
    data = own.reshape(-1).view(torch.uint8)
    count = -(-data.numel() // 4)
    programs = -(-count // a.WORDS)
    padded = torch.zeros(programs * a.WORDS * 4, dtype=torch.uint8)
    padded[: data.numel()] = data
    payload = padded.view(torch.int32).view(programs, a.WORDS).long() & 0xFFFFFFFF
    epochs = [word(a.base(a.rank) + a.epochs_offset + p * WORD) for p in range(programs)]
    for program, epoch in enumerate(epochs):
        now = epoch.value + 1
        for peer in range(a.world_size):
            if peer != a.rank:
                _words(a, peer, program, now, a.rank).copy_(payload[program] | now << 32)
    parts = []
    for source in range(a.world_size):
        if source != a.rank:
            received = []
            for program, epoch in enumerate(epochs):
                words = _words(a, a.rank, program, epoch.value + 1, source)
                yield _all_there(words, epoch.value + 1)
                received.append((words & 0xFFFFFFFF).to(torch.int32))
            parts.append(torch.cat(received).view(torch.uint8)[: data.numel()].view(own.dtype))
        else:
            parts.append(own.reshape(-1))
    for epoch in epochs:
        epoch.value += 1
    word(a.base(a.rank) + EPOCH_WORD * WORD).value += programs
    return parts


def _message(a: Arguments, name: str, count: int = 1) -> torch.Tensor:
    """Return the bytes of ``count`` messages from pointer ``name`` on."""
    return a.tensor(name).reshape(-1).view(torch.uint8)[: count * a.units * a.UNIT]


def low_latency_all_gather_kernel(a: Arguments) -> Steps:
    parts = yield from _exchanged(a, _message(a, "input_ptr"))
    _message(a, "output_ptr", a.world_size).copy_(torch.cat(parts))


def low_latency_broadcast_kernel(a: Arguments) -> Steps:
    tensor = _message(a, "tensor_ptr")
    parts = yield from _exchanged(a, tensor)
    tensor.copy_(parts[a.root].clone())


def low_latency_all_reduce_kernel(a: Arguments) -> Steps:
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[a.DTYPE]
    parts = yield from _exchanged(a, _message(a, "input_ptr"))
    total = torch.zeros(parts[0].view(dtype).numel())
    for part in parts:
        total += part.view(dtype).float()
    if a.AVERAGE:
        total /= a.world_size
    _message(a, "output_ptr").copy_(total.to(dtype).view(torch.uint8))
