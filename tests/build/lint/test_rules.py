"""The rules of lint on text that each must flag, and on text that it must not."""

from collections import Counter

import pytest

from interlace.runtime.compiler.lint import ptx_rules, sass as sass_rules
from interlace.runtime.compiler.lint.faults import RULES, Frame, later
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.lint.sass import instruction_counts, without_tensor_cores
from interlace.runtime.compiler.lint.triton_ir import Dot, TritonIR

STORE = "st.global.v4.b32 [ %rd1 + 0 ], { %r1 };\n"
BARRIER = "bar.sync 0;\n"
RELEASE = "@%p1 atom.global.sys.release.exch.b64 %rd2, [ %rd3 + 0 ], %rd4;\n"
ACQUIRE = "@%p1 ld.global.sys.acquire.b64 %rd2, [ %rd3 + 0 ];\n"
SIGNAL = "st.relaxed.sys.global.u32 [%rd3], 1;\n"
FENCE = "fence.proxy.async; mov.u32 %r1, 0;\n"
SHARED_FENCE = "fence.proxy.async.shared::cta;\n"
LOAD = "ld.global.b32 { %r4 }, [ %rd7 + 0 ];\n"
BULK_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1];\n"
BULK_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];\n"
BULK_READ = "cp.async.bulk.wait_group.read 0 ;\n"
BULK_DONE = "cp.async.bulk.wait_group 0 ;\n"
ADD = "atom.global.gpu.relaxed.add.f32 %r3, [ %rd1 + 0 ], %r4;\n"


def at(line: int, code: str, called_at: str = "") -> str:
    """``code`` at a line of k.py; of an inlined function, with the comment that says where from."""
    chain = f"k.py:{line}:4" + (f" @[ {called_at} ]" if called_at else "")
    return f".loc 1 {line} 4 // {chain}\n{code}"


def poll(load: str, after: str = LOAD) -> str:
    test = "setp.lt.s64 %p3, %rd5, %rd6;\n@%p3 bra $L__BB0_1;\n"
    return "$L__BB0_1:\n" + load.format("%rd5", "[ %rd3 + 0 ]") + test + after


WEAK = "ld.volatile.global.b64 {0}, {1};\n"
SHARED_POLL = (
    "$L__BB0_1:\n@%p1 ld.global.sys.relaxed.b64 %rd5, [ %rd3 + 0 ];\n"
    "@%p1 st.shared.b64 [ %r8 + 0 ], %rd5;\nbar.sync 0;\nld.shared.b64 %rd6, [global_smem];\n"
    f"setp.lt.s64 %p3, %rd6, %rd7;\n@%p3 bra $L__BB0_1;\n{LOAD}ret;\n"
)
ASSEMBLY_POLL = (
    "{ .reg .pred again; .reg .u32 seen;\nPOLL: ld.relaxed.sys.u32 seen, [%rd1];\n"
    f"setp.ne.u32 again, seen, 1; @again bra POLL; }}\n{LOAD}ret;\n"
)
WARP_BARRIER = "bar.warp.sync -1;\n"


def roles(one: str, other: str) -> str:
    """Two parts of a kernel for warps of their own, as ``warp_specialize`` gives them out."""
    return (
        "$L__BB0_2:\nbarrier.sync 1;\n$L_brx_0: .branchtargets\n$L__BB0_7,\n$L__BB0_8;\n"
        f"brx.idx %r1, $L_brx_0;\n$L__BB0_7:\n{one}bra.uni $L__BB0_2;\n"
        f"$L__BB0_8:\n{other}bra.uni $L__BB0_2;\n"
    )


