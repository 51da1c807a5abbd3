"""Misuse is a ValueError or TypeError that names the argument, both values and the rank(s)."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
import torch_names
from interlace.arguments import words
from interlace.integrations import ray as on_ray
from ranks import ranks

W22 = torch.ones(2, 2)
ag, rs, ar = (
    interlace.all_gather_matmul,
    interlace.matmul_reduce_scatter,
    interlace.matmul_all_reduce,
)


def rank() -> int:
    return interlace.get_rank()


def mine(*values: Any) -> Any:
    return values[rank()]


def both(first: object, second: object) -> str:
    """Either rank may report first; the message has both values and both ranks, in either order."""
    a, b = f"{first} on rank 0", f"{second} on rank 1"
    return f"differs between ranks: (?:{a}, {b}|{b}, {a})"


Case = tuple[Callable[[], Any], type[Exception], str]
DIFFERENT: dict[str, Case] = {
    "ag rest of shape": (lambda: ag(torch.ones(mine((3, 2, 2), (3, 4, 2))), W22), ValueError,
     "all_gather_matmul: the shape of input off gather_dim " + both(r"\(2, 2\)", r"\(4, 2\)")),
    "ag dim": (lambda: ag(W22, W22, gather_dim=mine(0, 1), algorithm="unfused"), ValueError,
     "gather_dim " + both(0, 1)),
    "ag ndim": (lambda: ag(torch.ones(mine((2, 2), (2, 2, 2))), W22), ValueError,
     "number of dimensions of input " + both(2, 3)),
    "ag dtype": (lambda: ag(W22.to(mine(torch.float32, torch.float16)),
                            W22.to(mine(torch.float32, torch.float16))), TypeError,
     "dtype of input " + both("torch.float32", "torch.float16")),
    "ag algorithm": (lambda: ag(W22, W22, algorithm=mine("fused", "unfused")), ValueError,
     "algorithm " + both("fused", "unfused")),
    "ag weights": (lambda: ag(W22, [W22] * mine(1, 2)), ValueError,
     "(number|rows) of weights? differs between ranks: "),
    "ag return_gathered": (lambda: ag(W22, W22, return_gathered=mine(True, False)), ValueError,
     "return_gathered " + both("True", "False")),
    "ag out_dtype": (lambda: ag(W22, W22, out_dtype=mine(None, torch.float16)), ValueError,
     "out_dtype " + both("torch.float32", "torch.float16")),
    "rs rows": (lambda: rs(torch.ones(mine(3, 4), 2), W22), ValueError,
     "matmul_reduce_scatter: the shape of input without k " + both(r"\(3,\)", r"\(4,\)")),
    "rs columns": (lambda: rs(W22, torch.ones(2, mine(3, 4))), ValueError,
     "the columns of weight " + both(3, 4)),
    "rs dim": (lambda: rs(W22, W22, scatter_dim=mine(0, -1)), ValueError, "scatter_dim " + both(0, 1)),
    "rs op": (lambda: rs(W22, W22, reduce_op=mine("sum", "avg")), ValueError,
     "reduce_op " + both("sum", "avg")),
    "rs dtype": (lambda: rs(W22.to(mine(torch.float32, torch.bfloat16)),
                            W22.to(mine(torch.float32, torch.bfloat16))), TypeError,
     "dtype of input " + both("torch.float32", "torch.bfloat16")),
    "rs bias": (lambda: rs(W22, W22, bias=mine(None, torch.ones(2))), ValueError,
     "whether there is a bias " + both("False", "True")),
    "ar algorithm": (lambda: ar(W22, W22, algorithm=mine("auto", "pipelined")), ValueError,
     "matmul_all_reduce: algorithm " + both("auto", "pipelined")),
    "ops": (lambda: mine(rs, ar)(W22, W22), ValueError,
     "ranks call different ops at the same time: rank . calls matmul_.*, rank . calls matmul_"),
    "op and barrier": (lambda: mine(lambda: ar(W22, W22), interlace.barrier)(), ValueError,
     "different ops .* calls (matmul_all_reduce|barrier), rank . calls (matmul_all_reduce|barrier)"),
    "reduce shape": (lambda: interlace.all_reduce(torch.ones(mine(2, 3))), ValueError,
     "all_reduce: shape of tensor " + both(r"\(2,\)", r"\(3,\)")),
    "reduce dtype": (lambda: interlace.all_reduce(torch.ones(2, dtype=mine(torch.int32, torch.int64))),
     TypeError, "all_reduce: dtype of tensor " + both("torch.int32", "torch.int64")),
    "reduce op": (lambda: interlace.all_reduce(torch.ones(2), mine("sum", "avg")), ValueError,
     "all_reduce: op " + both("sum", "avg")),
    "reduce algorithm": (lambda: interlace.all_reduce(torch.ones(2), algorithm=mine("copy", "auto")),
     ValueError, "all_reduce: algorithm " + both("copy", "auto")),
    "scatter shapes": (lambda: interlace.reduce_scatter(torch.ones(2 + rank()), torch.ones(4 + 2 * rank())),
     ValueError, r"reduce_scatter: shape of input\[0\] " + both(r"\(2,\)", r"\(3,\)")),
    "gather dtype": (lambda: interlace.all_gather(
        torch.ones(4, dtype=mine(torch.int32, torch.float32)),
        torch.ones(2, dtype=mine(torch.int32, torch.float32))), TypeError,
     "all_gather: dtype of tensor " + both("torch.int32", "torch.float32")),
    "gather shape": (lambda: interlace.all_gather(torch.ones(2, 2 + rank()), torch.ones(1, 2 + rank())),
     ValueError, r"all_gather: shape of output\[0\] " + both(r"\(1, 2\)", r"\(1, 3\)")),
    "new_group": (lambda: interlace.new_group(mine([0, 1], [1, 0])), ValueError,
     "new_group: ranks " + both(r"\[0, 1\]", r"\[1, 0\]")),
}  # fmt: skip

OUT_OF_STEP = {"ops", "op and barrier"}
"""After these the group is of no use."""
WRONG: dict[str, Case] = {
    "input type": (lambda: ag([1.0], W22), TypeError, "input must be a tensor, got list"),
    "input 1-D": (lambda: ag(torch.ones(2), W22),
     ValueError, r"input .*2 dimensions, got shape \(2,\)"),
    "input ints": (lambda: rs(W22.int(), W22.int()),
     TypeError, "input must be float32.*got torch.int32"),
    "input device": (lambda: ar(W22.to("meta"), W22), ValueError, "input is on meta, .* cpu"),
    "input sparse": (lambda: ag(W22.to_sparse(), W22), TypeError, "input must be a strided tensor"),
    "input negated": (lambda: ag(torch._neg_view(W22), W22), ValueError, "input is lazily negated"),
    "weight type": (lambda: ag(W22, None), TypeError, "weight must be a tensor .*got NoneType"),
    "weight in list": (lambda: ag(W22, [W22, 3]), TypeError, r"weight\[1\] must be a tensor, got int"),
    "weight 3-D": (lambda: rs(W22, torch.ones(1, 2, 2)), ValueError, r"weight .*\(1, 2, 2\)"),
    "weight rows": (lambda: ar(W22, torch.ones(3, 2)),
     ValueError, "weight has 3 rows, input has k = 2"),
    "weight rows along k": (lambda: ag(W22, W22, gather_dim=1), ValueError,
     r"weight has 2 rows, the gathered input has k = 4"),
    "weight dtype": (lambda: ag(W22, W22.half()),
     TypeError, "weight is torch.float16, input is torch.float32"),
    "weight negated": (lambda: ag(W22, torch._neg_view(W22)), ValueError, "weight is lazily negated"),
    "bias shape": (lambda: rs(W22, W22, bias=torch.ones(3)), ValueError, r"bias .*\(2,\).*got \(3,\)"),
    "bias dtype": (lambda: ag(W22, W22, bias=torch.ones(2).double()),
     TypeError, "bias is torch.float64"),
    "bias type": (lambda: ag(W22, W22, bias=1.0), TypeError, "bias must be a tensor, got float"),
    "biases": (lambda: ag(W22, [W22], bias=torch.ones(2)), TypeError, "bias must be a sequence"),
    "biases count": (lambda: ag(W22, [W22], bias=[None, None]),
     ValueError, "bias has 2 entries, weight has 1"),
    "gather_dim": (lambda: ag(W22, W22, gather_dim=2), ValueError, r"gather_dim .*-2\.\.1, got 2"),
    "gather_dim low": (lambda: ag(W22, W22, gather_dim=-3), ValueError, "gather_dim .*got -3"),
    "gather_dim bool": (lambda: ag(W22, W22, gather_dim=True),
     TypeError, "gather_dim must be an int, got True"),
    "scatter_dim": (lambda: rs(W22, W22, scatter_dim=5), ValueError, "scatter_dim .*got 5"),
    "algorithm": (lambda: ag(W22, W22, algorithm="fast"),
     ValueError, "algorithm must be one of .*got 'fast'"),
    "fused along k": (lambda: ag(W22, torch.ones(4, 2), gather_dim=1, algorithm="fused"), ValueError,
     "algorithm='fused' cannot .* gather_dim=1"),
    "fused float64": (lambda: rs(W22.double(), W22.double(), algorithm="fused"), TypeError,
     'algorithm="fused" supports float32.* input is torch.float64'),
    "op": (lambda: interlace.all_reduce(W22, "mean"),
     ValueError, "op must be one of sum, avg, .*got 'mean'"),
    "kernel max": (lambda: interlace.all_reduce(W22, dist.ReduceOp.MAX, algorithm="kernel"),
     ValueError, 'algorithm="kernel" reduces with op sum or avg, got .max.'),
    "out_dtype": (lambda: ag(W22, W22, out_dtype="float32"),
     TypeError, "out_dtype must be a torch.dtype"),
    "group type": (lambda: ag(W22, W22, group=3.5), TypeError, "group must be None, .*got 3.5 .float"),
    "non-member": (lambda: ag(W22, W22, group=dist.GroupMember.NON_GROUP_MEMBER),
     ValueError, "not a member"),
    "gather list": (lambda: interlace.all_gather([W22], W22),
     ValueError, "output must have one tensor per rank, 2, got 1"),
    "gather type": (lambda: interlace.all_gather(3, W22),
     TypeError, "output must be a tensor or a list.* got int"),
    "gather form": (lambda: interlace.all_gather(torch.ones(3, 2), W22), ValueError,
     r"output must have shape \(4, 2\) or \(2, 2, 2\).*got \(3, 2\)"),
    "gather dtype": (lambda: interlace.all_gather(torch.ones(4, 2).int(), W22),
     TypeError, "output is torch.int32, tensor is"),
    "gather kernel": (lambda: interlace.all_gather(
        torch.ones(4).int(), torch.ones(2).int(), algorithm="kernel"),
     TypeError, 'algorithm="kernel" supports float32'),
    "expanded": (lambda: interlace.all_reduce(torch.ones(1).expand(3)),
     ValueError, "tensor .*expanded"),
    "scatter output": (lambda: interlace.reduce_scatter(torch.ones(3), torch.ones(4)), ValueError,
     r"input must have shape \(6,\) or \(2, 3\).*got \(4,\)"),
    "max of complex": (lambda: interlace.all_reduce(torch.ones(2).cfloat(), "max"),
     TypeError, "tensor of dtype torch.complex64 cannot be reduced with op 'max'"),
    "premul of ints": (lambda: interlace.all_reduce(torch.ones(2).int(), torch_names.premul_sum(2.0)),
     TypeError, "op premul_sum needs floating or complex tensor, got torch.int32"),
    "premul_sum alone": (lambda: interlace.all_reduce(W22, "premul_sum"),
     ValueError, "premul_sum needs its factor"),
}  # fmt: skip


def check(case: Callable[[], Any], kind: type[Exception], pattern: str) -> None:
    """Each rank must raise before any data moves."""
    with pytest.raises(kind, match=pattern) as caught:
        case()
    of_the_group = str(caught.value).startswith("group")  # without it a rank has no number
    assert of_the_group or re.search(r"\brank [01]\b", str(caught.value))


def check_and_go_on(*case: Any) -> None:
    check(*case)
    total = torch.ones(1)
    interlace.all_reduce(total)
    assert total.item() == 2


@pytest.mark.parametrize("name", DIFFERENT)
@ranks(2, place="sim")
def test_a_difference_between_ranks(name: str) -> None:
    if name in OUT_OF_STEP:
        check(*DIFFERENT[name])
    else:
        check_and_go_on(*DIFFERENT[name])


@ranks(2)
def test_differences_between_processes() -> None:
    for name in DIFFERENT.keys() - OUT_OF_STEP:
        check_and_go_on(*DIFFERENT[name])


@pytest.mark.parametrize("name", WRONG)
@ranks(2, place="sim")
def test_a_wrong_argument(name: str) -> None:
    check_and_go_on(*WRONG[name])


RUNS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: interlace.run(rank, 2, place="moon"), ValueError, "place must be one of sim.*'moon'"),
    (lambda: interlace.run(rank, 0), ValueError, r"world_size must be within 1\.\..*got 0"),
    (lambda: interlace.run(rank, True), TypeError, "world_size must be an int, got True"),
    (lambda: interlace.run(3, 2), TypeError, "fn must be callable, got int"),
    (lambda: interlace.run(rank, 2, place="hosts"), ValueError, 'place "hosts" needs processes'),
    (lambda: interlace.run(rank, 2, place="nvshmem"), ValueError, "started by torchrun or joined"),
    (lambda: interlace.run(rank, 2, timeout=1e300), ValueError, "timeout must be at most 1e[+]06"),
    (lambda: interlace.run(rank, 2, timeout=0), ValueError, "timeout must be positive, got 0"),
]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0, ValueError, "must be positive, got 0"),
        (-1.5, ValueError, "must be positive, got -1.5"),
        (timedelta(seconds=-1), ValueError, "must be positive, got -1 day"),
        (float("nan"), ValueError, "must be positive, got nan"),
        (float("inf"), ValueError, "must be at most 1e[+]06 seconds, got inf"),
        ("3", TypeError, "must be a number of seconds or a timedelta, got '3'"),
        (True, TypeError, "must be a number of seconds or a timedelta, got True"),
        (None, TypeError, "must be a number of seconds or a timedelta, got None"),
    ],
)
@ranks(1, place="sim")
def test_a_wrong_timeout(value: Any, kind: type[Exception], text: str) -> None:
    for call in interlace.new_group().set_timeout, interlace.timeout:
        with pytest.raises(kind, match=f"seconds {text}"), call(value) or nullcontext():
            pass
    if value is not None:
        with pytest.raises(kind, match=f"timeout {text}"):
            interlace.new_group(timeout=value)


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_a_timedelta_bounds_a_run(place: Any) -> None:
    bound = timedelta(seconds=300)
    assert interlace.run(interlace.get_rank, 2, place=place, timeout=bound) == [0, 1]
    assert interlace.verify.races(interlace.barrier, 2, timeout=bound).clean


def test_a_body_that_a_call_does_not_run() -> None:
    async def coroutine() -> None:
        raise AssertionError

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    for fn in coroutine, generator, async_generator:
        for call in interlace.run, interlace.verify.races, interlace.verify.check:
            with pytest.raises(TypeError, match="would not run its body"):
                call(fn, 2)  # type: ignore[operator]


def test_a_switch_of_verify_that_is_no_bool() -> None:
    verify: Any = interlace.verify
    for call, name in (
        (verify.races, "store_buffers"),
        (verify.schedules, "store_buffers"),
        (verify.schedules, "deterministic"),
        (verify.schedules, "shrink"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got 'yes'"):
            call(interlace.barrier, 2, **{name: "yes"})


def test_actors_without_ray() -> None:
    with (
        mock.patch.dict(sys.modules, ray=None),
        pytest.raises(ImportError, match="pip install ray"),
    ):
        on_ray.run(rank, 2)
    with pytest.raises(ValueError, match="world_size must be within"):
        on_ray.run(rank, 0)


def test_timeouts_do_nothing_where_is_no_clock() -> None:
    """A rank may come after any number of steps; if it never comes, the error is a deadlock."""

    def on_rank(come: bool) -> None:
        with interlace.timeout(1e-9):
            interlace.new_group().set_timeout(1e-9)
            if come or interlace.get_rank() == 0:
                interlace.barrier()

    interlace.run(on_rank, 2, True)
    with pytest.raises(interlace.DeadlockError):
        interlace.run(on_rank, 2, False)


@pytest.mark.parametrize(("case", "kind", "pattern"), RUNS)
def test_a_wrong_run(case: Callable[[], Any], kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern):
        case()


def test_outside_a_run() -> None:
    with pytest.raises(interlace.InterlaceError, match=r"inside a function run by interlace\.run"):
        interlace.get_rank()


ONE = torch.ones(2)


def _gather_over(choose: Callable[[torch.Tensor], Any]) -> None:
    """Make a right call, which is remembered, and then the wrong one."""
    out = torch.zeros(2, 2)
    interlace.all_gather(out, out[interlace.get_rank()])
    interlace.all_gather(*choose(out))


WRONG_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: interlace.broadcast(ONE.clone()), ValueError, "pass src or group_src: got neither"),
    (lambda: interlace.broadcast(ONE.clone(), 0, group_src=0), ValueError, "not both: got 0, 0"),
    (lambda: interlace.broadcast(ONE.clone(), 5), ValueError, r"ranks \[0, 1\], got 5"),
    (lambda: interlace.broadcast(ONE.clone(), 0.0), TypeError, "src must be an int, got 0.0"),
    (lambda: interlace.reduce(ONE.clone(), group_dst=-1), ValueError, r"within 0\.\.1, got -1"),
    (lambda: interlace.broadcast(ONE.clone(), mine(0, 1)), ValueError,
     "root differs between ranks: 0 on rank 0, 1 on rank 1"),
    (lambda: interlace.broadcast(torch.ones(mine(2, 3)), 0), ValueError, "shape of tensor differs"),
    (lambda: interlace.gather(ONE, None, 0), ValueError, "gather_list must be given on the root"),
    (lambda: interlace.gather(ONE, [ONE.clone(), ONE.clone()], 0), ValueError, "on the root only"),
    (lambda: interlace.gather(ONE, mine([ONE.clone(), torch.ones(3)], None)), ValueError,
     r"gather_list\[1\] has shape \(3,\) on rank 0, tensor has \(2,\) on rank 1"),
    (lambda: interlace.gather(ONE, mine([ONE.clone()], None)), ValueError, "one tensor per rank, 2, got 1"),
    (lambda: interlace.scatter(ONE.clone(), mine([ONE, ONE.int()], None)), TypeError,
     r"scatter_list\[1\] is torch.int32, tensor is torch.float32"),
    (lambda: interlace.scatter(ONE.clone(), mine([ONE, torch.ones(1)], None)), ValueError,
     r"scatter_list\[1\] has shape \(1,\) on rank 0, tensor has \(2,\) on rank 1"),
    (lambda: interlace.all_to_all([ONE.clone(), ONE.clone()], [ONE, torch.ones(mine(2, 4))]), ValueError,
     r"output_tensor_list\[.\] has shape \(2,\) on rank 1, input_tensor_list\[1\] has shape \(4,\)"),
    (lambda: interlace.all_to_all_single(torch.ones(3), torch.ones(3)), ValueError,
     "input has 3 rows, which world size 2 does not divide"),
    (lambda: interlace.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [2, 2]), ValueError,
     r"output_split_sizes\[.\] is . on rank ., input_split_sizes\[.\] is 2 on rank ."),
    (lambda: interlace.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], None), ValueError,
     r"output_split_sizes must add up to the 4 rows of output, got \[1, 1\]"),
    (lambda: interlace.all_to_all_single(torch.ones(4, 1), torch.ones(4)), ValueError,
     r"equal in shape off dim 0, got \(4, 1\) and \(4,\)"),
    (lambda: interlace.all_gather([ONE.clone(), torch.ones(mine(2, 3))], torch.ones(mine(2, 3))),
     ValueError, r"output\[0\] has shape|shape of output\[1\] differs between ranks"),
    (lambda: interlace.all_gather([ONE] * 2, ONE), ValueError,
     r"output\[0\] and output\[1\] share memory"),
    (lambda: _gather_over(lambda out: (out, out[1 - interlace.get_rank()])), ValueError,
     r"tensor shares memory with output\[.\]"),
    (lambda: _gather_over(lambda out: (out, out.view(-1)[1:3])), ValueError,
     r"tensor shares memory with output\[.\]"),
    (lambda: interlace.reduce_scatter((x := torch.ones(4))[1:3], x), ValueError,
     r"output shares memory with input\[0\]"),
    (lambda: interlace.all_gather_v(torch.ones(4), torch.ones(2), [3, 2]), ValueError,
     r"output_split_sizes must .* got \[3, 2\]"),
    (lambda: interlace.all_gather_v(torch.ones(4), torch.ones(2), [1, 3]), ValueError,
     r"output\[.\] has shape \(.,\), tensor has \(2,\)"),
    (lambda: interlace.broadcast(ONE.to_sparse(), 0), TypeError, "must be a strided tensor"),
    (lambda: interlace.all_reduce(ONE.to("meta")), ValueError, "is on meta, the group's memory on cpu"),
    (lambda: interlace.all_reduce([ONE]), TypeError, "tensor must be a tensor, got list"),
    (lambda: interlace.all_gather(torch.ones(1).expand(4), ONE), ValueError, "output .* is expanded"),
    (lambda: interlace.all_reduce_coalesced(ONE), TypeError, "tensors must be a list, got Tensor"),
    (lambda: interlace.all_reduce_coalesced([ONE.clone()] * mine(1, 2)), ValueError,
     "number of tensors differs between ranks: 1 on rank 0, 2 on rank 1"),
    (lambda: interlace.all_reduce_coalesced([ONE.clone(), torch.ones(mine(1, 2))]), ValueError,
     r"shape of tensor, of entry 1, differs between ranks: \(1,\) on rank 0"),
    (lambda: interlace.all_gather_coalesced([[ONE]], [ONE, ONE]), ValueError,
     "output_tensor_lists has 1 entries, input_tensor_list has 2"),
    (lambda: interlace.all_gather_object([None], 1), ValueError, "one entry per rank, 2, got 1"),
    (lambda: interlace.all_gather_object([None] * 2, lambda: 1), TypeError, r"be pickled: .* \(on rank"),
    (lambda: interlace.broadcast_object_list([None] * mine(1, 2), 0), ValueError,
     "number of objects differs between ranks: 1 on rank 0, 2 on rank 1"),
    (lambda: interlace.send(ONE, interlace.get_rank()), ValueError, "dst must be another rank"),
    (lambda: interlace.isend(ONE, tag=0), ValueError, "pass dst or group_dst"),
    (lambda: interlace.isend(ONE, 0, tag=True), TypeError, r"tag must be an int, got True \(on rank"),
    (lambda: interlace.irecv(ONE.clone(), 0, tag=2**31), ValueError, r"tag must be within .* \(on rank"),
    (lambda: interlace.batch_isend_irecv([interlace.P2POp(interlace.isend, ONE, 0, tag=-1)]), ValueError,
     r"tag must be within 0\.\.2147483647, got -1 \(on rank"),
    (lambda: interlace.batch_isend_irecv([]), ValueError, "non-empty list of P2POp"),
    (lambda: interlace.batch_isend_irecv([3]), ValueError, r"p2p_op_list\[0\] must be a P2POp, got int"),
    (lambda: interlace.P2POp(interlace.send, ONE, 0), ValueError, "op must be isend or irecv"),
    (lambda: interlace.barrier(device_ids=0), TypeError, "device_ids must be a list of ints, got 0"),
    (lambda: interlace.new_group([0, 1], name="0"), ValueError, "there is a group named '0'"),
    (lambda: interlace.new_subgroups(3), ValueError, "divide world size 2, got 3"),
    (lambda: interlace.new_subgroups_by_enumeration([[0], [0]]), ValueError, "rank 0 is in two of"),
    (lambda: interlace.split_group(None, []), ValueError, "split_ranks must not be empty"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG_CALLS)
@ranks(2, place="sim")
def test_misuse(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: interlace.all_reduce(torch.ones(70), algorithm="kernel"),
        lambda: interlace.all_reduce(torch.ones(70), algorithm="multimem"),
        lambda: interlace.reduce_scatter_tensor(ONE.clone(), torch.ones(4), algorithm="kernel"),
        lambda: interlace.all_gather_into_tensor(torch.ones(4), ONE, algorithm="multimem"),
        lambda: interlace.all_gather_grouped_matmul(
            torch.ones(70, 2), torch.ones(1, 2, 3), [70], algorithm="fused"
        ),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
@ranks(2, place="sim")
def test_ranks_whose_configurations_differ(call: Callable[[], Any], alone: bool) -> None:
    """Such ranks would signal other blocks than their peers wait for."""
    rank = interlace.get_rank()
    values = {} if alone and rank else {"block_elements": 16 << rank, "block_m": 16 << rank}
    said = r"configuration differs between ranks: .*\('block_elements', 16\).* on rank 0"
    with interlace.configured(**values), pytest.raises(ValueError, match=said):
        call()
    with interlace.configured(block_elements=32, block_m=16):
        call()


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2, 2), (0,)])
def test_the_shape_of_a_factor(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"factor of premul_sum has shape .* tensor has \(2,\)"):
        words.check_factor(torch.ones(shape), "tensor", ONE)
    words.check_factor(torch.ones(1, 1), "tensor", ONE)
    words.check_factor(torch.ones(2), "tensor", torch.ones(3, 2))


@ranks(2, place="sim")
def test_nothing_is_written_before_everything_was_compared() -> None:
    """The second of two tensors does not fit, and the first is unchanged on every rank."""
    rank = interlace.get_rank()
    bad = torch.zeros(1 + rank)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: interlace.all_reduce_coalesced([x, bad]),
        lambda x: interlace.all_gather_coalesced([[x[:1], x[1:]], [bad, bad + 1]], [ONE[:1], bad]),
        lambda x: interlace.reduce_scatter_tensor_coalesced(
            [x, bad], [torch.ones(4), bad.repeat(2)]
        ),
        lambda x: interlace.all_gather([x, bad], torch.zeros(2) if rank == 0 else bad),
        lambda x: interlace.broadcast(x if rank else torch.zeros(3), 0),
        lambda x: interlace.reduce(x, 0, "max" if rank else "min"),
        lambda x: interlace.scatter(x, [torch.zeros(2), torch.zeros(3)] if rank else None, 1),
        lambda x: interlace.gather(torch.zeros(2 + rank), None if rank else [x, bad], 0),
        lambda x: interlace.all_to_all_single(x, torch.zeros(2), None if rank else [2, 0]),
    ]
    for call in calls:
        x = torch.full((2,), 5.0)
        with pytest.raises((TypeError, ValueError)):
            call(x)
        assert x.tolist() == [5, 5]
