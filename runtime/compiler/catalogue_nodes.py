"""What is built of the kernels between nodes: as tests run them, and linked with NVSHMEM.

Variants::

    stores        puts are stores: what the lint rules are about, without code that is not ours
    nvshmem       linked with ``libnvshmem_device.bc``: it must compile with no symbol left over. What
                  the library does with registers, stack and memory ordering is not judged
    bytes, bf16   of the moves: a flat tensor of bytes, or rows of bf16 for all-gather + matmul
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from interlace.kernels.nodes.nvshmem import LIBRARY
from interlace.runtime.compiler.entry import Constant, Entry
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.tuning.configuration import gpu_default

_MODULE = "interlace.kernels.nodes.moves"
_FAR = {
    "peers_ptr": "*i64",
    "partners_ptr": "*i64",
    "num_partners": "i32",
    "rank": "i32",
    "world_size": "i32",
}
_WORKSPACE = {
    "peers_ptr": "*i64",
    "rank": "i32",
    "world_size": "i32",
    "slot_offset": "i32",
    "data_offset": "i32",
}
_ROWS = 4096


def between_nodes(arch: int, put: str = "stores") -> Iterator[Entry]:
    """The kernels of ``kernels/hierarchical*.py``, with puts of this kind."""
    yield _moves(arch, put, "bytes")
    yield _moves(arch, put, "bf16")
    yield Entry(
        _MODULE,
        "quiet_kernel",
        put,
        arch,
        {**_FAR, "slot_offset": "i32", "slot": "i32"},
        {"PUT": put},
        ("peers_ptr", "partners_ptr"),
        num_warps=1,
    )
    yield Entry(
        _MODULE,
        "put_credits_kernel",
        put,
        arch,
        _FAR,
        {"PUT": put},
        ("peers_ptr", "partners_ptr"),
        num_warps=1,
    )
    yield _reduce_scatter(arch, put)
    yield _tile_sums(arch, put)


def linked(arch: int, folder: str | None = None) -> list[Entry]:
    """The same, linked with the library that is found, see ``nvshmem_library``.

    Raises PlaceUnavailableError if there is none.
    """
    library = ((LIBRARY, device_library(arch, folder)),)
    return [
        replace(entry, libraries=library, default=False) for entry in between_nodes(arch, "nvshmem")
    ]


def _moves(arch: int, put: str, form: str) -> Entry:
    types = {**_WORKSPACE, "moves_ptr": "*i64", "num_moves": "i32"}
    divisible: tuple[str, ...] = ("peers_ptr", "data_offset", "moves_ptr", "input_ptr")
    configuration = gpu_default(arch, torch.bfloat16, _ROWS)
    constants: dict[str, Constant] = {"PUT": put}
    if form == "bytes":
        types["input_ptr"] = "*u8"
        constants |= {"columns": 1, "input_stride": 1, "BLOCK_ROWS": 0}
        constants["BLOCK_COLUMNS"] = configuration.block_elements
    else:
        types |= {"input_ptr": f"*{form}", "columns": "i32", "input_stride": "i32"}
        constants["BLOCK_ROWS"] = configuration.copy_rows
        constants["BLOCK_COLUMNS"] = configuration.copy_columns
        divisible += ("columns", "input_stride")
    return Entry(
        _MODULE,
        "move_kernel",
        f"{put} {form}",
        arch,
        types,
        constants,
        divisible,
        configuration.num_warps,
    )


def _reduce_scatter(arch: int, put: str) -> Entry:
    configuration = gpu_default(arch, torch.bfloat16, _ROWS)
    tables = ("parts_ptr", "duties_ptr", "members_ptr", "sums_ptr")
    counts = ("first_part", "num_parts", "num_duties", "num_members", "num_nodes")
    numbers = ("own_node", "own_member", "own_elements", "pieces", "landing_slot")
    multiples = ("piece", "stride", "partial_offset", "landing_offset")
    tensors = ("input_ptr", "output_ptr")
    return Entry(
        "interlace.kernels.nodes.reduction",
        "node_reduce_scatter_kernel",
        put,
        arch,
        {
            **_WORKSPACE,
            **dict.fromkeys(tensors, "*bf16"),
            **dict.fromkeys(tables, "*i64"),
            **dict.fromkeys((*counts, *numbers, *multiples), "i32"),
        },
        {"PUT": put, "BLOCK": configuration.block_elements, "AVERAGE": False},
        ("peers_ptr", "data_offset", *tensors, *tables, *multiples),
        configuration.num_warps,
    )


def _tile_sums(arch: int, put: str) -> Entry:
    """What runs beside the fused matmul + reduce-scatter; that kernel is with those of one node."""
    configuration = gpu_default(arch, torch.bfloat16, _ROWS)
    tables = ("duties_ptr", "members_ptr", "sums_ptr")
    counts = ("num_duties", "num_members", "num_nodes", "own_node", "own_rows", "tiles_each")
    multiples = ("stride", "N", "partial_offset", "landing_offset")
    return Entry(
        "interlace.kernels.nodes.matmul_reduce_scatter",
        "node_sums_kernel",
        put,
        arch,
        {
            **_WORKSPACE,
            "contribution_ptr": "*bf16",
            **dict.fromkeys(tables, "*i64"),
            **dict.fromkeys((*counts, "landing_slot", "landed_slot", *multiples), "i32"),
        },
        {
            "PUT": put,
            "BLOCK_M": configuration.block_m,
            "BLOCK_N": configuration.block_n,
            "GROUP_M": configuration.group_m,
            "BLOCK": configuration.block_elements,
        },
        ("peers_ptr", "data_offset", "contribution_ptr", *tables, *multiples),
        configuration.num_warps,
    )
