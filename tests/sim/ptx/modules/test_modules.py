"""Modules of PTX as the ISA allows them: functions, variables, kernels, launches; what is refused."""

import pathlib
import re
import struct
from typing import Any

import pytest
import torch

import interlace
from cases.texts import texts_beside
from interlace import verify
from interlace.runtime.core.errors import InlineAssemblyError, InterlaceError, MemoryAccessError
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
NUMBERED = list(enumerate(GIVEN.tolist()))


def kernel(body: str, name: str = "kernel", directives: str = ".reqntid 32") -> str:
    return KERNEL.format(name=name, body=body, directives=directives)


def found(text: str, *, arch: int = 80, **options: Any) -> list[int]:
    """What a kernel makes of ``GIVEN``: %r3 of %r2, of which %rd2 is the address."""

    def step() -> list[int]:
        out = torch.zeros(32, dtype=torch.int32)
        launch_ptx(HEAD + text, 1, out, GIVEN.clone(), **options)
        return out.tolist()

    return interlace.run(step, 1, place="ptx", arch=arch)[0]


_TEXTS = pathlib.Path(__file__).with_name("modules.txt").read_text().partition("\n\n## ")[0]
TEXTS = dict(text.split("\n", 1) for text in re.split(r"\n\n(?=\$)", _TEXTS)[1:])
CASES = texts_beside(__file__, "modules.txt")


ERRORS = {
    each.__name__: each
    for each in (InlineAssemblyError, InterlaceError, MemoryAccessError, ValueError)
}


def written_out(text: str) -> str:
    """With the texts instead of their names, which are lines of their own."""
    return "\n".join(TEXTS.get(line, line) for line in text.splitlines())


def square(x: int) -> int:
    return -1 if x < 0 else x * x


@pytest.mark.parametrize("name", CASES)
def test_modules(name: str) -> None:
    demand, _, text = CASES[name].partition("\n")
    before, body = ["", *text.split("\n--\n")][-2:]
    module = written_out(before) + kernel(written_out(body))
    kind, demanded = demand[0], demand[2:]
    if kind == "!":
        error, _, says = demanded.partition(": ")
        with pytest.raises(ERRORS[error], match=says):
            found(module)
    else:
        names = {"square": square}
        assert found(module) == [eval(demanded, names, {"i": i, "x": x}) for i, x in NUMBERED]


# -- variables of the module -----------------------------------------------------------------------

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
    assert found(text) == [x + 1 for _, x in NUMBERED]
    with pytest.raises(interlace.MemoryAccessError, match=r"sums\.cu:7"):
        found(text.replace("[%rd2];", "[%rd2+4096];"))


def test_variables_of_another_text_are_given() -> None:
    text = ".extern .const .align 4 .b8 table[];\n" + kernel("ld.const.u32 %r3, [table+8];")
    assert found(text, variables={"table": torch.arange(4, dtype=torch.int32)}) == [2] * 32
    with pytest.raises(
        ValueError, match="variable 'table' of kernel is not in the text: pass a tensor"
    ):
        found(text)
    with pytest.raises(ValueError, match="kernel does not use variable 'tabel'; it uses table"):
        found(text, variables={"tabel": torch.zeros(4)})
    with pytest.raises(ValueError, match="'counter' has 4 bytes, got a tensor of 2"):
        found(COUNTS, variables={"counter": torch.zeros(1, dtype=torch.int16)})


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
        TEXTS["$square"]
        + kernel("mov.u32 %r3, 1;", "first")
        + kernel(
            ".shared .b32 own[12]; tex.1d.v4.s32.s32 {%r3, %r4, %r5, %r6}, [picture, {%r1}];",
            "second",
        )
        + kernel(TEXTS["$call"], "third")
    )
    assert found(text, kernel="third") == [square(x) for _, x in NUMBERED]
    assert found(text, kernel="first") == [1] * 32
    with pytest.raises(
        InlineAssemblyError, match=r"name the kernel to run; there are: first, second, third"
    ):
        found(text)
    with pytest.raises(InlineAssemblyError, match="there is no kernel 'fourth'; there are: first"):
        found(text, kernel="fourth")
    with pytest.raises(
        InlineAssemblyError, match=r"instruction 'tex.1d.v4.s32.s32' is not known.*line \d+"
    ):
        found(text, kernel="second")


