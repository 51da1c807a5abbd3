"""Kernels whose warps have roles: their logic by an emulator, and when they are launched with what."""

import inspect
import pathlib
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Extents, Table
from interlace.kernels.matmul import matmul_reduce_scatter_roles
from interlace.kernels.tiling import grouped_tile
from interlace.ops.matmul import launch_gather as gather_matmul, launch_reduce as matmul_reduce
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning import table
from interlace.runtime.tuning.configuration import Configuration, shared_needed, without_effect
from interlace.tools.catalogue.absent_group import RANKS, AbsentGroup, launches_of
from interlace.tools.catalogue.catalogue import BY_ENGINE, ROLES, MatmulVariant, scatters
from interlace.verify import races
from mutants.mutations import Edit, Mutant, mutant_of, mutated
from ranks import ranks
from stand_ins.fake_gluon import BLOCK_M, BLOCK_N, TILES, DeadlockError, Pointer, Program, text_of

RANK, ROWS, COLUMNS, INNER = 1, [40, 33, 20], 80, 40
TOTAL, TILES_N = sum(ROWS), formulas.ceil_div(COLUMNS, BLOCK_N)


class Case(SimpleNamespace):
    """No extent is a multiple of a block."""

    def __init__(self, seed: int, layout: str, parts: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        rows = torch.randint(-4, 5, (TOTAL, INNER), generator=numbers).float()
        weight = torch.randint(-4, 5, (INNER, COLUMNS), generator=numbers).float()
        stored = (weight.T.contiguous() if layout == "nk" else weight).view(-1)
        tiles = formulas.tiles_of(ROWS, BLOCK_M, TILES_N)
        super().__init__(
            rows=rows,
            wanted=rows @ weight,
            weight=SimpleNamespace(ptr=Pointer(stored), stride_k=COLUMNS, stride_n=INNER),
            extents=Extents(ROWS[RANK], TOTAL, tiles),
            # N, K, STAGES and TILES
            rest=(COLUMNS, INNER, 3, TILES._replace(DESCRIPTORS=layout, SUBTILE=parts)),
        )

    def input(self, rows: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(ptr=Pointer(rows.reshape(-1)), stride=INNER)


def gathers(text: str, seed: int, layout: str = "kn", parts: int = 2, programs: int = 2) -> bool:
    """Return whether all programs together compute torch's result."""
    case = Case(seed, layout, parts)
    size = formulas.chunk_rows(ROWS, BLOCK_M, 2)
    lines = formulas.chunk_lines(RANK, 3, ROWS, size, BLOCK_M, TILES_N)
    chunks = Table(Pointer(torch.tensor(lines).view(-1)), len(lines))
    output = torch.full((TOTAL + BLOCK_M, COLUMNS), torch.nan)
    own = case.input(case.rows[ROWS[0] : ROWS[0] + ROWS[1]].clone())
    workspace = SimpleNamespace(rank=RANK, slot_offset=0)
    for number in range(programs):
        program, arrived = Program(seed, number, programs), set()
        gathered = torch.full_like(case.rows, torch.nan)

        def arrive(slot: int, rows: slice, to: Any = gathered, arrived: Any = arrived) -> None:
            to[rows] = case.rows[rows]
            arrived.add(slot)

        for source, _, count, row, slot, _ in lines:
            if source != RANK:
                chunk = slot, slice(row, row + count)
                program.scheduler.rare.append(lambda chunk=chunk, arrive=arrive: arrive(*chunk))

        def wait(
            w: Any, source: int, slot: int, epoch: int, by: Any = program, arrived: Any = arrived
        ) -> None:
            by.scheduler.until(lambda: int(slot) // 8 in arrived)

        known = {
            "_CHUNK": 6,
            "data_pointer": lambda *of, gathered=gathered: Pointer(gathered.view(-1)),
            "fence_descriptor_loads": lambda compiled: None,
            "wait": wait,
        }
        c_ptr = Pointer(output.view(-1))
        arguments = workspace, own, case.weight, c_ptr, chunks, case.extents, *case.rest
        program.run(text, "all_gather_matmul_roles_kernel", known, *arguments)
    return torch.equal(output[:TOTAL], case.wanted) and bool(output[TOTAL:].isnan().all())


class Owners:
    """The owners' regions and slots. ``lost`` gives no credit, so that waits for it time out."""

    def __init__(self, wanted: torch.Tensor, lost: int | None) -> None:
        self.wanted, self.lost = wanted.split(ROWS), lost
        self.regions = [torch.full((3, rows, COLUMNS), torch.nan) for rows in ROWS]
        self.published: list[tuple[int, int, bool]] = []

    def known(self, program: Program) -> dict[str, Any]:
        """Return replacements for functions of ``signal.py`` and ``transfer.py`` in a program."""
        credits: set[int] = set()
        before = [region.clone() for region in self.regions]

        def give_credit(owner: int) -> None:
            # until now the owner has read what is there
            assert self.regions[owner].allclose(before[owner], 0, 0, equal_nan=True)
            credits.add(owner)

        for owner in (2, 0, 1):
            program.scheduler.rare.append(lambda owner=owner: give_credit(owner))

        def wait_credit(workspace: Any, owner: Any, epoch: int) -> int:
            program.scheduler.until(lambda: int(owner) in credits)
            return epoch - 2 if int(owner) == self.lost else epoch - 1

        return {
            "_SEGMENT": 4,
            "wait_credit": wait_credit,
            "data_pointer": lambda w, owner, like: Pointer(self.regions[int(owner)].view(-1)),
            "complete_descriptor_stores": program.complete_stores,
            "peer_pointer": lambda workspace, owner, byte: (int(owner), byte // 8),
            "_TOGETHER": 3,
            "publish_slots": self.publish_slots,
        }

    def publish_slots(
        self, slots: tuple[int, torch.Tensor], valid: torch.Tensor, epoch: int
    ) -> None:
        owner, numbers = slots
        for number in numbers[valid].tolist():
            self.publish(owner, number)

    def publish(self, owner: int, number: int) -> None:
        """From now on the owner may read the tile."""
        tiles_m = formulas.ceil_div(ROWS[owner], BLOCK_M)
        source, tile = divmod(number, tiles_m * TILES_N)
        m, n = grouped_tile.fn(tile, tiles_m, TILES_N, 2)
        block = slice(m * BLOCK_M, (m + 1) * BLOCK_M), slice(n * BLOCK_N, (n + 1) * BLOCK_N)
        arrived = torch.equal(self.regions[owner][source][block], self.wanted[owner][block])
        self.published.append((owner, number, arrived))

    def right(self) -> bool:
        """Return whether every tile is at its place, was published before, and nothing else has come."""
        slots, places = [], []
        for owner, region in enumerate(self.regions):
            tiles = formulas.tiles_of([ROWS[owner]], BLOCK_M, TILES_N)
            of_others = torch.cat([region[:RANK], region[RANK + 1 :]])
            if owner == self.lost:
                places.append(bool(region.isnan().all()))
                continue
            slots += [(owner, RANK * tiles + tile, True) for tile in range(tiles)]
            places += [torch.equal(region[RANK], self.wanted[owner])]
            places += [bool(of_others.isnan().all())]
        return all(places) and sorted(self.published) == slots


def scattered(text: str, seed: int, layout: str = "kn", parts: int = 2, programs: int = 2) -> bool:
    """Return whether owners get torch's result; in every other call one of them gives no credit."""
    case = Case(seed, layout, parts)
    owners = Owners(case.wanted, (None, 2)[seed % 2])
    segments = formulas.segments_of(ROWS)
    lines = formulas.segment_lines(RANK, 3, segments, BLOCK_M, TILES_N)
    table = Pointer(torch.tensor(lines).view(-1))
    workspace = SimpleNamespace(rank=RANK, slot_offset=0, world_size=3)
    for number in range(programs):
        program = Program(seed, number, programs)
        arguments = workspace, case.input(case.rows), case.weight, Pointer(torch.empty(0)), table
        known = owners.known(program)
        name = "matmul_reduce_scatter_roles_kernel"
        program.run(text, name, known, *arguments, case.extents, *case.rest)
    return owners.right()


RIGHT: dict[str, Callable[..., bool]] = {
    "all_gather_matmul": gathers,
    "matmul_reduce_scatter": scattered,
}


@pytest.mark.parametrize("op", RIGHT)
@pytest.mark.parametrize("programs", [1, 5, 40])
@pytest.mark.parametrize(("layout", "parts"), [("kn", 2), ("nk", 1), ("kn", 4)])
def test_every_order_gives_the_product(op: str, layout: str, parts: int, programs: int) -> None:
    text = text_of(op)
    for seed in range(4 if programs < 40 else 2):
        assert RIGHT[op](text, seed, layout, parts, programs), seed


COMPLETE = r" +complete_descriptor_stores\(.*\n"
MUTANTS = {
    "a place given free while a product reads it": (r"mma_wait\(1,", "mma_wait(2,"),
    "a part given free while it is stored": (r" +tma.store_wait\(0\)\n", ""),
    "loads wait for the wrong round": (r"(ring.empty.index\(place\), phase) \^ 1", r"\1"),
    "products do not wait for loads": (r" +mbarrier.wait\(ring.full.*\n", ""),
    "a part is overwritten before it is stored": (r" +mbarrier.wait\(output.empty.*\n", ""),
    "rows of the next part are stored": (r"\[rows, N\], \[N, 1\]", "[rows + 9, N], [N, 1]"),
    "sums go on from tile to tile": (r"use_acc=k > 0", "use_acc=True"),
}
OF_ONE = {
    "all_gather_matmul": {
        "the wait for a chunk is missing": (r"                wait\(.*\n", ""),
        "the descriptor made anew for every chunk": (
            r"row = gl.load\(line \+ 3\)\n",
            "row = gl.load(line + 3) * 0\n"
            "                base = data_pointer(workspace, 0, input.ptr) + gl.load(line + 3) * K\n"
            "                gathered = tma.make_tensor_descriptor("
            "base, [rows, K], [K, 1], BLOCK, LAYOUT)\n",
        ),
    },
    "matmul_reduce_scatter": {
        "published while stores are under way": (COMPLETE, ""),
        "published when stores have read": (COMPLETE, "            tma.store_wait(0)\n"),
        "the wait for credit is missing": (r"free = wait_credit.*", "free = True"),
        "stored though given up": (r"if free:\n( +column)", r"if True:\n\1"),
        "published though given up": (r"if free:\n( +for)", r"if True:\n\1"),
        "a dropped part keeps its place": (r"( +)(mbarrier.arrive\(output.empty)", r"\1    \2"),
        "one region for all sources": (r" \* rank \* N", ""),
        "slots of another source": (r"\(rank \* tiles_m", "((rank + 1) * tiles_m"),
    },
}
FAULTS = [
    (op, name, *edit) for op, more in OF_ONE.items() for name, edit in (MUTANTS | more).items()
]


@pytest.mark.parametrize(
    ("op", "name", "pattern", "new"), FAULTS, ids=[" ".join(fault[:2]) for fault in FAULTS]
)
def test_a_fault_is_found(op: str, name: str, pattern: str, new: str) -> None:
    text, changed = re.subn(pattern, new, text_of(op))
    assert changed == 1

    def found(seed: int) -> bool:
        try:
            return not RIGHT[op](text, seed, programs=1)
        except (DeadlockError, AssertionError):
            return True

    assert any(found(seed) for seed in range(8))


def launch(operands: MatmulVariant, dtype: Any = None, **overrides: int) -> KernelLaunch:
    """Return the launch of all-gather + matmul on sm_90 with these values of the configuration.

    ``dtype``: of the output, if it is not the operands'.
    """
    operands = replace(operands, overrides={**BY_ENGINE, **overrides})
    input, linear = operands.tensors(operands.rows)
    linear.output = linear.output.to(dtype or linear.output.dtype)
    group, rows = AbsentGroup(), [operands.rows] * RANKS
    op = gather_matmul.all_gather_matmul_fused
    (made,) = launches_of(op, input, [linear], rows, None, operands.configuration(90), group=group)
    return made


def test_it_is_launched_with_the_same_arguments() -> None:
    # in two parts, which this kernel takes at least
    two = {"epilogue_subtile": 2}
    reference, roles = (
        launch(MatmulVariant(), **two),
        launch(MatmulVariant(), **two, warp_roles=True),
    )
    alone = launch(MatmulVariant(), warp_roles=True)
    assert alone.arguments["TILES"] == roles.arguments["TILES"]
    assert (reference.name, roles.name) == (
        "all_gather_matmul_kernel",
        "all_gather_matmul_roles_kernel",
    )
    assert (roles.grid, roles.num_warps) == (reference.grid, reference.num_warps)
    own = {name: roles.arguments[name] for name in ("extents", "STAGES")}
    assert own == {"extents": Extents(4096, RANKS * 4096, RANKS * 32 * 16), "STAGES": 3}
    shared = {name: value for name, value in roles.arguments.items() if name not in own}
    assert shared.keys() == {*inspect.signature(roles.kernel.fn).parameters} - own.keys()
    for name, value in shared.items():
        assert repr(value) == repr(reference.arguments[name]), name


def test_products_and_sums_are_launched_with_the_same_arguments() -> None:
    operands = MatmulVariant(bias="n", activation="gelu", overrides={"epilogue_subtile": 2})
    (reference,) = scatters(90, operands)
    products, sums = scatters(90, replace(operands, overrides=operands.overrides | ROLES))
    assert products.name == "matmul_reduce_scatter_roles_kernel"
    assert sums.name == "sum_tiles_kernel" and sums.options == {"maxnreg": 128}
    assert (products.grid, sums.grid) == (reference.grid, 32 * 16)
    known = reference.arguments
    own = {
        "extents": Extents(4096, RANKS * 4096, RANKS * 32 * 16),
        "STAGES": 3,
        # tiles of the sum, not of its terms
        "TILES": known["TILES"]._replace(BIAS="", ACTIVATION=""),
    }
    for made, more in (products, own), (sums, {}):
        assert made.num_warps == reference.num_warps
        assert made.arguments.keys() == {*inspect.signature(made.kernel.fn).parameters}
        for name, value in made.arguments.items():
            assert repr(value) == repr((known | more)[name]), name


def test_an_output_of_more_bits_is_for_the_reference() -> None:
    assert launch(MatmulVariant(), torch.float16, warp_roles=True).name.endswith("roles_kernel")
    assert (
        launch(MatmulVariant(), torch.float32, warp_roles=True).name == "all_gather_matmul_kernel"
    )


@pytest.mark.parametrize(
    ("operands", "overrides"),
    [
        ({"bias": "n"}, {}),
        ({"dtype": "fp8e4nv", "weight": "nk", "scales": "row"}, {}),
        ({"dtype": "fp32"}, {"descriptors": True}),
        ({"path": "pointers"}, {}),
        ({}, {"copiers": 8}),
        ({}, {"num_warps": 4}),
        ({}, {"output_descriptors": False}),
    ],
)
def test_where_it_cannot_be_the_reference_runs(
    operands: dict[str, Any], overrides: dict[str, int]
) -> None:
    made = launch(MatmulVariant(**operands), warp_roles=True, **overrides)
    assert made.name == "all_gather_matmul_kernel"
    given = MatmulVariant(**operands, overrides={"warp_roles": True, **overrides})
    # which sums with a bias, and has no copiers
    taken = "copiers" in overrides or operands == {"bias": "n"}
    assert (scatters(90, given)[0].name == "matmul_reduce_scatter_kernel") != taken


def test_it_is_for_one_architecture_and_never_the_default() -> None:
    assert without_effect(Configuration(warp_roles=True), 100)
    assert not without_effect(Configuration(warp_roles=True), 90)
    assert not any("warp_roles" in tile.values for tile in table.TILES)
    assert not any("warp_roles" in shape.values for shape in table.SHAPES)


@ranks(2, place="sim")
def test_simulated_ranks_run_the_reference() -> None:
    with interlace.configured(warp_roles=True, copiers=0):
        result = interlace.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 16))
    assert torch.equal(result, torch.full((4, 16), 16.0))


ALONE = mutant_of(
    "kernels/matmul/matmul_reduce_scatter.py",
    "products alone",
    (
        "epoch, epilogue.bias_ptr, output_ptr, own_tiles_m, own_rows,",
        "epoch, epilogue.bias_ptr, output_ptr, 0, own_rows,",
    ),
)
UNWAITED = replace(
    ALONE,
    name="sums that wait for nobody",
    edits=(*ALONE.edits, Edit("        wait_sources(", "        # wait_sources(")),
)


@pytest.mark.parametrize("mutant", [ALONE, UNWAITED], ids=lambda mutant: mutant.name)
def test_sums_may_be_a_kernel_of_their_own(mutant: Mutant, tmp_path: pathlib.Path) -> None:
    """The sums follow the reference kernel, because simulated ranks cannot run the specialized kernel."""

    def on_rank() -> None:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        x = torch.arange(40.0).reshape(20, 2) % 7 + rank
        how = {"programs": 2, "block_m": 16, "block_n": 16, "block_k": 16, "warp_roles": True}
        with interlace.configured(**how):
            for _ in range(3):
                y = interlace.matmul_reduce_scatter(
                    x, torch.eye(2), bias=torch.ones(2), activation="relu", algorithm="fused"
                )
                whole = sum(x - rank + each for each in range(world_size)) + 1
                assert torch.equal(y, whole.chunk(world_size)[rank])

    with mutated(mutant, tmp_path):
        kernel = matmul_reduce.one_node.matmul_reduce_scatter_kernel
        name = "matmul_reduce_scatter_roles_kernel"
        with (
            mock.patch.object(matmul_reduce_scatter_roles, name, kernel),
            mock.patch.object(matmul_reduce.operands, "may_have_roles", lambda *of: True),
            mock.patch.object(
                matmul_reduce.operands, "with_roles", lambda of, arguments, *more: arguments
            ),
        ):
            report = races(on_rank, 3, seeds=range(4))
    assert report.clean == (mutant is ALONE)


def test_both_places_of_the_output_count_as_shared_memory() -> None:
    plain = Configuration(block_n=256, epilogue_subtile=2, num_stages=3)
    more = shared_needed(replace(plain, warp_roles=True), 2) - shared_needed(plain, 2)
    assert more == 128 * 128 * 2
