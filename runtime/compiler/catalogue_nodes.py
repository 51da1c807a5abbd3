"""Entries of the catalogue: kernels between nodes, as tests run them, and linked with NVSHMEM.

Variants::

    stores        puts are stores: what the lint rules are about, without code that is not ours
    nvshmem       linked with ``libnvshmem_device.bc``: it must compile with no symbol left over. What
                  the library does with registers, stack and memory ordering is not judged
    bytes, bf16   of the moves: a flat tensor of bytes, or rows of bf16 for all-gather + matmul
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.nodes.nvshmem import LIBRARY
from interlace.runtime.algorithms import node_matmul_reduce, node_moves
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.compiler.catalogue_group import AbsentGroup, entry, launched, meta
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.compiler.request import Entry
from interlace.runtime.tuning.configuration import gpu_default

NODE_RANKS = 8
FORMS = {torch.uint8: "bytes", torch.bfloat16: "bf16"}
_ROWS = 4096
_ELEMENTS = 1 << 20


def between_nodes(arch: int, put: str = "stores") -> Iterator[Entry]:
    """The kernels of ``kernels/nodes``, with puts of this kind."""
    dtype = torch.bfloat16
    configuration = gpu_default(arch, dtype, _ROWS)
    whole, lengths = meta(NODE_RANKS * _ELEMENTS, dtype=dtype), [_ELEMENTS] * NODE_RANKS
    part, flat = whole[:_ELEMENTS], meta(_ELEMENTS, dtype=torch.uint8)
    matrix, rows = meta(_ROWS, _ROWS, dtype=dtype), [_ROWS] * NODE_RANKS
    every, segments = meta(sum(rows), _ROWS, dtype=dtype), formulas.segments_of(rows)
    linear = Linear(matrix, None, matrix)
    found: dict[str, Entry] = {}

    def run(group: Any) -> None:
        workspace, far = group.workspace(), node_moves.Partners(group)
        moves = node_moves.gather_moves(group, rows, _ROWS)
        for input in (flat, matrix):
            far.move(workspace, input, moves, 1, configuration)
        node_moves.reduce_scatter(group, whole, part, lengths, configuration, average=False)
        node_matmul_reduce.matmul_reduce_scatter(group, every, linear, segments, configuration)

    for launch in launched(run, group=AbsentGroup(NODE_RANKS, put=put)):
        made = entry(launch, put, arch)
        if made.kernel == "move_kernel":
            made = replace(made, variant=f"{put} {FORMS[launch.arguments['input'].ptr.dtype]}")
        found.setdefault(made.name, made)
    # the kernel that multiplies puts nothing, and is with those of one node
    return iter(each for each in found.values() if "PUT" in each.constants)


def linked(arch: int, folder: str | None = None) -> list[Entry]:
    """Entries between nodes, linked with what ``nvshmem_library`` finds, or PlaceUnavailableError."""
    library = {LIBRARY: device_library(arch, folder)}
    entries = between_nodes(arch, "nvshmem")
    return [replace(entry, libraries=library, default=False) for entry in entries]
