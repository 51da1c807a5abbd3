"""interlace.functional on ranks: values, gradients, AsyncTensor, misuse, ends of processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.ops.collectives.records import OPS as COLLECTIVES
from multi.functional import functional_ranks as ranks, functional_ranks_misuse as wrong
from multi.functional.functional_ranks_cases import CASES
from tiers import few, thorough

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
SUM = [[3.0, 3.0], [3.0, 3.0]]


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


# -- gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [3, 2])  # of two ranks every permutation is its own inverse
def test_values_and_gradients_of_every_op(world_size: int) -> None:
    assert on_ranks(ranks.every_case, world_size, "", None) == [list(CASES)] * world_size


def test_every_collective_has_a_case() -> None:
    names = {case.partition(" ")[0] for case in CASES}
    assert {op.name for op in COLLECTIVES} - names == {"rank"}  # the rank itself


def test_only_what_requires_gradients_gets_them() -> None:
    on_ranks(ranks.some_inputs_only, 2)


def test_gradients_with_odd_strides() -> None:
    on_ranks(ranks.odd_gradients, 2)


def test_gradients_of_half_precision() -> None:
    on_ranks(ranks.half_precision, 2)


def test_second_derivatives() -> None:
    on_ranks(ranks.second_derivatives, 2)


def test_without_gradients() -> None:
    text = "interlace.reduce with reduce_op '{}' has no gradient"
    expected = [text.format("max"), text.format("min")]
    assert on_ranks(ranks.without_gradients, 2) == [expected] * 2


@pytest.mark.parametrize(
    "name, save_gathered, expected",
    [
        # the fused ops are each other's gradients; the weight's matmul is between start and wait
        (
            "all_gather_matmul",
            True,
            ["matmul_reduce_scatter", "wait_tensor", "mm", "wait_tensor"],
        ),
        (
            "all_gather_matmul",
            False,
            ["all_gather", "matmul_reduce_scatter", "wait_tensor", "mm", "wait_tensor"],
        ),
        ("matmul_reduce_scatter", True, ["all_gather_matmul", "wait_tensor", "wait_tensor", "mm"]),
        ("matmul_all_reduce", True, ["all_reduce", "wait_tensor", "mm", "mm"]),
    ],
)
def test_what_runs_in_backward(name: str, save_gathered: bool, expected: list[str]) -> None:
    assert on_ranks(ranks.order_of_backward, 2, name, save_gathered) == [expected] * 2


@pytest.mark.parametrize("async_op", [False, True])
def test_interlaces_own_fused_ops_record_gradients(async_op: bool) -> None:
    """Of unequal shards, too."""
    for rank, found in enumerate(on_ranks(ranks.eager_fused_ops, 2, async_op)):
        scale = 1.0 + rank
        assert found == {
            "all_gather_matmul": [True, [], 144.0],
            "all_gather_matmul ['return_gathered']": [True, [], 144.0],
            "matmul_reduce_scatter": [True, [], 48.0 * scale],
            "matmul_reduce_scatter ['reduce_op']": [True, [], 24.0 * scale],
            "matmul_all_reduce": [True, [], 96.0 * scale],
            "all_gather_matmul ['gather_dim']": [True, [], 36.0],
            "matmul_reduce_scatter ['scatter_dim']": [True, [], 36.0],
            "refused": ["ValueError"],
        }


# -- AsyncTensor ---------------------------------------------------------------------------------------


def test_asking_for_sizes_does_not_wait() -> None:
    """A wait would end in a deadlock: the other rank calls only after the first has asked."""
    first, second = on_ranks(ranks.second_group, 2, ranks.what_does_not_wait)
    assert second == [SUM]
    assert first == [
        (2, 2), (2, 2), (2, 1), torch.float32, "cpu", 2, 4, True, False, 2, (4,), True, False,
        [3.0] * 4, SUM, True,
    ]  # fmt: skip


def test_an_async_tensor_is_a_tensor() -> None:
    for found in on_ranks(ranks.behaviours, 2):
        assert found == {
            "repr": "AsyncTensor(tensor([[3., 3.],\n        [3., 3.]]))",
            "list": SUM,
            "numpy": SUM,
            "item": 12.0,
            "float": 12.0,
            "index": 3.0,
            "pickle": SUM,
            "deepcopy": SUM,
            "save": SUM,
            "two": [[9.0, 9.0]] * 2,
            "cat": [*SUM, [6.0, 6.0], [6.0, 6.0], [0.0, 0.0]],
            "stack": torch.Size([2, 2, 2]),
            "types": [torch.Tensor] * 3,
            "in place": [[14.0, 10.0], [10.0, 10.0]],
            "copy_": [[6.0, 6.0]] * 2,
            "interlace.all_reduce": [[6.0, 6.0]] * 2,
            "functional": [[6.0, 6.0]] * 4,
            "equal": (True, True),
            "iter": SUM,
            "contains": True,
            "bool": True,
            "to": ([[3, 3], [3, 3]], torch.float64),
            "parameter": SUM,
            "new": ([0.0, 0.0], [[0.0, 0.0]] * 2),
            "linear": [[18.0, 18.0]] * 2,
            "split": [[[3.0, 3.0]]] * 2,
            "data_ptr": True,
            "data": SUM,
            "where": SUM,
            "foreach": [[[4.0, 4.0]] * 2] * 2,
        }


def test_async_tensors_and_autograd() -> None:
    threes, twos = [[3.0, 3.0]] * 2, [[2.0, 2.0]] * 2
    expected = [threes, twos, True, False, False, [[1.0, 1.0]], [2.0, 2.0]]
    assert on_ranks(ranks.with_requires_grad, 2) == [expected] * 2


@pytest.mark.parametrize("backend", ["gloo", "interlace"])
def test_async_tensors_in_torch_distributed(tmp_path: Path, backend: str) -> None:
    results = on_ranks(ranks.in_torch_distributed, 2, str(tmp_path / "store"), backend)
    assert results == [[[[6.0, 6.0]] * 2, [SUM, SUM]]] * 2


def test_waits_in_any_order_and_none() -> None:
    expected = [[[9.0, 9.0]] * 2, SUM, [[6.0, 6.0]] * 2, 3.0 * sum(range(100))]
    assert on_ranks(ranks.other_orders, 2) == [expected] * 2


def test_results_leave_nothing_in_torchs_registry() -> None:
    assert on_ranks(ranks.unwaited_in_graphs, 2) == [0, 0]


def test_failures_are_raised_again() -> None:
    expected = "ValueError: all_reduce: shape of tensor differs between ranks: (1,) on rank 0, "
    for found in on_ranks(ranks.failed_twice, 2):
        assert len(found) == 4 and all(each.startswith(expected) for each in found), found


EXIT = """
import sys, torch, interlace
from interlace import functional
def body(traced):
    x = torch.ones(4, requires_grad=traced)
    sys.kept = [functional.all_reduce(x) for _ in range(3)]
    functional.all_gather(x)
