"""Modules of PTX as the ISA allows them: functions, variables, several kernels; what is refused."""

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import verify
from interlace.runtime.core.errors import InterlaceError, MemoryAccessError
from interlace.runtime.ptx.instruction import InlineAssemblyError
from interlace.verify import launch_ptx

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
KERNEL = """
.visible .entry {name}(.param .u64 {name}_out, .param .u64 {name}_in) {directives}
{{
    .reg .pred %p<8>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [{name}_out]; ld.param.u64 %rd2, [{name}_in];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd2];
    {body}
    st.global.u32 [%rd1], %r3;
    ret;
}}
"""
GIVEN = torch.arange(32, dtype=torch.int32) * 7 - 50


def kernel(body: str, name: str = "kernel", directives: str = ".reqntid 32") -> str:
    return KERNEL.format(name=name, body=body, directives=directives)


def found(text: str, *, arch: int = 80, **options: Any) -> list[int]:
    """What a kernel makes of ``GIVEN``: %r3 of %r2, of which %rd2 is the address."""

    def step() -> list[int]:
        out = torch.zeros(32, dtype=torch.int32)
        launch_ptx(HEAD + text, 1, out, GIVEN.clone(), **options)
        return out.tolist()

    return interlace.run(step, 1, place="ptx", arch=arch)[0]


def of_each(function: Callable[[int], int]) -> list[int]:
    return [function(int(each)) for each in GIVEN]


# -- functions -------------------------------------------------------------------------------------

SQUARE = """
.func (.param .b32 square_result) square(.param .b32 square_x)
{
    .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.b32 %r1, [square_x];
    setp.lt.s32 %p1, %r1, 0;
    @%p1 bra $negative;
    mul.lo.s32 %r2, %r1, %r1;
    st.param.b32 [square_result], %r2;
    ret;
$negative:
    st.param.b32 [square_result], -1;
    ret;
}
"""
CALL = """
{ // callseq 0
    .param .b32 param0; st.param.b32 [param0+0], %r2;
    .param .b32 retval0;
    call.uni (retval0), square, (param0);
    ld.param.b32 %r3, [retval0+0];
}"""


def square(x: int) -> int:
    return -1 if x < 0 else x * x


def test_a_function_returns_where_it_was_called() -> None:
    twice = CALL + "mov.u32 %r4, %r3;" + CALL + "add.s32 %r3, %r3, %r4;"
    assert found(SQUARE + kernel(twice)) == of_each(lambda x: 2 * square(x))


def test_only_threads_whose_predicate_holds_call() -> None:
    body = "setp.gt.s32 %p1, %r2, 20; mov.u32 %r3, 5;" + CALL.replace("call", "@%p1 call").replace(
        "ld.param", "@%p1 ld.param"
    )
    assert found(SQUARE + kernel(body)) == of_each(lambda x: x * x if x > 20 else 5)


def test_functions_that_take_and_give_registers() -> None:
    """Their own copies: what a function does to a parameter, its caller does not see."""
    text = """
.visible .func (.reg .b32 twice, .reg .pred odd) both(.reg .b32 x, .param .b32 y)
{
    .reg .b32 one;
    ld.param.u32 one, [y];
    and.b32 one, x, one;
    setp.eq.u32 odd, one, 1;
    add.s32 x, x, x;
    mov.u32 twice, x;
}
"""
    body = "call (%r4, %p1), both, (%r2, 1); selp.b32 %r5, 1000, 0, %p1; add.s32 %r3, %r4, %r5; "
    body += "add.s32 %r3, %r3, %r2;"
    assert found(text + kernel(body)) == of_each(lambda x: 3 * x + 1000 * (x & 1))


def test_structures_go_in_and_out_by_memory() -> None:
    text = """
.func (.param .align 8 .b8 result[16]) swapped(.param .align 8 .b8 given[16])
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>;
    ld.param.v2.u32 {%r1, %r2}, [given+8];
    mov.b64 %rd1, given;
    ld.param.u64 %rd2, [%rd1];
    st.param.v2.b32 [result], {%r2, %r1};
    st.param.b64 [result+8], %rd2;
    ret;
}
"""
    body = """{
    .param .align 8 .b8 given[16]; st.param.v4.b32 [given], {%r1, %r1, %r1, %r2};
    .param .align 8 .b8 back[16];
    call (back), swapped, (given);
    ld.param.b32 %r3, [back]; ld.param.b32 %r4, [back+12]; mad.lo.s32 %r3, %r4, 1000, %r3;
    }"""
    assert found(text + kernel(body)) == [1000 * i + int(x) for i, x in enumerate(GIVEN)]


