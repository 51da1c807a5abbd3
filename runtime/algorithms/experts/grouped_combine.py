"""The launch side of grouped matmul + combine: products go home, and a token is the sum over its slots.

``fused``      one Triton kernel multiplies, sends and sums (``kernels/fused/grouped_matmul_combine.py``)
``pipelined``  torch matmuls for one home and expert each, straight into the home's workspace
``unfused``    a torch matmul per expert, then as combine does; any dtype, many nodes

Routing is known on the host, as of the grouped matmul that comes before.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Experts
from interlace.kernels.fused import grouped_matmul_combine as kernels
from interlace.kernels.tiling import owner_order
from interlace.runtime.algorithms import operands, plain
from interlace.runtime.algorithms.experts.assignment import known_segments
from interlace.runtime.algorithms.experts.combine import Home
from interlace.runtime.algorithms.experts.dispatch import RowExchange, slot_rows, sorted_places
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
OP = "grouped_matmul_combine"


@dataclass(frozen=True)
class GroupedMatmulCombine:
    """One call. ``counts``: ``[W, experts]``, on the CPU: the rows that each rank has for each expert.

    ``linear``: the weights ``[E, K, N]`` and biases ``[E, N]``; its output is not looked at.
    """

    communicator: Communicator
    input: Tensor
    linear: Linear
    counts: Tensor
    home: Home

    @property
    def _experts(self) -> int:
        return self.linear.weight.shape[0]

    def _segments(self) -> Tensor:
        return known_segments(self.counts, self.communicator.rank, self._experts)

    def _row_bytes(self) -> int:
        return self.home.output.shape[1] * self.home.output.element_size()

    def _expert(self, expert: int, output: Tensor) -> Linear:
        bias = None if self.linear.bias is None else self.linear.bias[expert]
        return replace(self.linear, weight=self.linear.weight[expert], bias=bias, output=output)

    def most_home_rows(self) -> int:
        return int(self.counts.sum(1).max())

    def _tiles(self, configuration: Configuration) -> int:
        """Of the rank that has most."""
        tiles_n = formulas.ceil_div(self.home.output.shape[1], configuration.block_n)
        ranks = self.communicator.world_size
        tiles = (self.counts + configuration.block_m - 1) // configuration.block_m
        return int(tiles.view(-1, ranks, self._experts).sum((0, 2)).max()) * tiles_n

    def fused(self, configuration: Configuration, resident: int) -> Event:
        """``resident``: programs that may wait for each other, alike on all ranks."""
        communicator, linear, home = self.communicator, self.linear, self.home
        weight, world_size = linear.weight, communicator.world_size
        topk = home.inverse.shape[1]
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
        counts = tuple(map(tuple, self.counts.tolist()))
        key = ("segments of experts", communicator.rank, counts, self._experts)
        segments = communicator.table(
            key, lambda: self._segments().view(-1, 3).tolist(), passing=True
        )
        slots = slot_rows(
            configuration, topk, self._experts, scaled=False, weighted=home.weights is not None
        )
        arguments: dict[str, Any] = {
            **known,
            "weight": Experts(weight, *weight.stride()),
            "bias_ptr": operands.bias_or_none(first),
            "segments_ptr": segments,
            "combined": home.combined(),
            "num_experts": self._experts,
            "SLOTS": slots,
            "TILES": tiles,
        }
        grid = formulas.persistent_grid(0, self._tiles(configuration), resident)
        layout = Layout(world_size * grid, self.most_home_rows() * self._row_bytes())
        options = operands.launch_options(configuration)

        def body(workspace: Workspace) -> None:
            kernel = kernels.grouped_matmul_combine_kernel
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, arguments, **options))
            home.keep(communicator, workspace)

        return communicator.enqueue(OP, layout, body)

    def pipelined(self) -> Event:
        communicator, home = self.communicator, self.home
        rank, world_size = communicator.rank, communicator.world_size
        columns, dtype = home.output.shape[1], home.output.dtype
        layout = Layout(world_size, self.most_home_rows() * self._row_bytes())
        own = int(self.counts[rank].sum())

        def body(workspace: Workspace) -> None:
            stream = communicator.compute
            stream.wait_credits(workspace)
            segments = self._segments().tolist()
            for peer in owner_order(rank, world_size):
                for expert, line in enumerate(segments):
                    first, count, to = line[peer]
                    if not count:
                        continue
                    shape = (count, columns)
                    theirs = workspace.data(peer, to * self._row_bytes(), shape, dtype)
                    part = self._expert(expert, theirs)
                    about = theirs, self.input[first : first + count], part.weight, part.bias
                    label = f"expert {expert}, rows of rank {peer}"
                    stream.call(partial(operands.multiply, *about), label)
                if peer != rank:
                    stream.publish(workspace, peer, rank)
            plain.wait_for_all(communicator, workspace, 0)
            home.sum_rows(communicator, workspace.data(rank, 0, (own, columns), dtype))

        return communicator.enqueue(OP, layout, body)

    def unfused(self) -> Event:
        communicator, input = self.communicator, self.input
        segments = self._segments()
        product = input.new_empty(
            input.shape[0], self.home.output.shape[1], dtype=self.home.output.dtype
        )
        order = sorted_places(segments).to(input.device)
        # No op of the streams comes first, which would hold them until what is read here is there.
        communicator.compute.wait_event(communicator.place.record_current())
        for expert, line in enumerate(segments.tolist()):
            rows = slice(line[0][0], line[-1][0] + line[-1][1])
            part = self._expert(expert, product)
            operands.enqueue_product(communicator, input[rows], part, rows, f"expert {expert}")
        exchange = RowExchange(communicator, self.counts, self._experts)
        self.home.sum_rows(communicator, exchange.back(product, order))
        return communicator.compute.record()