if __name__ == "__main__":
    interlace.run(body, 2, {traced}, place={place!r})
    interlace.run(body, 1, {traced}, place="sim")
    import os
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    body({traced})
"""


@thorough
@pytest.mark.parametrize("place, traced", few([("sim", False), ("shm", True)], ("sim", False)))
def test_unwaited_results_at_exit(tmp_path: Path, place: str, traced: bool) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXIT.format(place=place, traced=traced))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


# -- out, misuse ---------------------------------------------------------------------------------------


def test_out() -> None:
    on_ranks(ranks.with_out, 2)


def test_misuse_on_one_rank_is_raised_on_all() -> None:
    """And every op after it works, which it would not if a rank had missed the refusal."""
    parts = {
        "reduce_op": "ValueError: * reduce_op must be one of sum, avg, product, *, got 'median'",
        "reduce_op differs": "ValueError: all_reduce: op differs between ranks: sum on rank 0, max",
        "shape differs": "ValueError: all_reduce: shape of tensor differs between ranks: (4, 4)",
        "gathered shape": "ValueError: all_gather: shape of output[0] differs between ranks: (4, 4)",
        "dtype differs": "TypeError: all_reduce: dtype of tensor differs between ranks",
        "gather_dim": "ValueError: * gather_dim must be within -2..1, got 2",
        "scatter_dim": "ValueError: * scatter_dim must be within -2..1, got -3",
        "not divisible": "ValueError: * length 3, which the group's size 2 does not divide",
        "src": "ValueError: * src must be within 0..1, got 2",
        "src differs": "ValueError: broadcast: root differs between ranks: 0 on rank 0, 1 on rank 1",
        "scatter src": "ValueError: * src must be within 0..1, got -5",
        "gather dst": "ValueError: * dst must be within 0..1, got 9",
        "splits": "ValueError: * input_split_sizes must have one entry per rank, 2, got 1",
        "permutation": "ValueError: * src_dst must have each rank of 0..1 once, got [0, 0]",
        "out shape": "ValueError: * out must be (8, 4) of torch.float32 on cpu, got (3, ",
        "out dtype": "ValueError: * out must be (4, 4) of torch.float32 on cpu, got (4, 4) of "
        "torch.float64",
        "weight": "ValueError: * weight[0] has 3 rows, input has k = 4",
        "scattered": "ValueError: * the shape of input without k differs between ranks: (4,) on rank 0",
        "length": "ValueError: * length must be 1, rank 1's part, got 2",
        "length of rows": "ValueError: * length must be 1, rank 1's part, got 2",
        "not a tensor": "TypeError: * input must be a tensor, got list",
        "not an int": "TypeError: * gather_dim must be an int, got str",
        "no permutation": "TypeError: * src_dst must be a list of ints, got None",
        "no splits": "TypeError: * output_split_sizes must be a list of ints, got 7",
        "no weight": "TypeError: * weight must be a tensor or a list of some, got int",
        "no bias": "TypeError: * bias must be a tensor, got str",
        "no out": "TypeError: * out must be a tensor, got list",
    }
    check_messages(on_ranks(wrong.misuse, 2), parts)


def check_messages(results: list[dict[str, str]], parts: dict[str, str]) -> None:
    for found in results:
        assert found.keys() == parts.keys()
        for name, pattern in parts.items():
            kind, text = pattern.split(": ", 1)
            assert found[name].startswith(kind), (name, found[name])
            at = 0
            for piece in text.split("*"):
                at = found[name].find(piece.strip(), at)
                assert at >= 0, (name, found[name], piece)


def test_misuse_of_what_a_graph_calls() -> None:
    parts = {
        "reduce_op": "ValueError: * reduce_op must be one of",
        "shape differs": "ValueError: all_reduce: shape of tensor differs between ranks: (4, 4)",
        "gather_dim": "ValueError: * gather_dim must be within -2..1, got 2",
        "not divisible": "ValueError: * length 3, which the group's size 2 does not divide",
        "src": "ValueError: * src must be within 0..1, got 2",
        "weight": "ValueError: * weight[0] has 3 rows, input has k = 4",
    }
    check_messages(on_ranks(wrong.misuse_in_graphs, 2), parts)


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_a_schema_does_not_take_all_ranks_refuse(everywhere: bool) -> None:
    names = "cu_seqlens", "lengths", "block_table"
    parts = {name: f"TypeError: * {name} must be a tensor or None, got list" for name in names}
    parts["cu_seqlens of heads"] = parts["cu_seqlens of a layer"] = parts["cu_seqlens"]
    parts |= {
        "scale": "TypeError: * scale must be a number or None, got str",
        "algorithm": "TypeError: * algorithm must be a str, got list",
        "out_dtype": "TypeError: * out_dtype must be a torch.dtype or None, got str",
    }
    results = on_ranks(wrong.misuse_of_schemas, 2, everywhere)
    check_messages(results, parts)
    for rank, found in enumerate(results):
        for said in found.values():
            assert f"on rank {rank}" in said if everywhere else "rank 1" in said, said


def test_misuse_of_groups() -> None:
    parts = {
        "size": "ValueError: GroupSpec 'four' has size 4, the group 3, on rank",
        "unbound": "ValueError: group: there is no group named 'nowhere'",
        "traced": "ValueError: group '0' has 3 ranks, the op was traced for 7, on rank",
        "name": "ValueError: group: there is no group named 'nobody'",
        "lists": "ValueError: * group sizes must be identical, got [1, 2]",
        "traced lists": "ValueError: * group sizes must be identical, got [1, 2]",
        "tag": "ValueError: tag 'fast' goes with a list of ranks, not with str",
        "tag of a spec": "ValueError: tag 'fast' goes with a list of ranks, not with GroupSpec",
        "type": "TypeError: group must be None, a GroupSpec, * got float",
    }
    check_messages(on_ranks(wrong.misuse_of_groups, 3), parts)


def test_errors_survive_operators() -> None:
    for found in on_ranks(wrong.first_used_in_operators, 2):
        for at, said in enumerate(found):
            text = "TypeError: all_reduce: dtype of tensor differs between ranks"
            assert said.startswith(text), (at, said)
    on_ranks(wrong.operators, 2)


def test_inference_mode() -> None:
    assert on_ranks(wrong.inference, 2) == [[32.0, 128.0, 64.0, 128.0]] * 2


def test_around_the_dispatcher() -> None:
    for values, text, said in on_ranks(wrong.around_the_dispatcher, 2):
        assert values == [1.0] * 8
        assert text == "2.00"
        assert "would change the shape of an AsyncTensor in place" in said