def test_labels_and_tables_are_those_of_each_call() -> None:
    text = """
.func (.param .b32 result) chosen(.param .b32 x)
{
    .reg .b32 %r<4>;
    ld.param.b32 %r1, [x];
    and.b32 %r1, %r1, 1;
  $table: .branchtargets $even, $odd;
    brx.idx %r1, $table;
$even:
    st.param.b32 [result], 100;
    bra.uni $end;
$odd:
    st.param.b32 [result], 200;
$end:
    ret;
}
"""
    once = CALL.replace("square", "chosen")
    body = (
        once + "mov.u32 %r4, %r3; add.s32 %r2, %r2, 1;" + once + "mad.lo.s32 %r3, %r4, 1000, %r3;"
    )
    assert found(text + kernel(body)) == of_each(lambda x: 200_100 if x & 1 else 100_200)


POINTERS = """
.func (.param .b32 result) cube(.param .b32 x)
{
    .reg .b32 %r<4>;
    ld.param.b32 %r1, [x];
    mul.lo.s32 %r2, %r1, %r1; mul.lo.s32 %r2, %r2, %r1;
    st.param.b32 [result], %r2;
    ret;
}
.func of_another_shape(.param .b64 x)
{
    trap;
}
.global .align 8 .u64 table[4] = {square, cube, of_another_shape, 1};
"""
BY_POINTER = """
    and.b32 %r4, %r1, {mask}; mov.u64 %rd4, table; mad.wide.u32 %rd4, %r4, 8, %rd4;
    ld.global.u64 %rd5, [%rd4];
    setp.gt.s32 %p1, %r2, -40; mov.u32 %r3, 7;
    {{ .param .b32 param0; st.param.b32 [param0], %r2; .param .b32 retval0;
    $shape: .callprototype (.param .b32 _) _ (.param .b32 _);
    @%p1 call (retval0), %rd5, (param0), $shape;
    @%p1 ld.param.b32 %r3, [retval0]; }}"""


def test_a_call_by_an_address_is_of_the_function_that_it_is_of() -> None:
    """Threads of a warp apart, of a table and of one that the kernel has taken; or of none."""
    expected = [
        7 if x <= -40 else x**3 if i & 1 else square(x) for i, x in enumerate(GIVEN.tolist())
    ]
    text = SQUARE + POINTERS + kernel(BY_POINTER.format(mask=1))
    assert found(text) == expected
    taken = BY_POINTER.format(mask=1).replace("setp", "mov.u64 %rd5, cube; setp", 1)
    assert found(SQUARE + POINTERS + kernel(taken)) == of_each(lambda x: 7 if x <= -40 else x**3)
    with pytest.raises(InterlaceError, match=r"gave up with .*call \(retval0\), %rd5"):
        found(SQUARE + POINTERS + kernel(BY_POINTER.format(mask=3)))


INWARDS = SQUARE.replace(
    "mul.lo.s32 %r2, %r1, %r1;", "{ .param .b32 p; .param .b32 q; call (q), square, (p); }"
)


