"""``python -m interlace bench`` of every op: right in all ways, and faults are seen."""

import pathlib
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import interlace
from cases.bench_runs import rows, run
from interlace.benchmark.requests import OPS
from interlace.groups.groups import default_group
from interlace.ops.matmul.formats import FORMATS
from tiers import few, thorough

SIZES = {"nbytes": ("sizes", "100"), "m": ("m", "6"), "n": ("n", "16"), "k": ("k", "8")}
HEADS = {"m": "8", "n": "4", "k": "8"}
OTHERS: dict[str, dict[str, Any]] = {
    "context_parallel_attention": {**HEADS, "key_heads": 2, "batch": 2},
    "context_parallel_attention_backward": {**HEADS, "n": "2", "dtype": "bfloat16"},
    "distributed_decode": {**HEADS, "m": "32", "key_heads": 2, "batch": 2},
    "matmul_all_to_all": {"m": "3", "dtype": "bfloat16"},
    "all_to_all_matmul": {"m": "3"},
    "all_to_all_grouped_matmul": {"m": "8", "n": "6"},
    "all_gather_grouped_matmul": {"m": "8", "n": "6", "dtype": "bfloat16"},
    "grouped_matmul_combine": {"m": "12", "world_size": 3},
    "dispatch": {"m": "12", "dtype": "bfloat16", "world_size": 3},
    "combine": {"m": "12", "dtype": "bfloat16", "world_size": 3},
    "matmul_reduce_scatter": {"dtype": "bfloat16", "world_size": 3},
    "matmul_all_reduce": {"world_size": 3},
    "matmul_reduce_scatter_norm": {"dtype": "float16", "world_size": 3},
    "matmul_all_reduce_norm": {"dtype": "bfloat16", "world_size": 3},
    "all_reduce_norm": {"dtype": "bfloat16"},
    "gather_normed": {"dtype": "float16"},
}
"""By op: sizes and more that are other than those of all ops."""
METHODS = ("auto", "ring pipelined", "unfused")  # all that there are take long
MOVED = [op for op, kind in OPS.items() if kind.sizes == ("nbytes",)]
ROWS = [op for op, kind in OPS.items() if "m" in kind.sizes]
SCALED = [op for op, kind in OPS.items() if "format" in kind.settings]
WIDE = {op: {"n" if op == "dispatch" else "k": "160"} for op in SCALED}
"""More than the 128 numbers of one step."""
OPS_AND_FORMATS = [(op, name) for op in SCALED for name in FORMATS]


def options_of(op: str) -> dict[str, Any]:
    collective = {"dtype": "float16", "world_size": 3} if op in MOVED else {"world_size": 2}
    return dict(SIZES[size] for size in OPS[op].sizes) | collective | OTHERS.get(op, {})


def checked_in_every_way(op: str, folder: pathlib.Path) -> dict[str, Any]:
    methods = METHODS if "attention" in op else ()
    named = {"algorithm": ",".join(methods) or "all", "baseline": "torch", "repetitions": 1}
    code, text, facts = run(op, folder, place="sim", **{**options_of(op), **named})
    found = rows(facts)
    # None of parts, which are not compared
    assert code == 0 and all(row["right"] in (True, None) for row in found.values())
    assert "say nothing about any machine" in text
    known = OPS[op].algorithms[op in ROWS :]
    left_out = {each.partition(" (")[0] for each in facts["results"][0]["left_out"]}
    expected = methods or [name for name in known if name not in left_out]
    assert [name for name in found if "alone" not in name] == [*expected, "torch"]
    result: dict[str, Any] = facts["results"][0]
    return result


@pytest.mark.parametrize("op", [*MOVED, *ROWS])
def test_every_op_is_checked_in_every_way(op: str, tmp_path: pathlib.Path) -> None:
    result = checked_in_every_way(op, tmp_path)
    if op in MOVED:  # 100 bytes hold 48 elements in 3 equal parts, few enough for any algorithm
        assert result["nbytes"] == 96 and not result["left_out"]


