"""Counts of one round of each loop: on text of which the counts are known, and on kernels."""

import pathlib
import re
from dataclasses import replace

import pytest

from interlace.kernels.transfer import IN_FLIGHT_BYTES
from interlace.runtime.compiler.lint.sass import Loop, loops
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import (
    MatmulVariant,
    all_gather_matmul,
    entries,
    grouped_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from interlace.tools.catalogue.catalogue_attention import HeadsVariant, heads_kernels
from mutants.mutant_checks import built_beside
from mutants.mutations import Edit, Mutant, importable

HEAD = "MOV R1, c[0x0][0x28]"
BACK = "@P0 BRA `(.L_x_1)"
END = "EXIT"
LOAD = "LDG.E.128 R4, desc[UR4][R2.64]"
NEXT = "LDG.E.128 R8, desc[UR4][R2.64+0x10]"
USE = "FADD R20, R7, R20"
POLL = "LDG.E.64.STRONG.SYS R12, [R2.64]"
COPY = "LDGSTS.E.BYPASS.128 [R50+0x8000], desc[UR22][R8.64], P4"
GROUP = "LDGDEPBAR"
TMA = "@UP1 UTMALDG.2D [UR8], [UR16]"
ARRIVED = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R156+URZ+0x34000], R19"


def sass(*instructions: str) -> str:
    """Return ``nvdisasm -g``'s text of these instructions, one per line. Words that end with ":" are
    labels.
    """
    lines = []
    for number, text in enumerate(instructions, 1):
        code = f"        /*{16 * number:04x}*/                   {text} ;"
        lines += [text] if text.endswith(":") else [f'\t//## File "/k.py", line {number}', code]
    return "\n".join([*lines, ""])


def in_loop(*instructions: str) -> Loop:
    _, found = loops(sass(HEAD, ".L_x_1:", *instructions, BACK, END, ".L_x_9:", "BRA `(.L_x_9)"))
    return found


@pytest.mark.parametrize(
    ("instructions", "loads", "size"),
    [
        ((LOAD, USE), 1, 16),
        ((LOAD, NEXT, USE), 2, 32),
        ((LOAD, NEXT.replace("128", "64"), USE), 2, 24),
        ((LOAD, USE, NEXT), 2, 32),
        ((LOAD, USE, NEXT, USE.replace("R7", "R8")), 1, 16),
        ((LOAD, NEXT, USE.replace("R7", "R17")), 2, 32),  # in the next round, by the load itself
        ((USE, LOAD), 1, 16),
        ((USE, LOAD, NEXT, "STG.E [R2.64], R9"), 2, 32),
        ((LOAD, LOAD), 1, 16),  # the second overwrites what the first brings
        ((POLL, LOAD), 1, 16),
        ((POLL,), 0, 0),
        ((POLL, USE), 0, 0),
        (("LDS.128 R4, [UR4]", USE), 0, 0),
        ((COPY, COPY, GROUP, "DEPBAR.LE SB0, 0x0"), 2, 32),
        ((COPY, COPY, GROUP, "DEPBAR.LE SB0, 0x1"), 4, 64),
        (("DEPBAR.LE SB0, 0x3", COPY, GROUP), 4, 64),
        ((COPY, GROUP, "DEPBAR.LE SB1, 0x1"), 1, 16),
        ((COPY, GROUP), 1, 16),
        ((ARRIVED, TMA, TMA), 2, 0),
        ((ARRIVED, TMA, ARRIVED, TMA), 1, 0),
        ((TMA, LOAD, USE), 2, 16),
        ((TMA, LOAD, LOAD.replace("R4", "R40"), USE), 3, 32),
    ],
)
def test_loads_in_flight(instructions: tuple[str, ...], loads: int, size: int) -> None:
    """TMA does not say how many bytes it loads."""
    found = in_loop(*instructions)
    assert (found.loads_in_flight, found.bytes_in_flight) == (loads, size)


