"""One rank of all_gather_matmul whose peers are played by the benchmark.

The rank's workspace is the real one, and so is the kernel. Data that peers would push is there already
(flags preset). Or it comes from pinned host memory, by the copy engine or by programs that read it over
PCIe. All peers' addresses are the rank's own, so code that plays a peer writes where a peer would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.groups.groups import default_group
from interlace.kernels import launch_formulas as formulas, signal, slots, transfer
from interlace.kernels.arguments import Peers, Table, Workspace
from interlace.kernels.matmul import all_gather_matmul, all_gather_matmul_roles as roles
from interlace.ops.collectives.launch import resident_programs
from interlace.ops.matmul.operands import (
    Linear,
    copies,
    epilogue,
    launch_options,
    may_have_roles,
    product,
    with_roles,
)
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.configuration import Configuration

WORD = 8
ALIGNMENT = 256
PRESET = 1 << 40
SENT_ELEMENTS = 1 << 14  # by one program at a time


@dataclass
class LoneRank:
    """Rank 0 of ``world_size``, in an op on ``[m, k] @ [k, n]`` of which it has ``m / world_size`` rows."""

    world_size: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    configuration: Configuration | None = None

    def __post_init__(self) -> None:
        if self.m % self.world_size:
            raise ValueError(f"m must be a multiple of world size {self.world_size}, got {self.m}")
        group = default_group()
        self.place, self.group = group.place, group
        self.device = group.place.device
        shard = self.m // self.world_size
        self.rows = [shard] * self.world_size
        if self.configuration is None:
            problem = tuning.gather_problem(self.world_size, self.dtype, shard, (self.n,), self.k)
            capability = configuration.capability_of(group.place)
            self.configuration = tuning.decide(capability, problem, None).configuration
        blocks = self.configuration
        self.chunk = formulas.chunk_rows(self.rows, blocks.block_m, blocks.chunks)
        self.slots = formulas.chunk_slots(self.rows, self.chunk)
        self.slot_offset = signal.HEADER_WORDS * WORD
        end = self.slot_offset + self.slots * WORD
        self.data_offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = self.data_offset + self.m * self.k * self.dtype.itemsize
        self.buffer = group.place.allocate(nbytes)
        own = self.buffer.peers[:1]
        self.peers = own.repeat(self.world_size).contiguous()
        offsets = self.slot_offset, self.data_offset
        self.workspace = Workspace(self.peers, 0, self.world_size, *offsets)
        header = self.buffer.view(0, 0, (signal.HEADER_WORDS,), torch.int64)
        header[signal.SPIN_LIMIT_WORD] = group.place.poll_limit()
        self.gathered = self.buffer.view(0, self.data_offset, (self.m, self.k), self.dtype)
        self.shard = torch.empty(shard, self.k, dtype=self.dtype, device=self.device)

    def preset(self) -> None:
        """Raise all flags, for every epoch to come."""
        self.buffer.view(0, self.slot_offset, (self.slots,), torch.int64).fill_(PRESET)

    def consumer(
        self, weight: torch.Tensor, output: torch.Tensor, *, waits: bool = True, copiers: int = 0
    ) -> KernelLaunch:
        """The matmul: shard in place, the rest from the workspace.

        ``waits=False``: every chunk counts as its own, and lies in ``gathered`` where the others do; it
        then waits for nothing. ``copiers`` are programs left free for somebody else.
        """
        blocks = self.configuration
        assert blocks is not None
        input = self.shard if waits else self.gathered
        linear = Linear(weight, None, output)
        tiles_n = formulas.ceil_div(self.n, blocks.block_n)
        lines = formulas.chunk_lines(
            0, self.world_size, self.rows, self.chunk, blocks.block_m, tiles_n
        )
        if not waits:
            lines = [[0, line[3], *line[2:]] for line in lines]
        tiles = formulas.tiles_of(self.rows, blocks.block_m, tiles_n)
        resident = resident_programs(self.group, blocks) - copiers
        kernel: Any = all_gather_matmul.all_gather_matmul_kernel
        arguments = {
            "workspace": self.workspace,
            **product(self.group, blocks, input, linear),
            **epilogue(linear),
            **copies(blocks, 0),
            "scale_offset": 0,
            "sends": Table(self._table([[0] * transfer.TRANSFER_COLUMNS]), 0),
            "chunks": Table(self._table(lines), len(lines)),
            "multicast": 0,
        }
        if may_have_roles(blocks, input, arguments):
            kernel, extents = roles.all_gather_matmul_roles_kernel, (len(input), self.m, tiles)
            arguments = with_roles(kernel, arguments, extents, blocks.num_stages)
        grid = formulas.persistent_grid(0, tiles, resident)
        return KernelLaunch(kernel, grid, arguments, "all_gather_matmul", **launch_options(blocks))

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        else:
            self.place.hold_current(self.group.compute.record(), "the benchmark")

    def _table(self, lines: Sequence[Sequence[int]]) -> torch.Tensor:
        flat = [number for line in lines for number in line]
        return torch.tensor(flat, dtype=torch.int64).to(self.device)

    # -- peers that send -----------------------------------------------------------------------

    def arrivals(self) -> list[formulas.Line]:
        """The peers' chunks in the order of arrival: lines as ``kernels/transfer.py`` has them."""
        return formulas.arrival_lines(0, self.world_size, self.rows, self.chunk, False)

    def copy_engine(
        self, host: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, KernelLaunch]]:
        """Return the work of a separate stream, per chunk: copy from, to, then launch to raise the flag.

        ``host`` is ``[m, k]`` in pinned memory.
        """
        steps = []
        for _, _, count, first, slot in self.arrivals():
            peers, byte = Peers(self.peers, 0, self.world_size), self.slot_offset + slot * WORD
            arguments = {"peers": peers, "peer": 0, "slot_byte": byte}
            flag = KernelLaunch(signal.publish_kernel, 1, arguments, "publish", num_warps=1)
            part = slice(first, first + count)
            steps.append((host[part], self.gathered[part], flag))
        return steps

    def copiers(self, host: torch.Tensor, programs: int) -> KernelLaunch:
        """Programs that read the peers' chunks from ``host``, over PCIe, and push them."""
        lines = [
            [0, first * self.k, count * self.k, first * self.k, slot]
            for _, _, count, first, slot in self.arrivals()
        ]
        return KernelLaunch(
            transfer.all_gather_kernel,
            programs,
            {
                "workspace": self.workspace,
                "input_ptr": host,
                "output_ptr": self.gathered,
                "sends": Table(self._table(lines), len(lines)),
                "arrivals": Table(self._table([[0] * transfer.TRANSFER_COLUMNS]), 0),
                "COPIERS": programs,
                "BLOCK": SENT_ELEMENTS,
            },
            "all_gather",
            num_warps=8,
        )

    def finish(self) -> KernelLaunch:
        peers = {"peers": Peers(self.peers, 0, self.world_size)}
        return KernelLaunch(slots.finish_kernel, 1, peers, "finish", num_warps=1)
