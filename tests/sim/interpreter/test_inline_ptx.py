"""Inline PTX in the interpreter: what instructions compute, and what is refused."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import interlace
from interlace.runtime.ptx import inline_assembly
from interlace.runtime.ptx.instruction import InlineAssemblyError
from sim.interpreter import ptx_kernels

I16, I32, I64 = torch.int16, torch.int32, torch.int64
F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def check(out: torch.dtype, given: torch.dtype, cases: list[tuple[Any, ...]]) -> None:
    """Every case is (asm, a, b, expected)."""

    def on_rank() -> list[Any]:
        return [ptx_kernels.computed(asm, [a], [b], out, given)[0] for asm, a, b, _ in cases]

    for case, value in zip(cases, interlace.run(on_rank, 1)[0], strict=True):
        expected = case[-1]
        same = value == expected or (value != value and expected != expected)
        assert same and str(value)[0] == str(expected)[0], (case, value)


def refused(asm: str, match: str, constraints: str = "=r,l") -> None:
    """Nothing of ``asm`` runs, and the error says why."""
    memory, out = torch.zeros(4, dtype=I32), torch.zeros(1, dtype=I32)
    with pytest.raises(InlineAssemblyError, match=match) as caught:
        interlace.run(lambda: ptx_kernels.on_memory[(1,)](out, memory, asm, constraints), 1)
    assert isinstance(caught.value, interlace.InterlaceError)
    assert isinstance(caught.value, NotImplementedError)
    assert not memory.any()


# -- registers -------------------------------------------------------------------------------------


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGER_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "min": min,
    "max": max,
    "div": truncated,
    "rem": lambda x, y: x - y * truncated(x, y),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@given(
    st.sampled_from(sorted(INTEGER_OPERATIONS)),
    st.sampled_from("us"),
    st.sampled_from([32, 64]),
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**63 - 1) | st.integers(-9, -1)
        ),
        min_size=4,
        max_size=4,
    ),
)
@settings(max_examples=60)
def test_integers(name: str, letter: str, bits: int, pairs: list[tuple[int, int]]) -> None:
    given = I32 if bits == 32 else I64
    # the bits of each number, and what the type sees in them
    stored = [[int(np.array(v).astype(f"i{bits // 8}")) or 1 for v in pair] for pair in pairs]
    seen = [[v % 2**bits if letter == "u" else v for v in pair] for pair in stored]
    kind = f"b{bits}" if name in ("and", "or", "xor") else f"{letter}{bits}"
    a, b = zip(*stored, strict=True)
    asm = f"{name}.{kind} $0, $1, $2;"
    found = interlace.run(lambda: ptx_kernels.computed(asm, list(a), list(b), given, given), 1)[0]
    expected = [INTEGER_OPERATIONS[name](x, y) % 2**bits for x, y in seen]
    assert [value % 2**bits for value in found] == expected


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("name", ["div", "rem"])
def test_divided_by_zero_is_all_ones_and_no_error(name: str, kind: str) -> None:
    """Of those threads alone: others, whose divisors are numbers, get theirs."""
    asm = f"{name}.{kind} $0, $1, $2;"
    found = interlace.run(
        lambda: ptx_kernels.computed(asm, [7, 0, 9, 17], [0, 0, 4, 5], I32, I32), 1
    )[0]
    assert found == [-1, -1, *([2, 3] if name == "div" else [1, 2])]


def test_wide_products_and_shifts() -> None:
    check(
        I64,
        I32,
        [
            ("mul.wide.s32 $0, $1, $2;", -3, 5, -15),
            ("mul.wide.u32 $0, $1, $2;", -3, 5, (2**32 - 3) * 5),
            ("mad.wide.s32 $0, $1, $2, 100;", -3, 5, 85),
            ("{ .reg .u32 h; mul.hi.u32 h, $1, $2; cvt.u64.u32 $0, h; }", -1, -1, 2**32 - 2),
            ("{ .reg .s32 h; mul.hi.s32 h, $1, $2; cvt.s64.s32 $0, h; }", -(2**31), 8, -4),
            ("mov.b64 $0, {$1, $2};", 5, -1, 5 - 2**32),
        ],
    )
    check(
        I32,
        I32,
        [
            ("shl.b32 $0, $1, $2;", 3, 4, 48),
            ("shl.b32 $0, $1, $2;", 3, 32, 0),
            ("shr.u32 $0, $1, $2;", -1, 28, 15),
            ("shr.s32 $0, $1, $2;", -64, 3, -8),
            ("shr.s32 $0, $1, $2;", -64, 99, -1),
            ("not.b32 $0, $1;", 5, 0, -6),
            ("neg.s32 $0, $1;", -(2**31), 0, -(2**31)),
            ("abs.s32 $0, $1;", -7, 0, 7),
            ("mad.lo.s32 $0, $1, $2, $2;", 6, 7, 49),
            ("popc.b32 $0, $1;", -1, 0, 32),
            ("clz.b32 $0, $1;", 255, 0, 24),
            ("{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, l}; }", 0x10002, 0, 0x20001),
            ("mov.u32 $0, 0x1F;", 0, 0, 31),
            ("mov.u32 $0, 017;", 0, 0, 15),
            ("mov.u32 $0, 0b101;", 0, 0, 5),
            ("mov.s32 $0, -12;", 0, 0, -12),
            ("mov.b32 $0, 0f3F800000;", 0, 0, 0x3F800000),
            ("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, 1, 2, p; }", -1, 0, 1),
        ],
    )


def test_floats() -> None:
    third = float(np.float32(1) / np.float32(3))
    check(
        F32,
        F32,
        [
            ("add.f32 $0, $1, $2;", 1.0, 2.0**-24, 1.0),
            ("add.rn.f32 $0, $1, 0f3F800000;", 1.5, 0.0, 2.5),
            ("sub.f32 $0, $1, $2;", INF, INF, NAN),
            ("mul.f32 $0, $1, $2;", 3e38, 10.0, INF),
            ("mul.ftz.f32 $0, $1, $2;", -(2.0**-100), 2.0**-40, -0.0),
            ("mul.f32 $0, $1, $2;", 2.0**-100, 2.0**-40, 2.0**-140),
            ("div.rn.f32 $0, $1, $2;", 1.0, 3.0, third),
            ("div.rn.f32 $0, $1, $2;", -1.0, 0.0, -INF),
            ("min.f32 $0, $1, $2;", NAN, 2.0, 2.0),
            ("max.f32 $0, $1, $2;", -0.0, 0.0, 0.0),
            ("neg.f32 $0, $1;", 0.0, 0.0, -0.0),
            ("abs.f32 $0, $1;", -2.5, 0.0, 2.5),
            # 2**24 + 3 - 2**-46: in fp64 it would be half way between two fp32 numbers
            ("fma.rn.f32 $0, $1, $2, 0f4B800001;", 1 + 2.0**-23, 1 - 2.0**-23, 2.0**24 + 2),
            ("cvt.rni.f32.f32 $0, $1;", 2.5, 0.0, 2.0),
            ("mov.b32 $0, $1;", NAN, 0.0, NAN),
        ],
    )
    check(F64, F64, [("add.f64 $0, $1, $2;", 0.1, 0.2, 0.1 + 0.2)])


def test_conversions() -> None:
    check(
        I32,
        F32,
        [
            ("cvt.rni.s32.f32 $0, $1;", 2.5, 0.0, 2),
            ("cvt.rzi.s32.f32 $0, $1;", -2.5, 0.0, -2),
            ("cvt.rmi.s32.f32 $0, $1;", -2.5, 0.0, -3),
            ("cvt.rpi.s32.f32 $0, $1;", 2.1, 0.0, 3),
            ("cvt.rzi.s32.f32 $0, $1;", 1e20, 0.0, 2**31 - 1),
            ("cvt.rzi.u32.f32 $0, $1;", -1.0, 0.0, 0),
            ("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", 1.00390625, 0.0, 0x3F80),
            ("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }", 1e9, 0.0, 0x7C00),
        ],
    )
    check(
        F32,
        I64,
        [
            ("cvt.rn.f32.s64 $0, $1;", 2**60 + 2**36 + 1, 0, float(2**60 + 2**37)),
            ("cvt.rn.f32.u64 $0, $1;", -1, 0, 2.0**64),
        ],
    )
    check(
        I64,
        I32,
        [
            ("cvt.s64.s32 $0, $1;", -5, 0, -5),
            ("cvt.u64.u32 $0, $1;", -5, 0, 2**32 - 5),
            ("cvt.s64.s8 $0, $1;", 0x1FF, 0, -1),
            ("cvt.sat.u8.s32 $0, $1;", 300, 0, 255),
            ("cvta.to.global.u64 $0, 77;", 0, 0, 77),
        ],
    )


COMPARISONS = [
    *[("s32", -1, 1, names, 1) for names in ("lt", "le", "ne")],
    *[("s32", -1, 1, names, 0) for names in ("gt", "ge", "eq")],
    *[("u32", -1, 1, names, 1) for names in ("gt", "ge", "hi", "hs", "ne")],
    *[("u32", -1, 1, names, 0) for names in ("lt", "lo", "ls", "eq")],
    *[("f32", NAN, 1.0, names, 1) for names in ("ltu", "equ", "neu", "geu", "nan")],
    *[("f32", NAN, 1.0, names, 0) for names in ("lt", "eq", "ne", "ge", "num")],
    *[("b32", 7, 7, names, 1) for names in ("eq", "eq.and", "ne.or")],
    *[("b32", 7, 7, names, 0) for names in ("ne", "eq.xor")],
]


def test_comparisons() -> None:
    """With a second operand for .and, .or and .xor that is true."""

    def case(kind: str, a: Any, b: Any, name: str, expected: int) -> tuple[Any, ...]:
        third = ", !t" if "." in name else ""
        asm = f"""{{ .reg .pred p, q, t; .reg .b32 one;
            setp.eq.s32 t, 0, 1;  // false
            setp.{name}.{kind} p|q, $1, $2{third};
            selp.b32 $0, 1, 0, p; @q bra end; or.b32 $0, $0, 2;
            end: }}"""
        # q is what the comparison is not, combined in the same way
        other = {"eq.and": 0, "ne.or": 1, "eq.xor": 1}.get(name, 1 - expected)
        return asm, a, b, expected + 2 * (1 - other)

    check(I32, I32, [case(*row) for row in COMPARISONS if row[0] != "f32"])
    check(I32, F32, [case(*row) for row in COMPARISONS if row[0] == "f32"])


def test_loops_predicates_scopes_and_comments() -> None:
    asm = """
    {   /* the sum of 1 .. $1,
           by counting down */
        .reg .s32 i, total;
        .reg .pred %p<2>;
        mov.s32 i, $1; mov.s32 total, 0;
    loop:
        setp.le.s32 %p1, i, 0;
        @%p1 bra.uni done;
        {   // names and labels of an inner block hide those outside
            .reg .s32 total; mov.s32 total, 1000;
            bra loop; loop:
        }
        add.s32 total, total, i;
        sub.s32 i, i, 1;
        bra loop;
    done:
        @!%p1 mov.s32 total, -1;
        mov.s32 $0, total;
    }
    """
    check(I32, I32, [(asm, 10, 0, 55), (asm, 0, 0, 0)])


def test_operands() -> None:
    a, out = torch.tensor([3], dtype=I32), torch.zeros(2, dtype=I64)

    def on_rank() -> None:
        ptx_kernels.two_results[(1,)](out, a)

    interlace.run(on_rank, 1)
    assert out.tolist() == [3, -2]

    def tied() -> int:
        result = torch.zeros(1, dtype=I64)
        asm, memory = "add.u64 $0, $1, 16; // the address, 16 further", torch.zeros(4, dtype=I32)
        ptx_kernels.on_memory[(1,)](result, memory, asm, "=l,0,~{memory}")
        return int(result) - memory.data_ptr()

    assert interlace.run(tied, 1) == [16]


def test_elements_of_less_than_32_bits_share_a_register() -> None:
    a, out = torch.arange(250, 258).to(torch.uint8), torch.zeros(8, dtype=I32)
    interlace.run(lambda: ptx_kernels.packed[(1,)](out, a, 8), 1)
    assert out.tolist() == a.tolist()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asm", "match"),
    [
        (
            "st.u32 [$1], 1;\nmov.u32 $0, 0;\n"
            "multimem.cp.async.bulk.global.shared::cta.bulk_group [$1], [$0], 16;",
            r"instruction 'multimem\.cp\.async.*' is not known .*multimem\.st.*; line 3: multimem",
        ),
        ("@p multimem.red.u32 [$1], 1;", "'p' is not a declared predicate"),
        ("cp.async.bulk.tensor.2d.global [$1, {1, 2}], [$1];", "instruction 'cp.async.bulk.tensor"),
        ("ld.shared.u32 $0, [$1];", "state space '.shared' is not known"),
        ("ld.global.sparkling.u32 $0, [$1];", r"qualifier '\.sparkling' of 'ld\.global\.sparkling"),
        ("ld.acquire.u32 $0, [$1];", "a scope belongs to"),
        ("ld.sys.u32 $0, [$1];", "a scope belongs to"),
        ("ld.global.v2.u32 $0, [$1];", "as many registers in braces"),
        ("red.acquire.sys.add.u32 [$1], 1;", r"qualifier '\.acquire' of 'red"),
        ("atom.inc.s32 $0, [$1], 1;", "'atom' is interpreted for .u32 only"),
        ("atom.exch.u32 $0, [$1], 1;", "'atom' is interpreted for .b32, .b64 only"),
        ("add.f16x4 $0, $0, $0;", "needs a type"),
        ("add.u32 $0, $0;", "'add' takes 3 operands, not 2"),
        ("add.u32 $0, $0, $7;", r"there are 2 operands and no '\$7'"),
        ("mov.u32 $0, t;", "'t' is not a declared register"),
        ("mov.u32 $0, %pm0;", "special register '%pm0' is not known.*%tid.x"),
        ("mov.u32 $0, $1;", r"register '\$1' has 64 bits, .u32 needs 32"),
        ("ld.global.u32 $0, [$0];", r"register '\$0' has 32 bits, .u64 needs 64"),
        ("ld.global.u32 $0, $1;", "an address is written in brackets"),
        ("mul.u32 $0, $0, $0;", "needs one of .lo, .hi, .wide"),
        ("setp.u32 $0, 1, 2;", "needs a comparison"),
        ("cvt.u32.f32 $0, 0f3F800000;", "takes one of .rni, .rzi"),
        ("div.rz.f32 $0, $0, $0;", "'div.f32' is interpreted for .rn only"),
        ("fence.relaxed.sys;", r"qualifier '\.relaxed'"),
        (
            "mbarrier.init.shared.b64 [$1], 1;",
            "instruction 'mbarrier.init.shared.b64' is not known",
        ),
        ("bra nowhere;", "label 'nowhere' is not defined"),
        ("a: a: mov.u32 $0, 0;", "'a' is defined twice"),
        (".shared .b32 t;", "directive '.shared' is not known"),
        ("{ mov.u32 $0, 0;", "never closed"),
        ("mov.u32 $0, 0", "a ';' is missing; line 1: mov.u32"),
    ],
)
def test_errors_name_what_is_not_known(asm: str, match: str) -> None:
    refused(asm, match)


@pytest.mark.parametrize(
    ("constraints", "match"),
    [
        ("=r", "has 0 inputs, but the arguments make 1"),
        ("l", "has 0 results, but the arguments make 1"),
        ("=r,=r,l", "has 2 results, but the arguments make 1"),
        ("=r,m", "constraint 'm' .* is not known"),
    ],
)
def test_constraints_are_checked(constraints: str, match: str) -> None:
    refused("mov.u32 $0, 0;" if constraints != "l" else "bar.sync 0;", match, constraints)


def test_wrong_addresses_are_an_error_and_not_a_crash() -> None:
    wrong = interlace.MemoryAccessError
    with pytest.raises(wrong, match=r"misaligned: .* not a multiple of 4; line 1: ld\.u32"):
        interlace.run(lambda: ptx_kernels.in_memory("ld.u32 $0, [$1+2];", torch.zeros(4)), 1)
    with pytest.raises(wrong, match=r"out of bounds: .* address 0x8: null; line 1: st\.u64"):
        interlace.run(lambda: ptx_kernels.in_memory("st.u64 [8], 1;", torch.zeros(4)), 1)
    with pytest.raises(interlace.InterlaceError, match="trap"):
        interlace.run(lambda: ptx_kernels.in_memory("trap;", torch.zeros(4)), 1)


def test_a_loop_that_touches_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_assembly, "IDLE_STEPS", 1000)
    with pytest.raises(InlineAssemblyError, match=r"without memory accesses.*bra again"):
        interlace.run(lambda: ptx_kernels.in_memory("again: bra again;", torch.zeros(1)), 1)