def test_threads_are_those_of_the_launch() -> None:
    free = kernel(
        "mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.y; mad.lo.s32 %r3, %r4, 100, %r3;", directives=""
    )
    with pytest.raises(ValueError, match="not say how many threads it has: pass threads"):
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
            ValueError, match=r"kernel is for (exactly|at most) .* threads, but is launched"
        ):
            found(kernel("mov.u32 %r3, 0;", directives=directives), threads=threads)
    assert found(
        kernel("mov.u32 %r3, 3;", directives=".maxntid 32, 1, 1\n.minnctapersm 2"), threads=4
    ) == ([3] * 4 + [0] * 28)
    for threads in (0, (8, 8, 32), (1, 1, 1, 1)):
        with pytest.raises(
            ValueError, match="threads must be 1 to 3 whole numbers >= 1, at most 1024 in all"
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
        (text.replace("[%rd4];", "[%rd4+8];"), "is not in a parameter of the kernel"),
    ):
        with pytest.raises(ValueError, match=problem):
            interlace.run(step, 1, wrong, numbers, place="ptx")
    with pytest.raises(TypeError, match="given takes 16 bytes, got b'short'"):
        interlace.run(step, 1, text, b"short", place="ptx")


# -- launches that no driver would take ---------------------------------------------------------------

COPY = "mov.u32 %r3, %r2;"


def given(kind: str, value: Any) -> None:
    text = HEAD + f".visible .entry kernel(.param .{kind} x)\n.reqntid 1\n{{\nret;\n}}\n"
    interlace.run(lambda: launch_ptx(text, 1, value), 1, place="ptx")


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("u32", 1 << 40, "1099511627776 does not fit in x, a .u32"),
        ("u32", -(1 << 31) - 1, "-2147483649 does not fit in x, a .u32"),
        ("u64", 1.5, "x, a .u64, takes a tensor, bytes or a whole number, got 1.5"),
        ("u64", "word", "x, a .u64, takes a tensor, bytes or a whole number, got 'word'"),
        ("u32", torch.zeros(1), "x, a .u32, takes no tensor"),
        ("f32", torch.zeros(1), "x, a .f32, takes no tensor"),
        ("f32", "1.5", "x, a .f32, takes a number, got '1.5'"),
    ],
)
def test_values_are_held_against_their_parameters(kind: str, value: Any, problem: str) -> None:
    with pytest.raises((TypeError, OverflowError), match=problem):
        given(kind, value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("u32", (1 << 32) - 1), ("u32", -(1 << 31)), ("f32", 3), ("f64", 1.5), ("u8", True)],
)
def test_values_that_parameters_hold(kind: str, value: Any) -> None:
    given(kind, value)


@pytest.mark.parametrize("directives", [".reqntid 2048", ".maxntid 64, 32", ".reqntid 0"])
def test_a_text_may_not_ask_for_more_threads_than_a_program_has(directives: str) -> None:
    with pytest.raises(ValueError, match=r"kernel has \(.*\) threads; a program has 1 to 1024"):
        found(kernel(COPY, directives=directives))


def test_shared_memory_is_that_of_the_architecture() -> None:
    """What the text declares counts, too."""
    static = ".shared .b8 own[1024];" + COPY
    assert found(kernel(static), shared_bytes=226 << 10, arch=90)
    assert found(kernel(static), shared_bytes=162 << 10, arch=80)
    with pytest.raises(ValueError, match=r"shared_bytes=166912; a program of sm_80 has at most"):
        found(kernel(static), shared_bytes=163 << 10, arch=80)
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match="shared_bytes must be a whole number >= 0"):
            found(kernel(static), shared_bytes=wrong)


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (
            {"threads": 32.0},
            "threads must be 1 to 3 whole numbers >= 1, at most 1024 in all, got 32.0",
        ),
        (
            {"threads": "32"},
            "threads must be 1 to 3 whole numbers >= 1, at most 1024 in all, got 32",
        ),
        ({"grid": 2.0}, r"grid must be 1 to 3 whole numbers from 0 on, got \(2.0,\)"),
        ({"variables": [1]}, r"variables must map names to tensors, got \[1\]"),
        ({"variables": {"x": 5}}, "variable 'x' must be a tensor, got 5"),
        (
            {"variables": {"x": torch.ones(4)[::2]}},
            r"variable 'x' must be contiguous, got strides \(2,\)",
        ),
    ],
)
def test_a_launch_says_what_it_takes(named: dict[str, Any], problem: str) -> None:
    options = {"grid": 1, **named}
    with pytest.raises((TypeError, ValueError), match=problem):
        interlace.run(
            lambda: launch_ptx(HEAD + kernel(COPY), options.pop("grid"), **options), 1, place="ptx"
        )