LOOP = "$L__BB0_1:\n{}@%p3 bra $L__BB0_1;\nret;\n"
RULE_TEXTS: dict[ptx_rules.Rule, tuple[list[str], list[str]]] = {
    ptx_rules.release_without_barrier: (
        [
            STORE + BARRIER + RELEASE,
            BARRIER + RELEASE,
            RELEASE + STORE,
            STORE + BARRIER + "@%p2 bra $L__BB0_1;\n" + RELEASE + "$L__BB0_1:\nret;\n",
            STORE + "ret;\n.func other()\n{\n" + RELEASE + "ret;\n}\n",
            roles(STORE + WARP_BARRIER + RELEASE, STORE),
            roles(STORE, STORE + WARP_BARRIER + RELEASE),
            roles(STORE, RELEASE),
            roles(RELEASE, STORE),
        ],
        [
            roles(STORE + RELEASE, WARP_BARRIER),
            roles(WARP_BARRIER, STORE + RELEASE),
            roles(STORE + WARP_BARRIER + RELEASE + "bar.sync 2, 128;\n", ""),  # of four warps
            roles("", LOOP.replace("ret;\n", "").format(RELEASE + STORE)),
            STORE + WARP_BARRIER + RELEASE,
            STORE + RELEASE,
            BARRIER + STORE + RELEASE,
            ADD + RELEASE,
            STORE + "{ .reg .u32 t; st.release.sys.global.u32 [%rd3], 1; }\n",
            STORE + "@%p2 bra $L__BB0_1;\n" + BARRIER + "$L__BB0_1:\n" + RELEASE,
            LOOP.format(RELEASE + STORE),
        ],
    ),
    ptx_rules.narrow_scope: ([ACQUIRE, RELEASE, ADD, "fence.acq_rel.sys;\n", "bar.sync 0;\nmembar.sys;\n",
     SHARED_FENCE, LOAD + "fence.acq_rel.gpu;\n" + LOAD, STORE + "membar.gl;\n" + LOAD + "ret;\n"],
     [ACQUIRE.replace("sys", "gpu"), "st.release.cta.global.u32 [%rd3], 1;\n",
     "atom.global.gpu.acq_rel.add.u32 %r1, [ %rd9 + 0 ], %r2;\n", STORE + "fence.acq_rel.gpu;\n" + SIGNAL,
     poll(WEAK, "membar.gl;\n" + LOAD)]),
    ptx_rules.published_descriptor_store: ([BULK_STORE + BULK_DONE + RELEASE, RELEASE + BULK_STORE,
     STORE + RELEASE, roles(BULK_STORE, RELEASE), roles(RELEASE, BULK_STORE)], [BULK_STORE + RELEASE,
     BULK_STORE + BULK_READ + BARRIER + RELEASE, roles(STORE, BULK_STORE + WARP_BARRIER + RELEASE)]),
    ptx_rules.unfenced_descriptor_load: ([ACQUIRE + FENCE + BULK_LOAD, BULK_LOAD,
     ACQUIRE + "ret;\n" + BULK_LOAD], [ACQUIRE + BULK_LOAD, ACQUIRE + SHARED_FENCE + BULK_LOAD,
     roles(ACQUIRE + BULK_LOAD, ""), roles(FENCE, LOOP.replace("ret;\n", "").format(BULK_LOAD + ACQUIRE)),
     ACQUIRE + "@%p2 bra $L__BB0_2;\n" + FENCE + "$L__BB0_2:\n" + BULK_LOAD,
     "$L__BB0_2:\n" + BULK_LOAD + ACQUIRE + "bra.uni $L__BB0_2;\n"]),
    ptx_rules.early_load: (
        [
            at(7, ACQUIRE) + at(8, LOAD),
            at(6, LOAD) + at(7, ACQUIRE),  # as in the source
            at(7, LOAD) + at(7, ACQUIRE),
            at(0, LOAD) + at(7, ACQUIRE),  # nobody knows
            LOOP.format(at(7, ACQUIRE) + at(8, LOAD)),
            at(7, ACQUIRE) + at(8, LOAD) + at(7, ACQUIRE) + at(8, LOAD),  # unrolled
            # the other branch of an if
            "@%p3 bra $L__BB0_1;\n" + at(8, LOAD) + "ret;\n$L__BB0_1:\n" + at(7, ACQUIRE),
            # two calls on one line, and a wait within the call that loads
            at(9, LOAD, "k.py:20:4") + at(8, ACQUIRE, "k.py:20:30"),
            at(9, LOAD, "k.py:20:4") + at(19, ACQUIRE, "k.py:20:4"),
            roles(at(8, LOAD), at(7, ACQUIRE)),
        ],
        [
            at(8, LOAD) + at(7, ACQUIRE),
            at(8, BULK_LOAD) + at(7, ACQUIRE),
            at(8, "cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 16;\n") + at(7, ACQUIRE),
            at(8, LOAD) + LOOP.format(at(7, ACQUIRE) + at(8, LOAD)),  # the prologue of a pipeline
            at(3, LOAD, "k.py:21:4") + at(9, ACQUIRE, "k.py:20:4"),
            roles("", at(8, LOAD) + at(7, ACQUIRE)),
        ],
    ),
    ptx_rules.weak_poll: (
        [
            poll(ACQUIRE.replace("%rd2, [ %rd3 + 0 ]", "{}, {}")),
            WEAK.format("%rd5", "[ %rd3 + 0 ]"),  # not in a loop
            poll("ld.relaxed.sys.global.b64 {}, {};\n", "fence.acq_rel.sys;\n" + LOAD),
            poll("ld.relaxed.sys.global.b64 {}, {};\n", STORE + "ret;\n"),  # a buffer is free
            poll("add.s64 %rd3, %rd3, 8;\nld.global.b64 {}, {};\n"),  # a search, not a poll
            LOOP.format(ADD),
            poll("add.s64 %rd6, %rd6, 8;\nld.global.b64 {}, {};\n"),  # the bound of a counter
        ],
        [
            poll(WEAK),
            poll("ld.global.b64 {}, {};\n"),
            poll("ld.relaxed.sys.global.b64 {}, {};\n", "fence.acq_rel.gpu;\n" + LOAD),
            SHARED_POLL,
            ASSEMBLY_POLL,
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULE_TEXTS)
def test_rule(rule: ptx_rules.Rule) -> None:
    assert set(RULE_TEXTS) == set(ptx_rules.PTX_RULES)
    right, wrong = RULE_TEXTS[rule]
    files = '.file 1 "/src/k.py"\n'
    for ptx in right:
        assert rule(PtxModule(files + ptx)) == [], ptx
    for ptx in wrong:
        (fault,) = rule(PtxModule(files + ptx))
        assert fault.rule in RULES, ptx


def test_fault_names_the_inlined_line_and_the_kernels() -> None:
    ptx = '.file 1 "/src/k.py"\n' + STORE + at(7, RELEASE, "k.py:20:3 @[ k.py:30:5 ]")
    (fault,) = ptx_rules.release_without_barrier(PtxModule(ptx))
    assert fault.where == "k.py:7, called at k.py:30"
    assert str(fault).startswith("k.py:7, called at k.py:30: release without barrier: no bar.sync")


def test_a_call_is_found_where_its_own_line_was() -> None:
    """Triton 3.9 writes no comment, but which line called; that line may itself be in a function."""
    ptx = '.file 1 "/src/k.py"\n' + STORE + ".loc 1 30 5 // k.py:30:5\n"
    for line, caller in ((20, 30), (7, 20)):
        ptx += f".loc 1 {line} 5, function_name $L__info_string0, inlined_at 1 {caller} 5 // k.py\n"
    ptx += "// begin inline asm\n.loc 1 8 5 // of the asm's second line\n// end inline asm\n"
    program = PtxModule(ptx + RELEASE)
    assert [frame.line for frame in program.instructions[-1].chain] == [7, 20, 30]
    (fault,) = ptx_rules.release_without_barrier(program)
    assert fault.where == "k.py:7, called at k.py:30"


def inlined(line: int, caller: int, code: str = "") -> str:
    return f".loc 1 {line} 5, function_name $L__info_string0, inlined_at 1 {caller} 5 // k\n{code}"


# Line 100 and line 200 call a function, whose line 30 calls another, which loads at line 7. Between them
# is a wait, line 150. The block of the first load comes after the second call.
FIRST = ".loc 1 100 5\n" + inlined(30, 100, "setp.lt.s64 %p3, %rd5, %rd6;\n@%p3 bra COLD;\n")
BACK = "BACK:\n.loc 1 150 5\n" + ACQUIRE
SECOND = ".loc 1 200 5\n" + inlined(30, 200, "add.s64 %rd8, %rd9, 8;\n") + inlined(7, 30, LOAD)
COLD = "COLD:\n", inlined(7, 30, LOAD), "bra BACK;\n"
NO_LINE = ".loc 1 0 5\nmov.u64 %rd1, 0x0;\n"
ROTATED = "bra ENTER;\nHEAD:\n" + inlined(8, 30, "add.s64 %rd1, %rd1, 1;\n") + "ENTER:\n"


@pytest.mark.parametrize("before", ["", NO_LINE, ROTATED])
def test_a_call_is_told_by_what_ran_before(before: str) -> None:
    """Which of two calls a block belongs to is not in its own lines, nor in those above it in the text."""
    label, load, back = COLD
    cold = label + before + load + "@%p3 bra HEAD;\n" * (before == ROTATED) + back
    program = PtxModule('.file 1 "/src/k.py"\n' + FIRST + BACK + SECOND + "ret;\n" + cold)
    loads = [one for one in program.instructions if str(one) == LOAD.strip(";\n")]
    assert [[frame.line for frame in one.chain] for one in loads] == [[7, 30, 200], [7, 30, 100]]
    assert [one.chain[-1].line for one in program.instructions if one.chain[0].line == 8] in (
        [],
        [100],
    )
    assert ptx_rules.early_load(program) == []


def test_an_early_load_of_a_call_is_found() -> None:
    """The load of the second call, moved in front of the wait, whose own call is there as well."""
    ptx = '.file 1 "/src/k.py"\n' + FIRST + SECOND + BACK + SECOND + "ret;\n" + "".join(COLD)
    (fault,) = ptx_rules.early_load(PtxModule(ptx))
    assert fault.where == "k.py:7, called at k.py:200" and fault.message.endswith("k.py:150")


def test_a_call_that_is_unrolled_has_its_line_once() -> None:
    """Two calls in a loop of two rounds: the second round has no lines of the calls themselves."""
    rounds = "".join(
        inlined(30, caller, "add.s64 %rd8, %rd9, 8;\n") + inlined(9, caller, STORE) + at_call
        for caller, at_call in [(100, inlined(7, 30, LOAD)), (200, inlined(7, 30, LOAD))]
    )
    again = "".join(inlined(9, caller, STORE) + inlined(7, 30, LOAD) for caller in (100, 200))
    program = PtxModule('.file 1 "/src/k.py"\n' + rounds + again)
    loads = [one.chain[-1].line for one in program.instructions if one.kind == "ld"]
    assert loads == [100, 200] * 2


def test_branch_tables_are_followed() -> None:
    table = "$L_brx_0: .branchtargets $L__BB0_1, $L__BB0_2;\n"
    ptx = STORE + table + "brx.idx %r1, $L_brx_0;\n$L__BB0_1:\nret;\n$L__BB0_2:\n" + RELEASE
    assert len(ptx_rules.release_without_barrier(PtxModule(ptx))) == 1


def test_order_in_the_source() -> None:
    call, other = Frame("k.py", 20, 4), Frame("k.py", 21, 4)
    assert later((Frame("f.py", 1), other), (Frame("g.py", 9), call))
    assert not later((Frame("f.py", 9), call), (Frame("g.py", 1), other))
    assert later((Frame("f.py", 2), call), (Frame("f.py", 1), call))
    assert not later((Frame("f.py", 2), call), (Frame("g.py", 1), call))
    assert not later((call,), (Frame("f.py", 1), call))


# -- Triton's IR -------------------------------------------------------------------------------

LOCATIONS = '#loc1 = loc("/src/k.py":3:4)\n#loc2 = loc("/src/k.py":9:4)\n#loc3 = loc("x"(#loc1))\n'
LOCATIONS += "#loc4 = loc(callsite(#loc3 at #loc2))\n"
ACQUIRE_IR = "  %1 = tt.atomic_rmw add, acquire, sys, %p, %0, %true : (x) -> i64 loc(#loc3)\n"


def plain_poll(load: str) -> str:
    return (
        f"  %n:2 = scf.while (%a = %0, %b = %1) : (i32, i32) -> (i32, i32) {{\n{load.format('%5')}"
        "    %7 = arith.cmpi slt, %a, %c : i32 loc(#loc1)\n"
        "    scf.condition(%7) %a, %b : i32, i32 loc(#loc1)\n  } do {\n"
        "  ^bb0(%a: i32, %b: i32):\n"
        f"{load.format('%6')}    scf.yield %6, %b : i32, i32 loc(#loc1)\n  }} loc(#loc1)\n"
    )


def bounded(by: str) -> str:
    """A counter, and a loop that goes on while what is loaded is more than ``by``."""
    return (
        "  %n = scf.while (%b = %1) : (i32) -> (i32) {\n"
        "    %5 = tt.load %flag : !tt.ptr<i32> loc(#loc1)\n"
        f"    %7 = arith.cmpi slt, {by}, %5 : i32 loc(#loc1)\n"
        "    scf.condition(%7) %b : i32 loc(#loc1)\n  } do {\n  ^bb0(%b: i32):\n"
        "    %8 = arith.addi %b, %c : i32 loc(#loc1)\n"
        "    scf.yield %8 : i32 loc(#loc1)\n  } loc(#loc1)\n"
    )


ADDRESSED = (
    "  scf.for %i = %0 to %1 step %2 : i32 {{\n    scf.while : () -> () {{\n"
    "      %3 = tt.addptr %table, %i : x loc(#loc1)\n      %4 = tt.load %3 : x loc(#loc1)\n"
    "      %5 = tt.int_to_ptr %4 : x loc(#loc1)\n      %6 = {} %5 : x loc(#loc1)\n"
    "      %7 = arith.cmpi ne, %6, %c : i32 loc(#loc1)\n      scf.condition(%7) loc(#loc1)\n"
    "    }} do {{\n      scf.yield loc(#loc1)\n    }} loc(#loc1)\n  }} loc(#loc1)\n"
)
EPOCH = (  # which is in memory, too
    "  scf.while : () -> () {{\n      %6 = {} %flag : x loc(#loc1)\n"
    "      %5 = tt.load %epoch : x loc(#loc1)\n      %7 = arith.cmpi slt, %6, %5 : i32 loc(#loc1)\n"
    "      scf.condition(%7) loc(#loc1)\n  }} do {{\n      scf.yield loc(#loc1)\n  }} loc(#loc1)\n"
)
CALL = "    {} = tt.call @k.peek__Pi32(%flag) : (!tt.ptr<i32>) -> i32 loc(#loc1)\n"
CALLED = (
    "  tt.func private @k.peek__Pi32(%p: x) -> i32 {{\n    %0 = {} loc(#loc2)\n  }} loc(#loc2)\n"
)


@pytest.mark.parametrize(
    ("ir", "ptx", "dropped"),
    [
        (ACQUIRE_IR, at(3, ACQUIRE), 0),
        (ACQUIRE_IR, at(4, ACQUIRE), 1),
        (ACQUIRE_IR, "", 1),
        (ACQUIRE_IR, at(0, ACQUIRE), 0),  # the compiler has lost the line, not the wait
        (ACQUIRE_IR.replace("acquire", "release"), "", 0),
        (bounded("%b"), "", 0),
        (bounded("%c"), "", 1),
        (bounded("%c"), at(3, poll("ld.global.b64 {}, {};\n")), 0),  # kept; a weak poll
        (plain_poll("    {} = tt.load %flag : !tt.ptr<i32> loc(#loc1)\n"), "", 1),
        (plain_poll("    {} = tt.load %flag {{isVolatile = true}} : x loc(#loc1)\n"), "", 0),
        (plain_poll("    {} = tt.load %b : !tt.ptr<i32> loc(#loc1)\n"), "", 0),
        (plain_poll("    {} = arith.addi %b, %c : i32 loc(#loc1)\n"), "", 0),
        ("  %5 = tt.load %flag : !tt.ptr<i32> loc(#loc1)\n", "", 0),
        (EPOCH.format("tt.atomic_rmw add, acquire, sys,"), at(3, ACQUIRE), 0),
        (EPOCH.format("tt.load"), "", 2),  # either may be the flag
        (ADDRESSED.format("tt.load"), "", 1),
        (
            ADDRESSED.format("tt.load"),
            at(3, LOOP.format(LOAD)),
            1,
        ),  # in a loop that it does not end
        (
            ADDRESSED.format("tt.atomic_rmw add, relaxed, sys,"),
            "",
            0,
        ),  # of a table, not of the flag
        (plain_poll(CALL) + CALLED.format("tt.load %p : x"), "", 1),
        (plain_poll(CALL) + CALLED.format("tt.load %p {isVolatile = true} : x"), "", 0),
    ],
)
def test_dropped_waits(ir: str, ptx: str, dropped: int) -> None:
    program = PtxModule('.file 1 "/src/k.py"\n' + ptx)
    found = TritonIR(ir + LOCATIONS).dropped_waits(program)
    assert [(fault.rule, fault.where) for fault in found] == [("dropped wait", "k.py:3")] * dropped


def test_dots() -> None:
    line = "  %{0} = tt.dot %a, %b, %c{1} : tensor<128x64x{2}> * tensor<64x256x{2}> -> "
    line += "tensor<128x256xf32> loc(#loc4)\n"
    texts = ("", "bf16"), ("", "f32"), (", inputPrecision = tf32", "f32"), (", x", "f64")
    ir = TritonIR("".join(line.format(i, *text) for i, text in enumerate(texts)) + LOCATIONS)
    chain = (Frame("/src/k.py", 3, 4), Frame("/src/k.py", 9, 4))
    assert ir.dots() == [
        Dot((128, 256), "bf16", False, chain),
        Dot((128, 256), "f32", True, chain),
        Dot((128, 256), "f32", False, chain),
        Dot((128, 256), "f64", True, chain),
    ]


# -- SASS --------------------------------------------------------------------------------------


def test_instruction_counts() -> None:
    sass = (
        "        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8] ;\n"
        "        /*0020*/              @!P0 STL.64 [R1+0x8], R2 ;\n"
        "        /*0030*/                   LDL R2, [R1] ;\n"
        "        /*0040*/                   UTCHMMA gdesc[UR4], gdesc[UR6] ;\n"
        "        /*0050*/                   IMMA.16832.S8.S8 R4, R4.ROW, R2.COL, R8 ;\n"
    )
    counts = instruction_counts(sass)
    assert counts == {"HGMMA": 1, "STL": 1, "LDL": 1, "UTCHMMA": 1, "IMMA": 1}
    assert sass_rules.spills(counts) == 2
    kinds = sass_rules.tensor_core_instructions
    assert [kinds(counts, a) for a in (80, 90, 100)] == [1, 1, 1]
    assert [kinds(counts, a, any_kind=True) for a in (80, 90, 100)] == [1, 2, 2]


def test_shared_memory_has_a_limit_on_every_chip() -> None:
    limits = {80: 166912, 90: 232448, 100: 232448}
    for arch, limit in limits.items():
        assert sass_rules.too_much_shared(arch, limit) == []
        assert [fault.rule for fault in sass_rules.too_much_shared(arch, limit + 1)] == [
            "shared memory"
        ]


def test_spills_are_judged_where_registers_should_do() -> None:
    assert sass_rules.find_spills(80, 8, 2) == sass_rules.find_spills(90, 0, 0) == []
    assert [sass_rules.find_spills(arch, 8, 0)[0].rule for arch in (90, 100)] == ["spills"] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "exact", "instructions", "num_warps", "faulty"),
    [
        ((128, 256), "bf16", False, ["HGMMA"], 8, False),
        ((128, 256), "bf16", False, ["HMMA"], 8, True),
        ((128, 256), "bf16", False, ["HMMA"], 2, False),
        ((16, 256), "bf16", False, ["HMMA"], 4, False),
        ((4, 64, 64), "bf16", False, ["HMMA"], 4, False),
        ((16, 256), "bf16", False, ["FFMA"], 4, True),
        ((128, 128), "f8E4M3FN", False, ["QGMMA"], 8, False),
        ((128, 128), "f8E4M3FN", False, ["HGMMA"], 8, True),
        ((128, 128), "f8E5M2", False, ["HMMA"], 4, True),
        ((16, 128), "f8E5M2", False, ["HMMA"], 4, False),
        ((64, 64), "f32", True, ["FFMA"], 4, False),
        ((64, 64), "f32", False, ["FFMA"], 4, True),
    ],
)
def test_tensor_cores(
    shape: tuple[int, ...],
    dtype: str,
    exact: bool,
    instructions: list[str],
    num_warps: int,
    faulty: bool,
) -> None:
    dots = [Dot(shape, dtype, exact, (Frame("/src/k.py", 3),))]
    found = without_tensor_cores(dots, Counter(instructions), 90, num_warps)
    assert [(f.rule, f.where) for f in found] == [("no tensor cores", "k.py:3")] * faulty


