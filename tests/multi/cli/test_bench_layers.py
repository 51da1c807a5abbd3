"""``python -m interlace bench`` of norms, attention and its projections: right, and faults are seen."""

import pathlib
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import interlace
from cases.bench_runs import rows, run
from interlace.benchmark.requests import OPS
from interlace.groups.groups import default_group
from tiers import thorough

SHAPES: dict[str, dict[str, Any]] = {
    "all_reduce_norm": {"m": "6", "n": "16", "dtype": "bfloat16"},
    "reduce_scatter_norm": {"m": "6", "n": "16"},
    "gather_normed": {"m": "6", "n": "16", "dtype": "float16"},
    "context_parallel_attention": {"m": "8", "n": "4", "k": "8", "key_heads": 2, "batch": 2},
    "context_parallel_attention_backward": {"m": "8", "n": "2", "k": "8", "dtype": "bfloat16"},
    "matmul_all_to_all": {"m": "3", "n": "16", "k": "8", "dtype": "bfloat16"},
    "all_to_all_matmul": {"m": "3", "n": "16", "k": "8"},
    "all_to_all_grouped_matmul": {"m": "8", "n": "6", "k": "8"},
    "all_gather_grouped_matmul": {"m": "8", "n": "6", "k": "8", "dtype": "bfloat16"},
    "distributed_decode": {"m": "32", "n": "4", "k": "8", "key_heads": 2, "batch": 2},
}


METHODS = ("auto", "ring pipelined", "unfused")


@pytest.mark.parametrize("op", list(SHAPES))
def test_ops_in_layers_in_the_simulator(op: str, tmp_path: pathlib.Path) -> None:
    names = ",".join(METHODS) if "attention" in op else "all"
    options = {"baseline": "torch", "algorithm": names, "repetitions": 1, **SHAPES[op]}
    code, _, facts = run(op, tmp_path, place="sim", world_size=2, **options)
    found = rows(facts)
    # None of parts, which are not compared
    assert code == 0 and all(row["right"] in (True, None) for row in found.values())
    methods = "attention" in op  # all of them take long
    known = METHODS if methods else OPS[op].algorithms[1:]
    assert [name for name in found if "alone" not in name] == [*known, "torch"]


@thorough
def test_attention_against_torchs_own(tmp_path: pathlib.Path) -> None:
    """Its ring; where it has none, keys are gathered; gradients of gathered keys are reduced."""
    for op in ("context_parallel_attention", "context_parallel_attention_backward"):
        for more in ({}, {"key_heads": 1, "mask": "full"}):
            _, _, facts = run(op, tmp_path, m="16", n="2", k="8", repetitions=1, **more)
            assert list(rows(facts)) == ["auto", "gloo"] and facts["right"], (op, more)
    _, _, facts = run("gather_normed", tmp_path, m="8", n="16", repetitions=1)
    assert facts["right"]


def _perturbed(op: str, world_size: int) -> list[tuple[float, float]]:
    """Errors of a result, and of one that is off in one element by 3 %: of each tensor in it."""
    shape, found = SHAPES[op], []
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


@pytest.mark.parametrize("op", list(SHAPES))
def test_control_one_wrong_element_is_seen(op: str) -> None:
    for found in interlace.run(_perturbed, 2, op, 2, place="sim"):
        assert all(right <= 1 < wrong for right, wrong in found)