@pytest.mark.parametrize(
    ("text", "body", "problem"),
    [
        (INWARDS, CALL, "'square' calls itself"),
        (SQUARE, "call square, (%r2);", "'square' gives 1 results and takes 1 parameters"),
        (SQUARE, CALL.replace(".param .b32 p", ".param .b16 p"), "'param0' is smaller than 'square_x'"),
        (".extern .func (.param .b32 r) sqrtf(.param .b32 x);", CALL.replace("square", "sqrtf"),
         "the function 'sqrtf' is not known"),
        ("", "{ .local .b8 own[]; }", "'own' has no size"),
        (".global .texref picture;", "mov.u64 %rd4, picture;", "'picture' is not a declared register"),
        (".global .u32 w = elsewhere;", "ld.global.u32 %r3, [w];", "w begins as 'elsewhere', which is"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(text: str, body: str, problem: str) -> None:
    with pytest.raises(InlineAssemblyError, match=problem):
        found(text + kernel(body))


# -- the memory of a thread ------------------------------------------------------------------------

DEPOT = """
    .local .align 16 .b8 __local_depot0[32]; .reg .b64 %SP, %SPL;
    mov.u64 %SPL, __local_depot0; cvta.local.u64 %SP, %SPL;
    and.b32 %r4, %r1, 7; mul.wide.u32 %rd4, %r4, 4;
    add.u64 %rd5, %SPL, %rd4; add.u64 %rd6, %SP, %rd4;
"""


def test_local_memory_is_a_threads_own_by_either_address() -> None:
    body = (
        DEPOT
        + """
    st.local.u32 [%rd5], %r2; ld.u32 %r5, [%rd6];
    add.s32 %r5, %r5, 1; st.u32 [%rd6], %r5;
    ld.local.v4.u32 {%r6, %r7, %r8, %r9}, [__local_depot0+16];
    ld.volatile.local.u32 %r3, [%rd5]; isspacep.local %p1, %rd6; isspacep.global %p2, %rd6;
    @!%p1 mov.u32 %r3, 0; @%p2 mov.u32 %r3, 0;"""
    )
    assert found(kernel(body)) == of_each(lambda x: x + 1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("ld.local.u32 %r3, [%rd5+8];",
         "byte 32 of the local memory of thread 6, which has 32 bytes; line 17: ld.local.u32 %r3"),
        ("st.local.v2.u32 [__local_depot0+32], {%r1, %r2};", "byte 32 of the local memory"),
        ("ld.local.u32 %r3, [__local_depot0+-4];", "byte -4 of the local memory"),
        ("st.u32 [%rd6+28], %r1;", "byte 32 of the local memory"),
        ("shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; ld.local.u32 %r3, [%rd5+1];", "not a multiple of 4"),
        ("""mov.b64 {%r5, %r6}, %rd6; shfl.sync.idx.b32 %r5, %r5, 3, 31, -1;
            mov.b64 %rd7, {%r5, %r6}; ld.u32 %r3, [%rd7];""",
         "local memory of thread 0, which is in that of thread 3"),
    ],
)  # fmt: skip
def test_local_memory_is_checked(body: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        found(kernel(DEPOT + body))


def test_memory_of_functions_lies_above_their_callers() -> None:
    """And of two calls in the same place: who reads what it has not written sees the other's."""
    text = """
.func (.param .b32 result) kept(.param .b32 x, .param .b32 writes)
{
    .local .align 4 .b8 __local_depot1[8]; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.b32 %r1, [x]; ld.param.b32 %r2, [writes];
    setp.ne.u32 %p, %r2, 0;
    @%p st.local.u32 [__local_depot1+4], %r1;
    ld.local.u32 %r3, [__local_depot1+4];
    st.param.b32 [result], %r3;
    ret;
}
"""
    body = DEPOT + "st.local.u32 [__local_depot0+28], 1; call (%r5), kept, (%r2, 1); "
    body += (
        "call (%r3), kept, (0, 0); ld.local.u32 %r6, [__local_depot0+28]; add.s32 %r3, %r3, %r6;"
    )
    assert found(text + kernel(body)) == of_each(lambda x: x + 1)


# -- variables of the module -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "name", "kind", "expected"),
    [
        (".global .u32 word = 7", "word", "u32", 7),
        (".const .align 8 .b8 bytes[8] = {1, 0x2, 03}", "bytes", "u32", 1 | 2 << 8 | 3 << 16),
        (".global .f32 real = 0f3F800000", "real", "u32", 0x3F800000),
        (".const .f32 reals[] = {0.0, -1.5}", "reals+4", "s32", 0xBFC00000 - 2**32),
        (".global .s32 square[2][2] = {{1, -2}, {3, 4}}", "square+4", "s32", -2),
        (".visible .global .v2 .u32 pair[2] = {1, 2, 3, 4}", "pair+12", "u32", 4),
        (".global .align 4 .u16 halves[4]", "halves+4", "u32", 0),
    ],
)  # fmt: skip
def test_variables_begin_as_the_text_says(
    declared: str, name: str, kind: str, expected: int
) -> None:
    space = declared.partition(".const" if ".const" in declared else ".global")[1]
    assert found(f"{declared};" + kernel(f"ld{space}.{kind} %r3, [{name}];")) == [expected] * 32


def test_a_variable_may_begin_as_the_address_of_another() -> None:
    text = ".global .u32 words[4] = {5, 6, 7, 8};\n.global .u64 there[2] = {0, generic(words)+8};"
    body = "ld.global.u64 %rd4, [there+8]; ld.u32 %r3, [%rd4]; mov.u64 %rd5, words+4; "
    body += "ld.global.u32 %r4, [%rd5+8]; mad.lo.s32 %r3, %r4, 10, %r3;"
    assert found(text + kernel(body)) == [87] * 32


COUNTS = ".global .u32 counter = 40;" + kernel("atom.global.add.u32 %r3, [counter], 1;")


def test_variables_are_a_ranks_own_from_launch_to_launch() -> None:
    def step() -> list[int]:
        out, counts = torch.zeros(32, dtype=torch.int32), []
        for _ in range(1 + interlace.get_rank()):
            launch_ptx(HEAD + COUNTS, 1, out, GIVEN.clone())
            counts.append(int(out.max()))
        return counts

    assert interlace.run(step, 2, place="ptx") == [[71], [71, 103]]
    assert interlace.run(step, 1, place="ptx") == [[71]]


def test_code_stands_behind_directives_on_their_line() -> None:
    """It is run, and lines of findings are those of the directive."""
    loc = '.file 1 "sums.cu" .loc 1 7 0, function_name $L__info, inlined_at 1 9 3 '
    text = kernel("add.s32 %r3, %r2, 1; .loc 1 5 0\n").replace(
        "ld.global.u32", loc + "ld.global.u32"
    )
    assert found(text) == of_each(lambda each: each + 1)
    with pytest.raises(interlace.MemoryAccessError, match=r"sums\.cu:7"):
        found(text.replace("[%rd2];", "[%rd2+4096];"))


def test_variables_of_another_text_are_given() -> None:
    text = ".extern .const .align 4 .b8 table[];\n" + kernel("ld.const.u32 %r3, [table+8];")
    assert found(text, variables={"table": torch.arange(4, dtype=torch.int32)}) == [2] * 32
    with pytest.raises(ValueError, match="variable 'table' of kernel is not in the text: give it"):
        found(text)
    with pytest.raises(ValueError, match="kernel uses no variable 'tabel'; it uses table"):
        found(text, variables={"tabel": torch.zeros(4)})
    with pytest.raises(ValueError, match="'counter' has 4 bytes, and is given 2"):
        found(COUNTS, variables={"counter": torch.zeros(1, dtype=torch.int16)})


@pytest.mark.parametrize("space", ["global", "const"])
def test_variables_are_checked(space: str) -> None:
    text = f".{space} .u32 words[4];\n" + kernel(f"ld.{space}.u32 %r3, [words+16];")
    with pytest.raises(
        MemoryAccessError, match=r"loads .* at byte 16 of variable words of rank 0 \(16 bytes\)"
    ):
        found(text)


def test_nobody_stores_to_const_memory() -> None:
    body = "cvta.const.u64 %rd4, words; mov.u32 %r4, 5; st.u32 [%rd4+4], %r4; ld.u32 %r3, [%rd4+4];"
    text = " .u32 words[4] = {1, 2, 3, 4};\n" + kernel(body)
    with pytest.raises(MemoryAccessError, match=r"words of rank 0.*it is of \.const memory"):
        found(".const" + text)
    assert found(".global" + text.replace("cvta.const", "cvta.global")) == [5] * 32


def test_races_on_variables_are_found() -> None:
    """Two programs write the same word; an atomic is none."""

    def kinds(text: str) -> set[str]:
        def step() -> None:
            launch_ptx(HEAD + text, 2, torch.zeros(32, dtype=torch.int32), GIVEN)

        return {each.kind for each in verify.races(step, 1, seeds=1, arch=80).findings}

    quiet = ".global .u32 counter;" + kernel("{atomic} mov.u32 %r3, 0;").replace(
        "st.global.u32 [%rd1], %r3;", ""
    )
    assert kinds(quiet.replace("{atomic}", "red.global.add.u32 [counter], 1;")) == set()
    assert "write-write" in kinds(quiet.replace("{atomic}", "st.global.u32 [counter], %r1;"))


# -- kernels and their launches --------------------------------------------------------------------


def test_a_launch_names_one_of_several_kernels() -> None:
    """Shared memory of the others, and what they have that is not known, does not matter."""
    text = (
        SQUARE
        + kernel("mov.u32 %r3, 1;", "first")
        + kernel(
            ".shared .b32 own[12]; tex.1d.v4.s32.s32 {%r3, %r4, %r5, %r6}, [picture, {%r1}];",
            "second",
        )
        + kernel(CALL, "third")
    )
    assert found(text, kernel="third") == of_each(square)
    assert found(text, kernel="first") == [1] * 32
    with pytest.raises(
        InlineAssemblyError, match=r"has to be named; there are: first, second, third"
    ):
        found(text)
    with pytest.raises(InlineAssemblyError, match="there is no kernel 'fourth'; there are: first"):
        found(text, kernel="fourth")
    with pytest.raises(
        InlineAssemblyError, match=r"instruction 'tex.1d.v4.s32.s32' is not known.*line \d+"
    ):
        found(text, kernel="second")


def test_a_branch_beyond_its_targets_is_an_error_with_its_line() -> None:
    body = (
        "table: .branchtargets A, B; {} brx.idx %r4, table; A: mov.b32 %r3, 1; B: mov.b32 %r3, 2;"
    )
    assert found(kernel(body.format("and.b32 %r4, %r1, 1;"))) == [2] * 32
    with pytest.raises(interlace.InterlaceError, match=r"index 2 of 2 targets; line \d+: brx.idx"):
        found(kernel(body.format("mov.b32 %r4, %r1;")))


def test_threads_are_those_of_the_launch() -> None:
    free = kernel(
        "mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.y; mad.lo.s32 %r3, %r4, 100, %r3;", directives=""
    )
    with pytest.raises(ValueError, match="not say how many threads it has: give threads"):
        found(free)
    assert found(free, threads=20) == [20] * 20 + [0] * 12
    by_rows = free.replace(
        "mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.y; mad.lo.u32 %r1, %r1, 8, %tid.x;"
    )
    assert found(by_rows, threads=(8, 3)) == [
        100 * (i // 8) + 8 if i < 24 else 0 for i in range(32)
    ]
    for directives, threads in ((".reqntid 32", 16), (".maxntid 4, 4", 32)):
        with pytest.raises(
            ValueError, match=r"kernel is for (exactly|at most) .* threads, and is launched"
        ):
            found(kernel("mov.u32 %r3, 0;", directives=directives), threads=threads)
    assert found(
        kernel("mov.u32 %r3, 3;", directives=".maxntid 32, 1, 1\n.minnctapersm 2"), threads=4
    ) == ([3] * 4 + [0] * 28)
    for threads in (0, (8, 8, 32), (1, 1, 1, 1)):
        with pytest.raises(
            ValueError, match="threads must be 1 to 3 whole numbers from 1 on, 1024 in all"
        ):
            found(free, threads=threads)


def test_the_last_warp_need_not_be_whole() -> None:
    """Its lanes vote, shuffle and meet as if the others had left."""
    body = """
    vote.sync.ballot.b32 %r3, %p1, -1; bar.warp.sync -1; not.pred %p2, %p1;
    vote.sync.ballot.b32 %r3, %p2, -1; shfl.sync.idx.b32 %r3, %r3, 0, 31, -1; bar.sync 0, 32;"""
    assert found(kernel(body, directives=""), threads=5) == [0b11111] * 5 + [0] * 27


def test_parameters_that_are_structures() -> None:
    """By name, by address, and by a generic address; beyond their end is an error."""
    text = kernel("""
    ld.param.v2.u32 {%r3, %r4}, [given+8]; mov.b64 %rd4, given; and.b32 %r5, %r1, 3;
    mul.wide.u32 %rd5, %r5, 4; add.s64 %rd4, %rd4, %rd5; ld.param.u32 %r5, [%rd4];
    cvta.param.u64 %rd6, %rd4; ld.u32 %r6, [%rd6]; sub.s32 %r6, %r6, %r5;
    mad.lo.s32 %r3, %r5, 100, %r3; add.s32 %r3, %r3, %r6;""").replace(
        "kernel_in)", "kernel_in, .param .align 4 .b8 given[16])"
    )

    def step(ptx: str, given: bytes) -> list[int]:
        out = torch.zeros(32, dtype=torch.int32)
        launch_ptx(HEAD + ptx, 1, out, GIVEN.clone(), given)
        return out.tolist()

    numbers = struct.pack("<4i", 1, 2, 3, 4)
    assert interlace.run(step, 1, text, numbers, place="ptx") == [
        [100 * (i % 4 + 1) + 3 for i in range(32)]
    ]
    for wrong, problem in (
        (text.replace("[given+8]", "[given+12]"), "byte 12 of given, which has 16 bytes"),
        (text.replace("[%rd4];", "[%rd4+8];"), "is in no parameter of the kernel"),
    ):
        with pytest.raises(ValueError, match=problem):
            interlace.run(step, 1, wrong, numbers, place="ptx")
    with pytest.raises(TypeError, match="given is 16 bytes, and not b'short'"):
        interlace.run(step, 1, text, b"short", place="ptx")
