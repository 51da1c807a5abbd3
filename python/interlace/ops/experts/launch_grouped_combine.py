"""The launch side of grouped matmul + combine: products go home, and a token is the sum over its slots.

``fused``      one Triton kernel multiplies, sends and sums (``kernels/experts/grouped_matmul_combine.py``)
``pipelined``  torch matmuls for one home and expert each, straight into the home's workspace
``unfused``    a torch matmul per expert, then as combine does; any dtype, many nodes

The last two, and a call that was given splits, know the routing on the host; after a dispatch with a bound
of tokens the kernel reads it on the device.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Experts
from interlace.kernels.experts import grouped_matmul_combine as kernels
from interlace.ops.experts.launch_combine import Home, pipelined_home
from interlace.ops.experts.launch_dispatch import (
    HostRoutes,
    RowExchange,
    slot_rows,
    sorted_places,
)
from interlace.ops.matmul import operands
from interlace.ops.matmul.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
OP = "grouped_matmul_combine"


@dataclass(frozen=True)
class GroupedMatmulCombine:
    """One call. ``linear``: weights ``[E, K, N]`` and biases ``[E, N]``; its output is not looked at."""

    communicator: Communicator
    input: Tensor
    linear: Linear
    home: Home

    def _expert(self, expert: int, output: Tensor) -> Linear:
        bias = None if self.linear.bias is None else self.linear.bias[expert]
        return replace(self.linear, weight=self.linear.weight[expert], bias=bias, output=output)

    def host_segments(self, routes: HostRoutes) -> Tensor:
        """The segments' table of ``routes``, on the device."""
        counts = tuple(map(tuple, routes.counts.tolist()))
        key = ("segments of experts", self.communicator.rank, counts)
        lines = routes.segments(self.communicator.rank).view(-1, 3)
        return self.communicator.table(key, lines.tolist, passing=True)

    def tiles(self, routes: HostRoutes, configuration: Configuration) -> int:
        """Of the rank that has most."""
        tiles_n = formulas.ceil_div(self.home.output.shape[1], configuration.block_n)
        tiles = (routes.counts + configuration.block_m - 1) // configuration.block_m
        ranks = self.communicator.world_size
        return int(tiles.view(ranks, ranks, -1).sum((0, 2)).max()) * tiles_n

    def fused(
        self, segments: Tensor, most_home_rows: int, grid: int, configuration: Configuration
    ) -> Event:
        """``grid``: programs that may wait for each other, alike on all ranks."""
        communicator, linear, home = self.communicator, self.linear, self.home
        weight, world_size = linear.weight, communicator.world_size
        experts, topk = weight.shape[0], home.inverse.shape[1]
        if weight.stride(0) * weight.element_size() % operands.DESCRIPTOR_ALIGNMENT:
            configuration = replace(configuration, descriptors=False)
        first = Linear(weight[0], linear.bias, home.output)
        known = operands.product(communicator, configuration, self.input, first, published=True)
        del known["output_ptr"]
        # A tile is stored into every rank's memory in turn: a descriptor is for one place.
        # In parts, as every element that is stored has an address, besides the sums to add a bias to.
        parts = configuration.activated_parts
        # With 4 warps there are no registers for one loop of tiles and k: it spills on 10.0.
        flatten = known["TILES"].FLATTEN and configuration.num_warps > 4
        tiles = known["TILES"]._replace(OUT_DESCRIPTOR=False, SUBTILE=parts, FLATTEN=flatten)
        slots = slot_rows(
            configuration,
            home.output.element_size(),
            topk,
            experts,
            scaled=False,
            weighted=home.weights is not None,
        )
        arguments: dict[str, Any] = {
            **known,
            "weight": Experts(weight, *weight.stride()),
            "bias_ptr": operands.bias_or_none(first),
            "segments_ptr": segments,
            "combined": home.combined(),
            "num_experts": experts,
            "SLOTS": slots,
            "TILES": tiles,
        }
        row_bytes = home.output.shape[1] * home.output.element_size()
        layout = Layout(world_size * grid, most_home_rows * row_bytes)
        options = operands.launch_options(configuration, self.input)

        def body(workspace: Workspace) -> None:
            kernel = kernels.grouped_matmul_combine_kernel
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
            home.keep(communicator, workspace)

        return communicator.enqueue(OP, layout, body)

    def pipelined(self, routes: HostRoutes) -> Event:
        stream = self.communicator.compute

        def put(theirs: Tensor, expert: int, rows: slice, label: str) -> None:
            part = self._expert(expert, theirs)
            about = theirs, self.input[rows], part.weight, part.bias
            stream.call(partial(operands.multiply, *about), label)

        return pipelined_home(self.communicator, OP, routes, self.home, put)

    def unfused(self, routes: HostRoutes) -> Event:
        communicator, input = self.communicator, self.input
        segments = routes.segments(communicator.rank)
        columns, dtype = self.home.output.shape[1], self.home.output.dtype
        product = input.new_empty(input.shape[0], columns, dtype=dtype)
        order = sorted_places(segments).to(input.device)
        # No op of the streams comes first, which would hold them until what is read here is there.
        communicator.compute.wait_event(communicator.place.record_current())
        for expert, line in enumerate(segments.tolist()):
            rows = slice(line[0][0], line[-1][0] + line[-1][1])
            part = self._expert(expert, product)
            operands.enqueue_product(communicator, input[rows], part, rows, f"expert {expert}")
        exchange = RowExchange(communicator, routes.counts, routes.assignment.per_rank)
        self.home.sum_rows(communicator, exchange.back(product, order))
        return communicator.compute.record()
