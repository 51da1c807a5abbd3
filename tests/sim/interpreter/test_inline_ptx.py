"""Inline PTX in the interpreter: results, what is refused, and how programs signal each other."""

import pytest
import torch

import interlace
from interlace.runtime.core.errors import InlineAssemblyError
from interlace_verify.ptx import inline_assembly
from sim.interpreter import ptx_kernels
from sim.ptx.ptx_forms import table

I32, I64 = torch.int32, torch.int64


def refused(asm: str, match: str, constraints: str = "=r,l") -> None:
    """No instruction of ``asm`` runs, and the error has the reason."""
    memory, out = torch.zeros(4, dtype=I32), torch.zeros(1, dtype=I32)
    with pytest.raises(InlineAssemblyError, match=match) as caught:
        interlace.run(lambda: ptx_kernels.on_memory[(1,)](out, memory, asm, constraints), 1)
    assert isinstance(caught.value, interlace.InterlaceError)
    assert isinstance(caught.value, NotImplementedError)
    assert not memory.any()


# -- registers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ptx_kernels.LETTERS, ids=str)
def test_every_letter_of_a_register(dtype: torch.dtype) -> None:
    asm = f"mov.b{8 * dtype.itemsize} $0, $2;"
    found = interlace.run(lambda: ptx_kernels.computed(asm, [1, 2], [3, -4], dtype, dtype), 1)
    assert found == [[3, -4]]


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
    found = interlace.run(lambda: ptx_kernels.computed(asm, [10, 0], [0, 0], I32, I32), 1)
    assert found == [[55, 0]]


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


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asm", "match"), table("refused"))
def test_errors_name_what_is_not_known(asm: str, match: str) -> None:
    refused(asm.replace("\\n", "\n"), match)


@pytest.mark.parametrize(
    ("constraints", "match"),
    [
        ("=r", "has 0 inputs, but the arguments need 1"),
        ("l", "has 0 results, but the arguments need 1"),
        ("=r,=r,l", "has 2 results, but the arguments need 1"),
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


# -- threads ---------------------------------------------------------------------------------------


def test_threads_count() -> None:
    """Of a program in a grid; Triton stores scalars as thread 0."""
    out = torch.zeros(12, dtype=I32)
    interlace.run(lambda: ptx_kernels.thread_numbers[(2, 3)](out), 1)
    assert out.view(3, 4).tolist() == [[0, 128, y, 3] for y in range(3)]


def test_clocks_grow_and_are_no_real_clocks() -> None:
    asm = """{ .reg .u64 a, b; mov.u64 a, %globaltimer; mov.u64 b, %clock64; sub.u64 $0, b, a; }"""
    assert interlace.run(lambda: ptx_kernels.in_memory(asm, torch.zeros(1), I64), 2) == [1000, 1000]


# -- signals ---------------------------------------------------------------------------------------


WAIT = """{{ .reg .pred p; .reg .b32 seen;
    again: {load}.u32 seen, [$1]; setp.ne.u32 p, seen, {expected}; @p bra again; }}"""


@pytest.mark.parametrize("load", ["ld.global.acquire.sys", "ld.volatile.global", "ld.global"])
def test_programs_hand_over(load: str) -> None:
    """A poll by plain loads is not a correct wait, but it must let other programs run."""

    def on_rank() -> list[int]:
        out, data, flag = (torch.zeros(n, dtype=I32) for n in (4, 4, 1))
        wait = WAIT.format(load=load, expected=1)
        ptx_kernels.hand_over[(2,)](out, data, flag, wait)
        return out.tolist()

    for seed in range(5):
        assert interlace.run(on_rank, 1, seed=seed) == [[7] * 4]


@pytest.mark.parametrize("load", ["ld.global.relaxed.sys", "ld.volatile.global"])
def test_a_wait_for_what_never_comes_is_a_deadlock(load: str) -> None:
    def on_rank() -> None:
        out, data, flag = (torch.zeros(n, dtype=I32) for n in (4, 4, 1))
        ptx_kernels.hand_over[(2,)](out, data, flag, WAIT.format(load=load, expected=2))

    with pytest.raises(interlace.DeadlockError, match=r"ptx_kernels\.py:\d+ in hand_over"):
        interlace.run(on_rank, 1)


def test_other_deadlocks() -> None:
    flags = torch.zeros(8, dtype=I32)
    asm = """{ .reg .pred p; .reg .b32 old; again: atom.acquire.sys.cas.b32 old, [$1], 1, 0;
        setp.ne.u32 p, old, 1; @p bra again; }"""
    for count in (1, 2):
        with pytest.raises(interlace.DeadlockError, match="on_pointers"):
            interlace.run(lambda n=count: ptx_kernels.on_pointers[(1,)](flags, n, asm), 1)
    with pytest.raises(interlace.DeadlockError, match="spin_outside"):
        interlace.run(lambda: ptx_kernels.spin_outside[(1,)](flags), 1)