@pytest.mark.parametrize(
    ("op", "name"),
    few(OPS_AND_FORMATS, *OPS_AND_FORMATS[:: len(FORMATS) + 1], ("dispatch", "nvfp4")),
)
def test_operands_in_block_scaled_formats(op: str, name: str, tmp_path: pathlib.Path) -> None:
    """The moved bytes are rows with their scales and padding, or rows of the output."""
    given = {**options_of(op), "format": name, "dtype": "float32", **WIDE[op]}
    _, _, facts = run(op, tmp_path, place="sim", algorithm="unfused", repetitions=1, **given)
    assert facts["right"]
    result, kind = facts["results"][0], OPS[op]
    shape, width = result["shape"], getattr(kind, "communicated", "n")
    row = FORMATS[name].row_bytes(shape[width])
    whole = op != "dispatch" and width == "n"
    assert result["format"] == name
    assert result["nbytes"] == shape["m"] * (4 * shape["n"] if whole else row)


def test_what_formats_do_not_fit(tmp_path: pathlib.Path) -> None:
    for op, more, said in (
        ("all_gather_matmul", {"k": "33", "format": "mxfp4"}, "--k 33: mxfp4 has two numbers in"),
        ("dispatch", {"n": "33", "format": "nvfp4"}, "--n 33: nvfp4 has two numbers in a byte"),
        ("combine", {"format": "mxfp8"}, "--format mxfp8: combine has no such setting"),
    ):
        with pytest.raises(ValueError, match=said):
            run(op, tmp_path, place="sim", **{**options_of(op), **more})


@thorough
def test_attention_against_torchs_own(tmp_path: pathlib.Path) -> None:
    """The baseline is torch's ring. Where torch has no ring, the baseline gathers the keys."""
    for op in ("context_parallel_attention", "context_parallel_attention_backward"):
        for more in ({}, {"key_heads": 1, "mask": "full"}):
            _, _, facts = run(op, tmp_path, m="16", n="2", k="8", repetitions=1, **more)
            assert list(rows(facts)) == ["auto", "gloo"] and facts["right"], (op, more)
    _, _, facts = run("gather_normed", tmp_path, m="8", n="16", repetitions=1)
    assert facts["right"]


def _perturbed(op: str, world_size: int) -> list[tuple[float, float]]:
    """Return the errors of a result, and of results with one element changed by 3 %."""
    shape, found = options_of(op), []
    kind: Any = OPS[op]
    sizes = [int(shape[size]) for size in kind.sizes]
    more = {name: value for name, value in shape.items() if name in kind.settings}
    subject = kind(default_group().place, torch.float32, *sizes, **more)
    for index in range(len(tree_leaves(subject.inputs(0)))):
        result = subject.ours("unfused")(*subject.inputs(0))
        right = subject.check(result, 0)
        leaves = tree_leaves(result)
        leaf = leaves[index % len(leaves)]
        leaf.view(-1)[leaf.abs().argmax()] *= 1.03
        found.append((right, subject.check(result, 0)))
    return found


def _wrong_scale(op: str, name: str) -> tuple[float, float]:
    """Return the errors of a result, and of a result with another scale of an operand."""
    kind: Any = OPS[op]
    subject = kind(default_group().place, torch.float32, 8, 16, 160, format=name)
    first, *others = subject.inputs(0)
    right = subject.check(subject.ours("unfused")(first, *others), 0)
    first.scales.view(torch.uint8)[:, -1] ^= 0x08  # in memory as the op reads it
    return right, subject.check(subject.ours("unfused")(first, *others), 0)


@pytest.mark.parametrize("name", FORMATS)
def test_control_a_wrong_scale_is_seen(name: str) -> None:
    for right, wrong in interlace.run(_wrong_scale, 2, "all_gather_matmul", name, place="sim"):
        assert right <= 1 < wrong


@pytest.mark.parametrize("op", [op for op in ROWS if options_of(op)["world_size"] == 2])
def test_control_one_wrong_element_is_seen(op: str) -> None:
    for found in interlace.run(_perturbed, 2, op, 2, place="sim"):
        assert all(right <= 1 < wrong for right, wrong in found)
