"""Kernels of ``fake_cuda`` that attend to keys as they come, and merge; see ``fake_kernels.py``."""

import math

import torch

from interlace.kernels.attention.tiles import PART_COLUMNS
from stand_ins.fake_kernels import Arguments, Steps, _send


def _rows(a: Arguments, name: str) -> torch.Tensor:
    """``[tokens, batches, heads, size]`` of a kernel's ``Queries``."""
    shape = a.partials_rows, a.batches, a.heads, a.HEAD_DIM
    strides = (getattr(a, f"{name}_stride{of}") for of in ("", "_b", "_h"))
    return a.tensor(f"{name}_ptr", (shape, (*strides, 1)))


def _partials(a: Arguments, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = count, a.batches, a.heads, a.partials_rows
    made = a.tensor("partials_ptr").view(-1)[: math.prod(shape) * a.HEAD_DIM]
    lse = a.tensor("partials_lse_ptr").view(-1)[: math.prod(shape)]
    return made.view(*shape, a.HEAD_DIM), lse.view(shape)


def _attend(a: Arguments, keys: torch.Tensor, line: list[int]) -> None:
    """The partial result of a line of the table over its ``keys``, packed."""
    _, number, _, rows, position, more_rows, more_position, *_ = line
    places = [torch.arange(rows) + position, torch.arange(more_rows) + more_position]
    low, high = a.tensor("spans_ptr").view(-1, 2)[: a.partials_rows].unsqueeze(-1).unbind(1)
    seen = (low <= torch.cat(places)) & (torch.cat(places) < high)
    of_heads = (torch.arange(a.heads) + a.first_head) // a.per_key
    shape = keys.shape[0], 2, a.batches, a.key_heads, a.HEAD_DIM
    key, value = keys.reshape(shape).float().permute(1, 2, 3, 0, 4)[:, :, of_heads]
    score = _rows(a, "queries").float().permute(1, 2, 0, 3) @ key.mT * a.scale
    score = score.masked_fill(~seen, -math.inf)
    made, lse = _partials(a, number + 1)
    weight = (score * math.log(2)).softmax(-1).nan_to_num()
    made[number] = weight @ value
    lse[number] = (score * math.log(2)).logsumexp(-1) / math.log(2)


def _of_line(a: Arguments, line: list[int]) -> torch.Tensor:
    _, _, row, rows, _, more_rows, *_ = line
    width = 2 * a.batches * a.key_heads * a.HEAD_DIM
    shape, strides = (row + rows + more_rows, width), (a.keys_stride, 1)
    return a.tensor("keys_ptr", (shape, strides))[row:]


def attention_kernel(a: Arguments) -> Steps:
    lines = a.lines("parts_ptr", a.first + a.num_parts, PART_COLUMNS)
    for line in lines[a.first :]:
        _attend(a, _of_line(a, line), line)
    return iter(())


def all_gather_attention_kernel(a: Arguments) -> Steps:
    width, epoch = 2 * a.batches * a.key_heads * a.HEAD_DIM, a.epoch
    if a.COPIERS:
        yield from _send(a, a.tensor("keys_ptr"), width)
    for line in a.lines("parts_ptr", a.num_parts, PART_COLUMNS):
        source, _, row, rows, _, more_rows, _, first_slot, slots = line
        keys = a.tensor("keys_ptr")
        if source != a.rank:
            for slot in range(first_slot, first_slot + slots):
                yield a.arrived(slot, epoch)
            count = rows + more_rows
            keys = a.data(a.rank, row * width, count * width, keys.dtype).view(count, width)
        _attend(a, keys, line)


def merge_attention_kernel(a: Arguments) -> Steps:
    made, lse = _partials(a, a.count)
    total = (lse * math.log(2)).logsumexp(0)
    weight = (lse * math.log(2) - total.nan_to_num(neginf=0)).exp()
    merged = (made * weight.unsqueeze(-1)).sum(0)
    output = _rows(a, "output")
    output.copy_(merged.permute(2, 0, 1, 3))
    a.tensor("lse_ptr", (total.shape, total.stride())).copy_(total)
    return iter(())


MODELS = {
    model.__name__: model
    for model in (attention_kernel, all_gather_attention_kernel, merge_attention_kernel)
}