SASS = (
    '\t//## File "/src/k.py", line 3\n'
    "        /*0040*/                   MEMBAR.ALL.SYS ;\n"
    "        /*0050*/                   ATOMG.E.EXCH.STRONG.SYS PT, RZ, [R2.64], R5 ;\n"
    '\t//## File "/src/k.py", line 4\n'
    "        /*0060*/              @!P0 LDG.E.64.STRONG.SYS R10, desc[UR40][R12.64+0x200] ;\n"
)
# As ptxas has it for sm_80: the barrier of a release is of the line before.
EARLIER = SASS.replace("line 3", "line 2", 1).replace(
    "SYS ;\n", 'SYS ;\n        /*0048*/ ERRBAR;\n\t//## File "/src/k.py", line 3\n', 1
)


@pytest.mark.parametrize(
    ("sass", "where"),
    [
        (SASS, []),
        (EARLIER, []),
        (EARLIER.replace("ERRBAR", "LDG.E R4, [R2.64]"), ["k.py:3"]),
        (SASS.replace("ALL.SYS", "ALL.GPU"), ["k.py:3"]),
        (SASS.replace("MEMBAR.ALL.SYS", "NOP"), ["k.py:3"]),
        (SASS.replace("LDG.E.64.STRONG.SYS", "LDG.E.64"), ["k.py:4"]),
        (SASS.replace("LDG.E.64.STRONG.SYS R10", "CCTL.IVALL"), []),  # of an acquire without a use
        (SASS.replace("STRONG.SYS R10", "STRONG.GPU R10") + "/*0070*/ CCTL.IVALL ;\n", ["k.py:4"]),
        (SASS.replace("line 3", "line 5").replace("line 4", "line 5"), []),
    ],
)
def test_weakened_by_ptxas(sass: str, where: list[str]) -> None:
    program = PtxModule('.file 1 "/src/k.py"\n' + at(3, RELEASE) + at(4, ACQUIRE))
    found = sass_rules.find_weakened(program, sass)
    assert [(f.rule, f.where) for f in found] == [("weakened by ptxas", place) for place in where]
