"""Launches of PTX that no driver would take are errors that name what is wrong: threads, memory, values."""

from typing import Any

import pytest
import torch

import interlace
from interlace.verify import launch_ptx
from sim.ptx.modules.test_modules import HEAD, found, kernel

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
