"""Kernels of ``fake_cuda`` that move rows of experts; see ``fake_kernels.py``."""

from typing import Any

import torch

from stand_ins.fake_kernels import Arguments, Steps, send_lines


def _region(a: Arguments, rank: int, byte: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` numbers from ``byte`` of the data region of ``rank`` on."""
    bytes_of: torch.Tensor = a.data(rank, byte, count * dtype.itemsize, torch.uint8)
    return bytes_of.view(dtype)


def _parts(a: Arguments) -> list[tuple[str, int, int]]:
    """Return the data that travels with a token: name, byte of its region, numbers per row."""
    parts = [("x_ptr", a.x_byte, a.x_words), ("facts_ptr", a.facts_byte, 3 * a.TOPK)]
    return [*parts, ("scales_ptr", a.scales_byte, a.scale_words)] if a.SCALED else parts


def _rows(a: Arguments, rank: int, source: int, part: tuple[str, int, int], count: int) -> Any:
    """The first ``count`` rows of ``source`` in the region of a part."""
    name, byte, width = part
    dtype = a.tensor(name).dtype
    begin = byte + source * a.most_tokens * width * dtype.itemsize
    return _region(a, rank, begin, count * width, dtype).view(count, width)


def _send_count(a: Arguments, peer: int, counts: torch.Tensor) -> None:
    columns = 2 + a.experts
    line = _region(a, peer, a.counts_byte + a.rank * columns * 8, columns, torch.int64)
    line.copy_(counts.view(a.world_size, columns)[peer])
    a.publish(peer, a.rank, a.epoch)


def dispatch_send_kernel(a: Arguments) -> Steps:
    world_size, counts = a.world_size, a.tensor("counts_ptr").view(a.world_size, -1)
    tokens = a.tensor("tokens_ptr").view(world_size, a.tokens)
    for peer in range(world_size):
        yield a.credit(peer, a.epoch)
        _send_count(a, peer, counts)
        count = int(counts[peer, 0])
        for part in _parts(a):
            whole = a.tensor(part[0]).reshape(a.tokens, part[2])
            _rows(a, peer, a.rank, part, count).copy_(whole[tokens[peer, :count]])
        for sender in range(a.senders):
            a.publish(peer, world_size + a.rank * a.senders + sender, a.epoch)
    yield from _find_segments(a)


def _find_segments(a: Arguments) -> Steps:
    world_size, columns = a.world_size, 2 + a.experts
    for source in range(world_size):
        yield a.arrived(source, a.epoch)
    all_counts = _region(a, a.rank, a.counts_byte, world_size * columns, torch.int64)
    all_counts = all_counts.view(world_size, columns)
    segments, begin = a.tensor("segments_ptr").view(a.experts, world_size, 3), 0
    for expert in range(a.experts):
        begin = expert * a.expert_rows if a.expert_rows else begin
        for source in range(world_size):
            own = all_counts[source, 2:]
            home = int(all_counts[source, 1] + own[:expert].sum())
            segments[expert, source] = torch.tensor([begin, int(own[expert]), home])
            begin += int(own[expert])


def dispatch_receive_kernel(a: Arguments) -> Steps:
    world_size, columns, topk = a.world_size, 2 + a.experts, a.TOPK
    segments = a.tensor("segments_ptr").view(a.experts, world_size, 3)
    results = {"x_ptr": "rows_ptr", "scales_ptr": "row_scales_ptr"}
    for source in range(world_size):
        for sender in range(a.senders):
            yield a.arrived(world_size + source * a.senders + sender, a.epoch)
        line = _region(a, a.rank, a.counts_byte + source * columns * 8, columns, torch.int64)
        parts = {part[0]: _rows(a, a.rank, source, part, int(line[0])) for part in _parts(a)}
        facts = parts["facts_ptr"]
        for token, fact in enumerate(facts.tolist()):
            for slot in range(topk):
                expert, position = fact[slot] - a.rank * a.experts, fact[topk + slot]
                if not 0 <= expert < a.experts or position < 0:
                    continue
                row = int(segments[expert, source, 0]) + position
                for name, to in results.items():
                    if name in parts:
                        a.tensor(to).view(-1, parts[name].shape[1])[row] = parts[name][token]
                if a.WEIGHTED:
                    a.tensor("row_weights_ptr")[row] = fact[2 * topk + slot]


def _summed(a: Arguments, home: torch.Tensor) -> None:
    """Sums by slot of the home rows."""
    output = a.tensor("output_ptr")
    inverse = a.tensor("inverse_ptr").view(a.own_tokens, a.TOPK)
    total = torch.zeros(output.shape)
    for slot in range(a.TOPK):
        row = inverse[:, slot]
        value = home[row.clamp(min=0)].float()
        if a.WEIGHTED:
            value = value * a.tensor("slot_weights_ptr").view(inverse.shape)[:, slot, None]
        total += torch.where(row[:, None] < 0, 0.0, value)
    output.copy_(total.to(output.dtype))


def _sent_home(a: Arguments, rows: torch.Tensor, segments: torch.Tensor, each: int) -> Steps:
    """Send ``rows`` to their tokens' ranks, ``each`` slots of every rank; then sum this rank's rows."""
    width = rows.shape[1]
    for peer in range(a.world_size):
        yield a.credit(peer, a.epoch)
        for first, count, home in segments[:, peer].tolist():
            there = a.data(peer, home * width, count * width, rows.dtype)
            there.copy_(rows[first : first + count].reshape(-1))
        for number in range(each):
            a.publish(peer, a.rank * each + number, a.epoch)
    for slot in range(a.world_size * each):
        yield a.arrived(slot, a.epoch)
    inverse = a.tensor("inverse_ptr")
    rows_here = int(inverse.max()) + 1 if inverse.numel() else 0
    if a.own_tokens:
        home = a.data(a.rank, 0, max(1, rows_here) * width, rows.dtype).view(-1, width)
        _summed(a, home)


def combine_kernel(a: Arguments) -> Steps:
    rows = a.tensor("rows_ptr")
    segments = a.tensor("segments_ptr").view(a.experts, a.world_size, 3)
    yield from _sent_home(a, rows, segments, a.senders)


def grouped_matmul_combine_kernel(a: Arguments) -> Steps:
    strides = a.weight_stride_e, a.weight_stride_k, a.weight_stride_n
    weight = a.tensor("weight_ptr", ((a.num_experts, a.K, a.N), strides))  # given is the first
    input, output = a.tensor("input_ptr"), a.tensor("output_ptr")
    count = a.num_experts * a.world_size * 3
    segments = a.tensor("segments_ptr")[:count].view(a.num_experts, a.world_size, 3)
    rows = torch.zeros(input.shape[0], a.N)
    for expert, line in enumerate(segments.tolist()):
        for first, rows_of, _ in line:
            part = input[first : first + rows_of].float()
            rows[first : first + rows_of] = part @ weight[expert].float()
    yield from _sent_home(a, rows.to(output.dtype), segments, a.grid)


def counted_grouped_matmul_kernel(a: Arguments) -> Steps:
    strides = a.weight_stride_e, a.weight_stride_k, a.weight_stride_n
    weight = a.tensor("weight_ptr", ((a.experts, a.K, a.N), strides))  # given is the first
    input, output, world_size = a.tensor("input_ptr"), a.tensor("output_ptr"), a.world_size
    for peer in range(world_size):
        yield a.credit(peer, a.epoch)
        _send_count(a, peer, a.tensor("lines_ptr"))
    if a.COPIERS:
        count = int(a.tensor("sends_ptr").view(-1)[5 * a.num_sends])
        yield from send_lines(a, input, a.K, count)
    yield from _find_segments(a)
    segments = a.tensor("segments_ptr").view(a.experts, world_size, 3).tolist()
    for source in range(world_size):
        for expert in range(a.experts):
            begin, rows, home = segments[expert][source]
            part = input[home : home + rows]
            if source != a.rank:
                there = source * a.most_tokens + home - segments[0][source][2]
                first = world_size + 1 + source * a.experts + expert + there // a.chunk_rows
                for chunk in range(-(-rows // a.chunk_rows)):
                    yield a.arrived(first + chunk, a.epoch)
                part = a.data(a.rank, there * a.K, rows * a.K, input.dtype).view(-1, a.K)
            output[begin : begin + rows] = (part.float() @ weight[expert].float()).to(output.dtype)
