"""Misuse of the API: named with argument, values and rank, on every rank, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.arguments import words
from ranks import ranks

ONE = torch.ones(2)


def mine(*values: Any) -> Any:
    return values[interlace.get_rank()]


def _gather_over(choose: Callable[[torch.Tensor], Any]) -> None:
    """Make a right call, which is remembered, and then the wrong one."""
    out = torch.zeros(2, 2)
    interlace.all_gather(out, out[interlace.get_rank()])
    interlace.all_gather(*choose(out))


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
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
    (lambda: interlace.isend(ONE, 0, tag="x"), TypeError, "tag must be an int, got 'x'"),
    (lambda: interlace.isend(ONE, 0, tag=True), TypeError, r"tag must be an int, got True \(on rank"),
    (lambda: interlace.irecv(ONE.clone(), 0, tag=2**31), ValueError, r"tag must be within .* \(on rank"),
    (lambda: interlace.batch_isend_irecv([interlace.P2POp(interlace.isend, ONE, 0, tag=-1)]), ValueError,
     r"tag must be within 0\.\.2147483647, got -1 \(on rank"),
    (lambda: interlace.batch_isend_irecv([]), ValueError, "non-empty list of P2POp"),
    (lambda: interlace.batch_isend_irecv([3]), ValueError, r"p2p_op_list\[0\] must be a P2POp, got int"),
    (lambda: interlace.P2POp(interlace.send, ONE, 0), ValueError, "op must be isend or irecv"),
    (lambda: interlace.barrier(device_ids=0), TypeError, "device_ids must be a list of ints, got 0"),
    (lambda: interlace.new_group([0], timeout=0), ValueError, "timeout must be positive, got 0"),
    (lambda: interlace.new_group([0, 1], name="0"), ValueError, "there is a group named '0'"),
    (lambda: interlace.new_subgroups(3), ValueError, "divide world size 2, got 3"),
    (lambda: interlace.new_subgroups_by_enumeration([[0], [0]]), ValueError, "rank 0 is in two of"),
    (lambda: interlace.split_group(None, []), ValueError, "split_ranks must not be empty"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG)
@ranks(2, place="sim")
def test_misuse(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_what_one_rank_refuses_all_refuse_and_the_group_goes_on() -> None:
    calls: list[Callable[[bool], Any]] = [
        lambda bad: interlace.all_reduce("no" if bad else ONE.clone()),
        lambda bad: interlace.broadcast(ONE.clone(), 9 if bad else 0),
        lambda bad: interlace.all_gather([ONE.clone() for _ in range(1 if bad else 2)], ONE),
        lambda bad: interlace.reduce_scatter(ONE.clone(), torch.ones(5 if bad else 4)),
        lambda bad: interlace.gather(ONE, None if bad else [ONE.clone(), ONE.clone()], 1)
        if interlace.get_rank() == 1 else interlace.gather(ONE, None, 1),
        lambda bad: interlace.all_to_all_single(torch.ones(4), torch.ones(4), [3, 3] if bad else None),
        lambda bad: interlace.all_gather_v(torch.ones(4), ONE, [4, 4] if bad else [2, 2]),
        lambda bad: interlace.all_reduce_coalesced([3] if bad else [ONE.clone()]),
        lambda bad: interlace.gather_object(lambda: 1 if bad else 2, None, 0)
        if bad else interlace.gather_object(1, [None] * 2, 0),
    ]  # fmt: skip

    def on_rank() -> list[str]:
        texts = []
        for call in calls:
            with pytest.raises((TypeError, ValueError)) as caught:
                call(interlace.get_rank() == 1)
            texts.append(str(caught.value))
            x = torch.ones(2)
            interlace.all_reduce(x)
            assert x.tolist() == [2, 2]
        return texts

    first, second = interlace.run(on_rank, 2)
    for theirs, own in zip(first, second, strict=True):
        assert "rank 1 cannot take part" in theirs
        assert own.endswith(" (on rank 1)") and own.removesuffix(" (on rank 1)") in theirs


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
