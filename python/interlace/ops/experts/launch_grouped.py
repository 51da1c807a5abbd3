"""The launch side of the grouped ops: rows move to the ranks that multiply them, expert by expert.

``fused``      one Triton kernel communicates and multiplies
``pipelined``  torch matmuls on segments, each as soon as its source's rows are there
``unfused``    the collective, then a matmul per expert; any dtype

One code for both ops: what differs between all-gather and all-to-all is the :class:`Routes`. Matrices are
as in ``gather_matmul.py``; weights are ``[E, K, N]`` with any strides, biases ``[E, N]``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Experts, Table
from interlace.kernels.experts import grouped_matmul
from interlace.ops.collectives.launch import resident_programs, send_by_copy_engine
from interlace.ops.experts.grouped_routes import Routes
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration


def expert_operands(
    communicator: Communicator, input: torch.Tensor, linear: Linear, configuration: Configuration
) -> dict[str, Any]:
    """Kernel arguments for the first expert's matmul, and for the place of the others' weights."""
    weight = linear.weight
    first = Linear(weight[0], linear.bias, linear.output, activation=linear.activation)
    if weight.stride(0) * weight.element_size() % operands.DESCRIPTOR_ALIGNMENT:
        configuration = replace(configuration, descriptors=False)
    return {
        **operands.product(communicator, configuration, input, first),
        "weight": Experts(weight, *weight.stride()),
        "bias_ptr": operands.bias_or_none(first),
        "num_experts": weight.shape[0],
    }


@dataclass(frozen=True)
class GroupedMatmul:
    """One call of either op. ``received``: see the public ops."""

    communicator: Communicator
    op: str
    input: torch.Tensor
    linear: Linear
    routes: Routes
    received: torch.Tensor | None

    def _expert(self, expert: int) -> Linear:
        bias = None if self.linear.bias is None else self.linear.bias[expert]
        return replace(self.linear, weight=self.linear.weight[expert], bias=bias)

    def fused(self, configuration: Configuration) -> Event:
        """One kernel. Its first programs copy, or the copy engine sends."""
        communicator, input, routes = self.communicator, self.input, self.routes
        columns, inner, itemsize = self.linear.weight.shape[2], input.shape[1], input.element_size()
        size = routes.chunk_rows(configuration.block_m, configuration.chunks)
        lines = routes.send_lines(size)
        key = (routes, size)
        sends = communicator.table(("grouped sends", *key), lambda: lines, passing=True)
        segments = communicator.table(("grouped rows", *key), routes.segment_lines, passing=True)
        layout = Layout(routes.slots(size), routes.most_received * inner * itemsize)
        # Made before the op begins on the streams: they wait for what the caller has issued until then.
        known = expert_operands(communicator, input, self.linear, configuration)
        tiles_n = formulas.ceil_div(columns, configuration.block_n)
        tiles = routes.tiles(configuration.block_m, tiles_n)

        def body(workspace: Workspace) -> None:
            most = max(1, communicator.place.program_limit // 4)
            copiers = min(configuration.copiers, len(lines), most)
            if not copiers and lines:
                send_by_copy_engine(communicator, workspace, lines, [(input, 0)])
            resident = max(copiers + 1, resident_programs(communicator, configuration, copiers))
            arguments = {
                **known,
                **operands.copies(configuration, copiers),
                "sends": Table(sends, len(lines)),
                "segments_ptr": segments,
                "chunk_rows": size,
            }
            grid = formulas.persistent_grid(copiers, tiles, resident)
            kernel, options = (
                grouped_matmul.grouped_matmul_kernel,
                operands.launch_options(configuration, input),
            )
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
            if not tiles:
                # No tile, so no program has waited; but what arrives late would hit the next op.
                for source, slot in routes.arrival_slots(size):
                    communicator.compute.wait(workspace, source, slot)
            if self.received is not None:
                shape = self.received.shape
                self._keep(workspace.data(routes.rank, 0, shape, input.dtype), self.received)

        return communicator.enqueue(self.op, layout, body)

    def _keep(self, arrived: torch.Tensor, received: torch.Tensor) -> None:
        """Copy what has arrived, and own rows where the workspace has holes."""
        copy, done = self.communicator.compute.copy, 0
        for own in [*self.routes.own_segments(), None]:
            end = received.shape[0] if own is None else own.to
            if done < end:
                copy(received[done:end], arrived[done:end], "received")
            if own is not None:
                done = own.to + own.rows
                if own.rows:
                    mine = self.input[own.first : own.first + own.rows]
                    copy(received[own.to : done], mine, "own rows")

    def pipelined(self) -> Event:
        """Torch matmuls per source and expert, by order of arrival, staged as in ``gather_matmul.py``."""
        communicator, input, routes = self.communicator, self.input, self.routes
        received, rank = self.received, communicator.rank
        inner, itemsize = input.shape[1], input.element_size()
        direct = communicator.place.direct_access
        staged_bytes = max(each[-1] for each in routes.firsts) * inner * itemsize
        layout = Layout(routes.world_size, staged_bytes, pulled=True)
        if received is None and not direct:
            received = input.new_empty(routes.received(rank), inner)

        def body(workspace: Workspace) -> None:
            stream, copying = communicator.compute, communicator.copying
            copying.wait_credits(workspace)
            staged: set[tuple[int, int]] = set()
            for step in range(1, routes.world_size):
                peer = (rank + step) % routes.world_size
                first, count = block = routes.block(rank, peer)
                if count and block not in staged:
                    shape = (count, inner)
                    mine = workspace.data(rank, first * inner * itemsize, shape, input.dtype)
                    copying.copy(mine, input[first : first + count], f"stage for rank {peer}")
                    staged.add(block)
                copying.publish(workspace, peer, rank)
            for source in routes.sources:
                if source != rank:
                    (stream if direct else copying).wait(workspace, source, source)
                for expert in routes.mine:
                    segment = expert[source]
                    if not segment.rows:
                        continue
                    rows = slice(segment.to, segment.to + segment.rows)
                    operand = input[segment.first : segment.first + segment.rows]
                    if source != rank:
                        begin = segment.first * inner * itemsize
                        operand = workspace.data(source, begin, (segment.rows, inner), input.dtype)
                        if not direct:
                            assert received is not None
                            copying.copy(received[rows], operand, f"rows of rank {source}")
                            stream.wait_event(copying.record())
                            operand = received[rows]
                    label = f"expert {segment.expert}, rows of rank {source}"
                    part = self._expert(segment.expert)
                    operands.enqueue_product(communicator, operand, part, rows, label)
                    if received is not None and (direct or source == rank):
                        stream.copy(received[rows], operand, "received")

        return communicator.enqueue(self.op, layout, body)

    def unfused(self) -> Event:
        """The collective, rows put in the order of experts, then one torch matmul per expert."""
        input, routes, received = self.input, self.routes, self.received
        stream, lone = self.communicator.compute, routes.world_size == 1
        # No op of the streams comes first, which would hold them until what is read here is there.
        stream.wait_event(self.communicator.place.record_current())
        if received is None:
            received = (
                input if lone else input.new_empty(routes.received(routes.rank), input.shape[1])
            )
        elif lone:
            stream.copy(received, input, "received")
        if not lone:
            arrived = self._by_source()
            begin = 0
            for source in range(routes.world_size):
                for expert in routes.mine:
                    segment = expert[source]
                    if segment.rows:
                        to = received[segment.to : segment.to + segment.rows]
                        theirs = arrived[begin : begin + segment.rows]
                        stream.copy(to, theirs, f"rows of rank {source}")
                        begin += segment.rows
        for index, (first, count) in enumerate(routes.expert_rows()):
            part, rows = self._expert(index), slice(first, first + count)
            label = f"expert {index}"
            operands.enqueue_product(self.communicator, received[rows], part, rows, label)
        return stream.record()

    def _by_source(self) -> torch.Tensor:
        """The rows that arrive, one source after another, each sorted by expert."""
        communicator, input, routes = self.communicator, self.input, self.routes
        rank, inner = routes.rank, input.shape[1]
        counts = [routes.block(source, rank)[1] for source in range(routes.world_size)]
        arrived = input.new_empty(sum(counts), inner)
        outputs = [part.view(-1) for part in torch.split(arrived, counts)]
        call = Call(self.op, (("rows", routes.counts), ("columns", inner), ("dtype", input.dtype)))
        flat = input.contiguous()
        if len(set(routes.blocks)) == 1:  # all experts everywhere: every rank's rows go to all
            event = communicator.engine.all_gather(call, outputs, flat.view(-1))
        else:
            sent = [routes.block(rank, peer)[1] for peer in range(routes.world_size)]
            inputs = [part.view(-1) for part in torch.split(flat, sent)]
            event = communicator.engine.all_to_all(call, outputs, inputs)
        if event is not None:
            communicator.compute.wait_event(event)
        return arrived
