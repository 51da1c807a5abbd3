"""All cases of ``interlace check``, the most telling first, and the kernels that they run."""

from collections.abc import Iterable

from interlace.cli.check.case import CheckCase
from interlace.cli.check.dense import dense, roles, signals
from interlace.cli.check.rows import branches, rows
from interlace.cli.check.scaled import scaled
from interlace.cli.check.simulated import simulated
from interlace.tools.catalogue.catalogue import ARCHES, entries

WORLDS = {"cpu": (1, 2, 3, 4), "cuda": (1, 2, 4, 7)}
NODES_RANKS = 4  # two nodes of two
_BETWEEN = (
    "move_kernel", "quiet_kernel", "node_reduce_scatter_kernel", "put_credits_kernel", "node_sums_kernel",
    "matmul_node_reduce_scatter_kernel",
)  # fmt: skip
_HANDLES = (
    "put_signal_kernel", "wait_signal_kernel", "handle_barrier_kernel", "write_value_kernel",
)  # fmt: skip
_ROLES = "all_gather_matmul_roles_kernel", "matmul_reduce_scatter_roles_kernel", "sum_tiles_kernel"
WITHOUT = {
    "cpu": dict.fromkeys(_ROLES, "is for a GPU of 9.x"),
    "cuda": dict.fromkeys(_BETWEEN, "runs between nodes: one GPU has one")
    | dict.fromkeys(_HANDLES, "is of handles on a CPU: on a GPU they are torch's own"),
}
"""By device, why there is no case of a kernel."""


def every_kernel() -> list[str]:
    """The kernels of the catalogue, in its order."""
    return list(dict.fromkeys(each.kernel for arch in ARCHES for each in entries(arch)))


def most_telling_first(cases: Iterable[CheckCase]) -> list[CheckCase]:
    """First a case for each kernel on each number of ranks, then the others in the order that they have.

    A branch of a kernel counts as another one: of fp8 operands, for instance, products are other
    instructions.
    """
    seen: set[tuple[int, str, str]] = set()
    first: list[CheckCase] = []
    rest: list[CheckCase] = []
    for case in cases:
        runs = {(case.world_size, case.branch, kernel) for kernel in case.kernels}
        (first if runs - seen else rest).append(case)
        seen |= runs
    return first + rest


def cases(device: str, *, has_roles: bool = True) -> list[CheckCase]:
    """The cases to check; ``has_roles``: whether the device is one of 9.x, as far as that is known."""
    found: list[CheckCase] = []
    for world_size in WORLDS[device]:
        found += dense(device, world_size)
        if world_size <= 4:  # heads and rows are shared out evenly
            found += rows(device, world_size)
            found += scaled(device, world_size)
        if device == "cuda" and world_size > 1:
            found += signals(world_size)
        if device == "cuda" and has_roles:
            found += roles(world_size, (2048, 1024, 512), "bf16")
        if device == "cpu" and world_size == NODES_RANKS:
            found += simulated(world_size)
        if world_size <= 4:
            found += branches(device, world_size)
    return most_telling_first(found)


def listed(device: str) -> dict[str, list[str]]:
    """By kernel of the catalogue, the titles of the cases that run it, or why there is none."""
    titles: dict[str, list[str]] = {kernel: [] for kernel in every_kernel()}
    for case in cases(device):
        for kernel in case.kernels:
            titles[kernel].append(case.title)
    why = WITHOUT[device]
    return {name: found or [why.get(name, "no case runs it")] for name, found in titles.items()}