@pytest.mark.parametrize(
    ("count", "instruction", "other"),
    [
        ("tensor_maps", "UTMACCTL.IV [UR54]", "UTMACCTL.PF [UR54]"),
        ("barriers", "BAR.SYNC.DEFER_BLOCKING 0x0", "SYNCS.ARRIVE.TRANS64 RZ, [R5], R162"),
        ("fences", "MEMBAR.ALL.SYS", "MEMBAR.ALL.CTA"),
        ("wgmma_waits", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.ARRIVE"),
        ("products", "HMMA.16816.F32.BF16 R8, R4, R2, R8", "HFMA2.BF16 R8, R4, R2, R8"),
        ("products", "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "WARPGROUP.ARRIVE"),
        ("products", "UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8], UP0", "UTCBAR [UR4], URZ"),
        ("conversions", "F2FP.BF16.PACK_AB R4, R5, R4", "PRMT R4, R5, 0x5410, R6"),
        ("conversions", "HADD2.F32 R4, -RZ, R5.H0_H0", "HADD2 R4, R5, R6"),
        ("loads", LOAD, "LDS.128 R4, [UR4]"),
        ("loads", COPY, POLL),
        ("loads", TMA, GROUP),
    ],
)
def test_counts(count: str, instruction: str, other: str) -> None:
    for times in (0, 1, 3):
        assert getattr(in_loop(*[instruction] * times, other, "NOP"), count) == times
        assert getattr(in_loop(*[other] * times, "NOP"), count) == 0


@pytest.mark.parametrize(
    ("load", "size"),
    [
        (LOAD, 16),
        (LOAD.replace("128", "64"), 8),
        (LOAD.replace(".128", ""), 4),
        (LOAD.replace("128", "U16"), 2),
        (COPY, 16),
        (POLL, 0),
        (TMA, 0),
    ],
)
def test_loaded_bytes(load: str, size: int) -> None:
    assert in_loop(load, "NOP").loaded_bytes == size
    assert in_loop(load, "@P1 " + load).loaded_bytes == 2 * size


def test_loops_in_loops() -> None:
    """An instruction counts in the innermost loop, which has the line of its branch back as its name."""
    barrier, inner = "BAR.SYNC 0x0", "BRA.U UP0, `(.L_x_2)"
    text = sass(HEAD, barrier, ".L_x_1:", barrier, ".L_x_2:", "NOP", barrier, inner, BACK, END)
    assert loops(text) == (
        Loop("", 0, 3, barriers=1),
        Loop("k.py:9", 1, 2, barriers=1),
        Loop("k.py:8", 2, 3, barriers=1),
    )
    once = text.replace(inner, inner.replace("x_2", "x_3") + " ;\n.L_x_3:\n")
    assert [loop.barriers for loop in loops(once)] == [1, 2]


@pytest.mark.parametrize(
    ("target", "instructions"), [(".L_x_2", [6]), ("$__internal_0_$__trap", [3, 3])]
)
def test_a_far_jump_of_old_chips_does_not_return(target: str, instructions: list[int]) -> None:
    """A branch back after such a jump is not a loop; after the call of a function it is."""
    call = f"CALL.REL.NOINC `({target})"
    text = sass(HEAD, ".L_x_1:", "NOP", call, "BRA `(.L_x_1)", ".L_x_2:", "NOP", END)
    assert [loop.instructions for loop in loops(text)] == instructions


PACKED = ("fp8_block128", "mxfp8", "nvfp4")  # the other formats have values of the same kinds
MAKERS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, grouped_matmul)


@pytest.mark.thorough
def test_products_of_packed_rows_need_no_stack_on_older_chips() -> None:
    """For all 128 numbers at a time a chip of 8.0 has too few registers."""
    operands = [MatmulVariant(path="pointers", weight="nk", format=name) for name in PACKED]
    reports = build([make(80, each) for make in MAKERS for each in operands])
    assert [(report.name, report.stack, report.spills) for report in reports if report.spills] == []
    for report in reports:
        (loop,) = [loop for loop in report.loops if loop.products]
        assert " in multiply_packed" in loop.where and loop.conversions and loop.loads
    wide = replace(operands[0], overrides={"block_k": 128})
    (control,) = build([matmul_reduce_scatter(80, wide)])
    assert control.error is None and control.spills


ONE_BY_ONE = Mutant(
    "one source at a time",
    "kernels/collectives/reduction.py",
    (Edit("_AT_ONCE = tl.constexpr(4)", "_AT_ONCE = tl.constexpr(1)"),),
)


@pytest.mark.thorough
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_sums_load_several_sources_at_once(arch: int, tmp_path: pathlib.Path) -> None:
    """A sum waits for memory once for four sources; the mutant waits once for each source."""
    chosen = (
        "reduce_scatter bf16",
        "reduce_scatter fp32",
        "matmul_reduce_scatter bf16 nk pointers",
        "node_sums stores",
    )
    shipped = [entry for entry in entries(arch) if entry.name in chosen]
    # A program of the last two has tiles of 128 columns on 8.0, and elsewhere of 256.
    few_columns = 2 if arch == 80 else 1
    for at_once, reports in zip((4, 1), built_beside(ONE_BY_ONE, shipped, tmp_path), strict=True):
        in_flight = []
        for report in reports:
            # Loads of whole blocks have 16 bytes each; at the edge they have an element.
            sums = [loop for loop in report.loops if " in sum_contributions" in loop.where]
            whole = [loop for loop in sums if loop.loaded_bytes == 16 * loop.loads_in_flight > 0]
            in_flight.append(min(loop.loads_in_flight for loop in whole))
        assert in_flight == [at_once * n for n in (2, 4, *[2 // few_columns] * 2)], reports


@pytest.mark.thorough
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_no_loop_over_tiles_or_ranks_publishes(arch: int) -> None:
    chosen = (
        "matmul_reduce_scatter bf16 nk pointers",
        "reduce_scatter bf16",
        "all_reduce bf16",
        "multimem_all_gather bf16",
        "finish",
    )
    reports = build([entry for entry in entries(arch) if entry.name in chosen])
    assert len(reports) == len(chosen) - (arch == 80)
    for report in reports:
        # other loops have the fence of a timeout, after the barriers of a wait
        found = [loop.where for loop in report.loops if (loop.fences, loop.barriers) == (1, 1)]
        publish = [where for where in found if "give_up" not in where]
        assert publish and all(" in publish_" in where for where in publish), report


@pytest.mark.thorough
@pytest.mark.parametrize("arch", (80, 90, 100))
def test_copiers_have_64_kib_on_their_way(arch: int) -> None:
    """Loads come before the stores, in blocks of every size, also in the collectors of a plain gather."""
    chosen = ("all_gather bf16", "all_gather fp32", "all_gather_matmul bf16 kn pointers copiers")
    found = [entry for entry in entries(arch) if entry.name in chosen]
    assert len(found) == len(chosen)
    for entry, report in zip(found, build(found), strict=True):
        assert report.problems() == [] and report.spills == 0
        threads = 32 * entry.num_warps
        copies = [loop for loop in report.loops if " in copy_elements" in loop.where]
        # 16 bytes each, where the others are for what is left behind whole blocks, an element at a time
        whole = [loop for loop in copies if loop.loaded_bytes >= 32 and loop.instructions < 100]
        in_flight = max(16 * threads * loop.loads_in_flight for loop in whole)
        assert in_flight >= IN_FLIGHT_BYTES, report


MASKED = Mutant(
    "masks for all tiles",
    "kernels/attention/tiles.py",
    (Edit("    if query.dtype == tl.float32:\n", "    if True:\n"),),
)
MASKED_BACKWARD = Mutant(
    "masks for all tiles of the backward",
    "kernels/attention/backward.py",
    (
        Edit("    if WIDE:\n        stop = start\n", "    if True:\n        stop = start\n"),
        Edit("head, scale, False,", "head, scale, True,"),
    ),
)


def fewest(report: BuildReport, where: str) -> int:
    """Return the instructions of a function's shortest loop. Loops of two instructions poll an mbarrier."""
    return min(n for loop in report.loops if where in loop.where and (n := loop.instructions) > 9)


@pytest.mark.thorough
def test_tiles_of_attention_that_all_rows_see_take_few_instructions(tmp_path: pathlib.Path) -> None:
    (shipped,) = [each for each in entries(90) if each.name == "attention bf16 head 128"]
    reports = built_beside(MASKED, [shipped], tmp_path)
    counts = [fewest(report, "attend_run") for (report,) in reports]
    tiles = int(shipped.fixed["BLOCK_N"]) // 64
    assert counts[0] <= 330 * tiles < counts[1], counts


@pytest.mark.thorough
@pytest.mark.parametrize("size", [64, 128])
def test_backward_of_attention_takes_wide_products_and_few_instructions(
    size: int, tmp_path: pathlib.Path
) -> None:
    """Smaller tiles have mma instructions. The mutant has masks for all tiles."""
    names = "attention_queries_backward_kernel", "attention_keys_backward_kernel"
    every = {each.kernel: each for each in entries(90) if each.variant == f"bf16 head {size}"}
    shipped = [every[name] for name in names]
    MASKED_BACKWARD.write(tmp_path)
    masked = [
        replace(each, module=each.module.replace("interlace.kernels", MASKED_BACKWARD.package))
        for each in shipped
    ]
    narrow, low = (
        heads_kernels(90, HeadsVariant(head_dim=size, overrides={name: 32}), backward=True)
        for name in ("block_n", "block_m")
    )
    compiled = [*shipped, *masked, *narrow, *low]
    stems = [str(tmp_path / str(number)) for number in range(len(compiled))]
    with importable(tmp_path):
        reports = build(compiled, artifacts=stems)
    texts = [pathlib.Path(f"{stem}.ptx").read_text() for stem in stems]
    columns = [
        min(int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", text) or "0")
        for text in texts
    ]
    others = ["mma.sync.aligned.m16" in text for text in texts]
    assert [n >= 64 for n in columns] == [True] * 4 + [False] * 4, columns
    assert others == [False] * 6 + [True] * 2
    pairs = 128 * 64 // 64**2
    for number, (where, most) in enumerate((("_take_keys", 150), ("_take_queries", 210))):
        counts = [fewest(reports[number + by], where) for by in (0, 2)]
        assert counts[0] <= most * pairs < counts[1], (where, counts)
        assert not reports[number].spills
