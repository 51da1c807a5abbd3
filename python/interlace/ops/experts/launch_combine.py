"""The launch side of combine: rows go home, and a token is the sum over its slots.

``fused``      one Triton kernel (``kernels/experts/combine.py``)
``pipelined``  rows are copied straight into the workspace of their home, rank by rank; torch sums
``unfused``    rows put in the order of their homes, an all-to-all, torch sums; many nodes

The last two take any dtype, and need counts on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Combined, ExpertSizes, Rows
from interlace.kernels.experts import combine as kernels
from interlace.kernels.tiling import owner_order
from interlace.ops.collectives import launch as plain
from interlace.ops.experts.launch_dispatch import (
    MAX_REGISTERS,
    Bounds,
    HostRoutes,
    RowExchange,
    slot_rows,
    sorted_places,
)
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor


def sum_slots(home: Tensor, inverse: Tensor, weights: Tensor | None, output: Tensor) -> None:
    """``output[t]`` = sum over slots k, in their order, of ``weights[t, k] * home[inverse[t, k]]``."""
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    total = torch.zeros(output.shape, dtype=wide, device=output.device)
    if home.shape[0]:
        for slot in range(inverse.shape[1]):
            row = inverse[:, slot]
            value = home[row.clamp(min=0)].to(wide)
            if weights is not None:
                value = value * weights[:, slot, None].to(wide)
            total += torch.where(row[:, None] < 0, 0.0, value)
    output.copy_(total)


@dataclass(frozen=True)
class Home:
    """A rank's tokens as rows come back to them: ``inverse`` ``[T, k]``, ``weights`` of slots or None.

    ``output`` ``[T, N]`` gets the sums, ``kept``, if it is there, the rows themselves, ``[T * k, N]``, of
    which as many are of use as there are.
    """

    inverse: Tensor
    weights: Tensor | None
    output: Tensor
    kept: Tensor | None = None

    def combined(self) -> Combined:
        weights = self.output if self.weights is None else self.weights
        return Combined(self.inverse, weights, self.output, self.output.shape[0])

    def sum_rows(self, communicator: Communicator, home: Tensor) -> None:
        """Sums of the rows that have come, by torch."""

        def sums() -> None:
            sum_slots(home, self.inverse, self.weights, self.output)

        if self.kept is not None and home.numel():
            communicator.compute.copy(self.kept[: home.shape[0]], home, "rows at home")
        communicator.compute.call(sums, "sums by slot")

    def keep(self, communicator: Communicator, workspace: Workspace) -> None:
        """Copy the rows that a kernel has waited for."""
        if self.kept is not None and self.kept.numel():
            home = workspace.data(communicator.rank, 0, self.kept.shape, self.kept.dtype)
            communicator.compute.copy(self.kept, home, "rows at home")


@dataclass(frozen=True)
class Combine:
    """One call: ``rows`` ``[R, N]`` as a dispatch has sorted them."""

    communicator: Communicator
    rows: Tensor
    home: Home

    def fused(self, segments: Tensor, bounds: Bounds, configuration: Configuration) -> Event:
        """``segments``: those that the dispatch has found."""
        communicator = self.communicator
        experts, world_size, _ = segments.shape
        (_, topk), columns = self.home.inverse.shape, self.rows.shape[1]
        slots = slot_rows(
            configuration,
            self.rows.element_size(),
            topk,
            experts,
            scaled=False,
            weighted=self.home.weights is not None,
        )
        row_bytes = columns * self.rows.element_size()
        layout = Layout(world_size * bounds.senders, bounds.most_tokens * topk * row_bytes)
        arguments: dict[str, Any] = {
            "rows": Rows(self.rows, self.rows.stride(0)),
            "segments_ptr": segments,
            "combined": self.home.combined(),
            "sizes": ExpertSizes(
                0, bounds.most_tokens, experts, bounds.senders, bounds.expert_rows
            ),
            "N": columns,
            "SLOTS": slots,
        }
        grid = formulas.persistent_grid(
            0, world_size * bounds.senders, communicator.place.program_limit
        )
        own = {"options": {"maxnreg": MAX_REGISTERS}}
        options: dict[str, Any] = {"num_warps": configuration.num_warps, "num_stages": 1, **own}

        def body(workspace: Workspace) -> None:
            launch = workspace.kernel_launch(kernels.combine_kernel, grid, arguments, **options)
            communicator.compute.launch(launch)
            self.home.keep(communicator, workspace)

        return communicator.enqueue("combine", layout, body)

    def pipelined(self, routes: HostRoutes) -> Event:
        def put(theirs: Tensor, expert: int, rows: slice, label: str) -> None:
            self.communicator.compute.copy(theirs, self.rows[rows], label)

        return pipelined_home(self.communicator, "combine", routes, self.home, put)

    def unfused(self, routes: HostRoutes) -> Event:
        order = sorted_places(routes.segments(self.communicator.rank)).to(self.rows.device)
        exchange = RowExchange(self.communicator, routes.counts, routes.assignment.per_rank)
        back = exchange.back(self.rows, order)
        self.home.sum_rows(self.communicator, back)
        return self.communicator.compute.record()


def pipelined_home(
    communicator: Communicator,
    op: str,
    routes: HostRoutes,
    home: Home,
    put: Callable[[Tensor, int, slice, str], None],
) -> Event:
    """Rows go home, the next rank's first and the own ones last; then sums.

    ``put(theirs, expert, rows, label)`` brings ``rows`` of an expert to ``theirs``, on the compute stream.
    """
    rank, world_size = communicator.rank, communicator.world_size
    columns, dtype = home.output.shape[1], home.output.dtype
    row_bytes = columns * dtype.itemsize
    layout = Layout(world_size, int(routes.counts.sum(1).max()) * row_bytes)
    own = int(routes.counts[rank].sum())

    def body(workspace: Workspace) -> None:
        stream = communicator.compute
        stream.wait_credits(workspace)
        segments = routes.segments(rank).tolist()
        for peer in owner_order(rank, world_size):
            for expert, line in enumerate(segments):
                first, count, to = line[peer]
                if count:
                    theirs = workspace.data(peer, to * row_bytes, (count, columns), dtype)
                    label = f"expert {expert}, rows of rank {peer}"
                    put(theirs, expert, slice(first, first + count), label)
            if peer != rank:
                stream.publish(workspace, peer, rank)
        plain.wait_for_all(communicator, workspace, 0)
        home.sum_rows(communicator, workspace.data(rank, 0, (own, columns), dtype))

    return communicator.enqueue(op, layout, body)
