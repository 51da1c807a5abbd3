"""Kernels of ``fake_cuda`` that attend to keys as they come, merge, and differentiate that; see
``fake_kernels.py``.
"""

import math

import torch

from interlace.kernels.attention.tiles import PART_COLUMNS
from stand_ins.fake_kernels import Arguments, Steps, _send


def _rows(a: Arguments, name: str, rows: int, size: int) -> torch.Tensor:
    """Return ``[tokens, batches, heads, size]`` of a kernel's ``Queries``."""
    shape = rows, a.batches, a.heads, size
    strides = (getattr(a, f"{name}_stride{of}") for of in ("", "_b", "_h"))
    return a.tensor(f"{name}_ptr", (shape, (*strides, 1)))


def _partials(a: Arguments, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = count, a.batches, a.heads, a.partials_rows
    made = a.tensor("partials_ptr").view(-1)[: math.prod(shape) * size]
    lse = a.tensor("partials_lse_ptr").view(-1)[: math.prod(shape)]
    return made.view(*shape, size), lse.view(shape)


def _widths(a: Arguments) -> list[int]:
    """Elements of the keys of a packed row, and of its values."""
    return [a.batches * a.key_heads * size for size in (a.HEAD_DIM, a.VALUE_DIM)]


def _heads_seen(a: Arguments) -> torch.Tensor:
    """The head of keys that each head of queries sees."""
    return (torch.arange(a.heads) + a.first_head) // a.per_key


def _scores(
    a: Arguments, rows: int, keys: torch.Tensor, line: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores of the first ``rows`` queries and a line's packed ``keys``, and its keys and values."""
    _, _, _, count, position, more_rows, more_position, *_ = line
    places = [torch.arange(count) + position, torch.arange(more_rows) + more_position]
    low, high = a.tensor("spans_ptr").view(-1, 2)[:rows].unsqueeze(-1).unbind(1)
    seen = (low <= torch.cat(places)) & (torch.cat(places) < high)
    shape = len(keys), a.batches, a.key_heads, -1
    key, value = (
        part.reshape(shape).float().permute(1, 2, 0, 3)[:, _heads_seen(a)]
        for part in torch.split(keys, _widths(a), 1)
    )
    query = _rows(a, "queries", rows, a.HEAD_DIM).float().permute(1, 2, 0, 3)
    score = query @ key.mT * a.scale
    return score.masked_fill(~seen, -math.inf), key, value


def _attend(a: Arguments, keys: torch.Tensor, line: list[int]) -> None:
    """The partial result of a line of the table over its ``keys``, packed."""
    score, _, value = _scores(a, a.partials_rows, keys, line)
    number = line[1]
    made, lse = _partials(a, number + 1, a.VALUE_DIM)
    weight = (score * math.log(2)).softmax(-1).nan_to_num()
    made[number] = weight @ value
    lse[number] = (score * math.log(2)).logsumexp(-1) / math.log(2)


def _of_line(a: Arguments, line: list[int], name: str = "keys_ptr") -> torch.Tensor:
    _, _, row, rows, _, more_rows, *_ = line
    width = sum(_widths(a))
    shape, strides = (row + rows + more_rows, width), (a.keys_stride, 1)
    return a.tensor(name, (shape, strides))[row:]


def attention_kernel(a: Arguments) -> Steps:
    lines = a.lines("parts_ptr", a.first + a.num_parts, PART_COLUMNS)
    for line in lines[a.first :]:
        _attend(a, _of_line(a, line), line)
    return iter(())


def all_gather_attention_kernel(a: Arguments) -> Steps:
    width, epoch = sum(_widths(a)), a.epoch
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
    made, lse = _partials(a, a.count, a.VALUE_DIM)
    total = (lse * math.log(2)).logsumexp(0)
    weight = (lse * math.log(2) - total.nan_to_num(neginf=0)).exp()
    merged = (made * weight.unsqueeze(-1)).sum(0)
    output = _rows(a, "output", a.partials_rows, a.VALUE_DIM)
    output.copy_(merged.permute(2, 0, 1, 3))
    a.tensor("lse_ptr", (total.shape, total.stride())).copy_(total)
    return iter(())


def _gradients(
    a: Arguments, line: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a line's gradients of scores, weights, keys by head, and gradients of the output."""
    score, key, value = _scores(a, a.sums_rows, _of_line(a, line), line)
    shape = a.batches, a.heads, a.sums_rows, 1
    lse, delta = (a.tensor(each).view(shape) for each in ("sums_lse_ptr", "delta_ptr"))
    grad = _rows(a, "grads", a.sums_rows, a.VALUE_DIM).float().permute(1, 2, 0, 3)
    weight = (score - lse).exp2()
    return weight * (grad @ value.mT - delta), weight, key, grad


def attention_queries_backward_kernel(a: Arguments) -> Steps:
    lines = a.lines("parts_ptr", a.first + a.num_parts, PART_COLUMNS)
    for line in lines[a.first :]:
        of_score, _, key, _ = _gradients(a, line)
        made, _ = _partials(a, line[1] + 1, a.HEAD_DIM)
        made[line[1]] = of_score @ key
    return iter(())


def attention_keys_backward_kernel(a: Arguments) -> Steps:
    lines = a.lines("parts_ptr", a.first + a.num_parts, PART_COLUMNS)
    for line in lines[a.first :]:
        of_score, weight, _, grad = _gradients(a, line)
        query = _rows(a, "queries", a.sums_rows, a.HEAD_DIM).float().permute(1, 2, 0, 3)
        packed = []
        for made in (of_score.mT @ query * a.factor, weight.mT @ grad):
            total = torch.zeros(a.batches, a.key_heads, *made.shape[2:])
            total.index_add_(1, _heads_seen(a), made)
            packed.append(total.permute(2, 0, 1, 3).flatten(1))
        _of_line(a, line, "output_ptr").copy_(torch.cat(packed, 1))
    return iter(())
