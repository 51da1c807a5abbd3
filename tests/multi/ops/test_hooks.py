"""Hooks of groups: the ops that they see, the ops that they refuse, and the end of a group."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import interlace
from interlace import functional
from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.core.communicator import Communicator
from ranks import LONG, ranks, run

in_processes = [("threads", 1), ("threads", 2)]
everywhere = pytest.mark.parametrize(("place", "hosts"), [("sim", 1), *in_processes])


class Seen:
    """The calls of hooks: ("before" or "after", op, names of inputs, names of outputs)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, interlace.HookedOp]] = []
        self.ends: list[Any] = []

    def on(self, group: Any) -> Any:
        return group.register_hook(
            lambda call: self.calls.append(("before", call)),
            lambda call: self.calls.append(("after", call)),
            lambda group, cause: self.ends.append(cause),
        )

    def names(self, when: str) -> list[tuple[Any, ...]]:
        return [(c.op, [*c.inputs], [*c.outputs]) for w, c in self.calls if w == when]


def every_kind_of_op(group: Communicator) -> None:
    peer, one = 1 - group.rank, torch.ones(2)
    interlace.all_reduce(one, group=group)
    interlace.all_gather(torch.empty(4), one, group=group, async_op=True).wait()
    interlace.broadcast(one, group_src=1, group=group)
    interlace.all_reduce_coalesced([one, one], group=group)
    interlace.barrier(group)
    interlace.all_gather_object([None, None], 1, group=group)
    works = [
        interlace.isend(one, group_dst=peer, group=group),
        interlace.irecv(torch.empty(2), group_src=peer, group=group),
    ]
    for work in works:
        work.wait()
    functional.all_reduce(one, group=group).sum()


@everywhere
@ranks(2)
def test_every_kind_of_op_is_seen_before_and_after(place: str, hosts: int) -> None:
    group = interlace.new_group()
    seen = Seen()
    with seen.on(group):
        every_kind_of_op(group)
    interlace.all_reduce(torch.ones(1), group=group)
    rank = group.rank
    both = ["tensors[0]", "tensors[1]"]
    expected = [
        ("all_reduce", ["tensor"], ["tensor"]),
        ("all_gather", ["tensor"], ["output"]),
        ("broadcast", ["tensor"] * rank, ["tensor"]),
        ("all_reduce_coalesced", both, both),
        ("barrier", [], []),
        ("all_gather_object", [], []),
        ("send", ["tensor"], []),
        ("recv", [], ["tensor"]),
        ("all_reduce", ["tensor"], ["tensor"]),
    ]
    assert seen.names("before") == expected
    assert sorted(seen.names("after")) == sorted(expected)  # messages may end in either order
    ended = [call for when, call in seen.calls if when == "after"]
    assert sorted(call.sequence for call in ended) == list(range(1, 10))
    assert all(call.error is None and call.seconds > 0 for call in ended)
    options = {call.op: dict(call.options) for call in ended}
    assert options["send"] == {"peer": 1 - rank, "tag": 0}
    assert options["broadcast"] == {"group_src": 1, "algorithm": "auto"}
    assert all(call.group.rank == rank for call in ended)


@everywhere
@ranks(2)
def test_options_of_fused_ops_are_there_though_they_are_none(place: str, hosts: int) -> None:
    group = interlace.new_group()
    seen = []
    with group.register_hook(seen.append):
        x, weight = torch.ones(2, 4), torch.ones(4, 4)
        interlace.all_gather_matmul(x, [weight, weight], bias=[None, weight[0]], group=group)
        interlace.experts.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), None, 2, group=group)
    matmul, dispatch = seen
    assert [*matmul.inputs] == ["input", "weight[0]", "weight[1]", "bias[1]"]
    assert matmul.options == {
        "gather_dim": 0,
        "activation": None,
        "out_dtype": None,
        "return_gathered": False,
        "algorithm": "auto",
    }
    assert [*dispatch.inputs] == ["input", "topk_idx"] and dispatch.options["capacity"] == 0


@everywhere
@ranks(2)
def test_after_an_op_its_results_are_there(place: str, hosts: int) -> None:
    group = interlace.new_group()
    sums: list[float] = []
    with group.register_hook(after=lambda call: sums.append(call.outputs["tensor"].sum())):
        interlace.all_reduce(torch.ones(2), group=group)
        work = interlace.all_reduce(torch.ones(4), group=group, async_op=True)
        work.wait()
        assert work.is_completed() and sums == [4.0, 8.0]


@everywhere
@ranks(2)
def test_ops_cost_what_they_did_once_there_are_no_hooks(place: str, hosts: int) -> None:
    group = interlace.new_group()
    first, second = (group.register_hook(before=print) for _ in range(2))
    assert group.hooks.watching
    for handle in first, second:
        handle.remove()
    group.barrier()
    interlace.barrier(group)
    assert not group.hooks.watching


@everywhere
@ranks(2)
def test_what_a_hook_refuses_all_refuse(place: str, hosts: int) -> None:
    def refuse(call: interlace.HookedOp) -> None:
        if call.group.rank and call.op == "all_reduce":
            raise LookupError("not today")

    group = interlace.new_group()
    with group.register_hook(refuse), pytest.raises((LookupError, ValueError)) as caught:
        interlace.all_reduce(torch.ones(2), group=group)
    interlace.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == 2
    said = ["all_reduce: rank 1 cannot take part: LookupError: not today", "not today (on rank 1)"]
    assert str(caught.value) == said[group.rank]


@everywhere
@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_what_after_raises_the_op_raises(place: str, hosts: int, asynchronous: bool) -> None:
    def complain(call: interlace.HookedOp) -> None:
        raise LookupError("seen too late")

    group = interlace.new_group()
    with group.register_hook(after=complain), pytest.raises(LookupError, match="too late"):
        work = interlace.all_reduce(torch.ones(2), group=group, async_op=asynchronous)
        assert work is not None
        for _ in range(2):  # on every later call again
            with pytest.raises(LookupError):
                work.wait()
        assert isinstance(work.exception(), LookupError)
        raise LookupError("seen too late")


@everywhere
@ranks(2)
def test_the_end_of_a_group_is_said_once_with_its_cause(place: str, hosts: int) -> None:
    group = interlace.new_group()
    seen, x = Seen(), torch.ones(1)
    seen.on(group)
    with pytest.raises(ValueError, match="shape"):  # no end
        interlace.all_reduce(torch.ones(1 + group.rank), group=group)
    assert not seen.ends
    for _ in range(3):
        with pytest.raises((ValueError, interlace.InterlaceError)) as caught:
            if group.rank:
                interlace.broadcast(x, group_src=0, group=group)
            else:
                interlace.all_reduce(x, group=group)
        first = seen.ends[0]
        assert len(seen.ends) == 1 and "different ops" in str(first)
        assert str(first) in str(caught.value)
        assert seen.calls[-1][1].error is caught.value


@everywhere
@ranks(2)
def test_hooks_that_hooks_register_count_from_the_next_op_on(place: str, hosts: int) -> None:
    group = interlace.new_group()
    seen: list[int] = []
    register = lambda call: group.register_hook(lambda call: seen.append(call.sequence))  # noqa: E731
    with group.register_hook(register):
        interlace.all_reduce(torch.ones(1), group=group)
    interlace.all_reduce(torch.ones(1), group=group)
    assert seen == [2]


@ranks(2, place="threads")
def test_the_cause_of_an_end_is_raised_whatever_hooks_do(caplog: pytest.LogCaptureFixture) -> None:
    group, seen = interlace.groups.groups.default_group(), list[Any]()
    if group.rank:
        group.place.abort("enough")
        return
    group.register_hook(on_abort=lambda group, cause: 1 / 0)
    group.register_hook(on_abort=lambda group, cause: seen.append(cause))
    with pytest.raises(interlace.AbortedError, match="enough") as raised:
        interlace.all_reduce(torch.ones(1))
    assert seen == [raised.value] and "division by zero" in caplog.text


@ranks(1, place="sim")
def test_no_functions_and_what_is_none() -> None:
    group = interlace.new_group()
    with pytest.raises(TypeError, match=r"after must be callable or None, got 5 \(on rank 0\)"):
        group.register_hook(after=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="before, after and on_abort are all None; pass at least"):
        group.register_hook()


def test_torchs_api_and_an_abort() -> None:
    store, seen, ended = HashStore(), Seen(), threading.Barrier(2)

    def on_rank(rank: int) -> None:
        group = InterlaceProcessGroup(store, rank, 2, dist.default_pg_timeout, name="hooked")
        if rank == 0:
            seen.on(group)
        group.allreduce([torch.ones(2)]).wait()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        group.allreduce([torch.ones(2)], options).wait()
        group.send([torch.ones(1)], 1, 3) if rank == 0 else group.recv([torch.ones(1)], 0, 3).wait()
        ended.wait(LONG)
        group.abort() if rank == 0 else group.shutdown()

    assert run(range(2), on_rank) == [None, None]
    assert [name for name, *_ in seen.names("before")] == ["all_reduce", "all_reduce", "send"]
    assert [name for name, *_ in seen.names("after")] == ["all_reduce", "all_reduce", "send"]
    (cause,) = seen.ends
    assert isinstance(cause, interlace.AbortedError)
    assert str(cause) == "rank 0 aborted process group 'hooked'"


# -- check_numerics --------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("place", "hosts", "dtype", "value", "kind"),
    [
        ("sim", 1, torch.bfloat16, NAN, "nan"),
        ("sim", 1, torch.float8_e5m2, NAN, "nan"),
        ("sim", 1, torch.complex64, complex(0, NAN), "nan"),
        ("threads", 1, torch.float32, NAN, "nan"),
        ("threads", 2, torch.float64, -INF, "inf"),
    ],
)
@ranks(2)
def test_an_input_that_is_no_number_is_refused_on_all_ranks(
    place: str, hosts: int, dtype: torch.dtype, value: Any, kind: str
) -> None:
    group = interlace.new_group()
    x = torch.ones(2, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    if group.rank == 1:
        x[1, 2] = x[1, 1] = value
    output = torch.full((4, 3), NAN).to(dtype)  # outputs may have any contents
    checked = interlace.check_numerics(group, inf=kind == "inf")
    with pytest.raises(ValueError) as caught, checked:
        interlace.all_gather(output, x.to(dtype), group=group)
    with interlace.check_numerics(group):
        interlace.all_gather(output, torch.ones(2, 3).to(dtype), group=group)
    assert bool((output.float() if not dtype.is_complex else output.real == 1).all())
    said = f"tensor of all_gather has {kind} at [1, 1]"
    peers = f"all_gather: rank 1 cannot take part: {said}"
    assert str(caught.value) == [peers, f"{said} (on rank 1)"][group.rank]


@ranks(2, backend="interlace")
def test_the_index_is_that_of_a_complex_number_through_torchs_api() -> None:
    """torch passes a view of the tensor as real numbers; other views have their own index."""
    x = torch.ones(2, 3, dtype=torch.complex64)
    # the other rank gets an error
    x[1, 2] = 1 if interlace.get_rank() else complex(1, NAN)
    with interlace.check_numerics(dist.group.WORLD):
        for tensor, place in ((x, "[1, 2]"), (x[:, 2].imag, "[1]"), (x.imag, "[1, 2]")):
            with pytest.raises(ValueError) as caught:
                dist.all_reduce(tensor)
            said = str(caught.value).removesuffix(" (on rank 0)")
            assert said.endswith(f" has nan at {place}")


@ranks(2, place="sim")
def test_an_array_that_is_no_number_is_refused() -> None:
    array, read_only = np.ones(3), np.ones(3)
    array[interlace.get_rank()] = NAN
    read_only.flags.writeable = False
    with interlace.check_numerics():
        with pytest.raises(ValueError, match=r"tensor of all_reduce has nan at \[[01]\]"):
            interlace.all_reduce(array)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="read-only"):
            interlace.all_reduce(read_only)  # type: ignore[arg-type]


@ranks(2, place="sim")
def test_infinities_are_numbers_by_default() -> None:
    mask = torch.tensor([0.0, -INF])
    with interlace.check_numerics():
        interlace.all_reduce(mask)
    assert bool(mask.isneginf()[1])


@everywhere
@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_a_result_that_is_no_number_ends_the_group(
    place: str, hosts: int, asynchronous: bool
) -> None:
    """inf - inf is nan on one rank only; the error of the other ranks names that rank."""
    group = interlace.new_group()
    x = torch.tensor([1.0, INF if group.rank else -INF])
    checked, errors = interlace.check_numerics(group), (ValueError, interlace.InterlaceError)
    with pytest.raises(errors) as caught, checked:
        work = interlace.all_reduce(x, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
    assert "tensor of all_reduce has nan at [1] (on rank " in str(caught.value)


@everywhere
@ranks(2)
def test_every_hook_that_saw_the_beginning_of_an_op_sees_its_end(place: str, hosts: int) -> None:
    """A hook that refuses the op, and the hooks after it, see no end."""

    def refuse(call: interlace.HookedOp) -> None:
        if call.group.rank:
            raise LookupError("not today")

    group = interlace.new_group()
    seen: list[Any] = []

    def note(number: int) -> Callable[[interlace.HookedOp], None]:
        return lambda call: seen.append((number, type(call.error).__name__))

    group.register_hook(after=note(0))
    group.register_hook(refuse, note(1))
    group.register_hook(after=note(2))
    with pytest.raises((LookupError, ValueError)):
        interlace.all_reduce(torch.ones(2), group=group)
    others = [(number, "ValueError") for number in range(3)]
    assert seen == [others, [(0, "LookupError")]][group.rank]


@pytest.mark.parametrize(("place", "hosts"), in_processes)
@pytest.mark.parametrize("refused", ["send", "recv"])
@ranks(2)
def test_a_message_that_a_hook_refuses_ends_the_group(place: str, hosts: int, refused: str) -> None:
    def refuse(call: interlace.HookedOp) -> None:
        if call.op == refused:
            raise LookupError("not today")

    group = interlace.new_group()
    peer, tensor = 1 - group.rank, torch.ones(1 << 20)
    own = group.rank == (refused == "recv")
    kind = LookupError if own else interlace.AbortedError
    with group.register_hook(refuse), pytest.raises(kind) as caught:
        if group.rank:
            interlace.recv(tensor, group_src=peer, group=group)
        else:
            interlace.isend(tensor, group_dst=peer, group=group)
            interlace.barrier(group)
    assert f"not today (on rank {int(refused == 'recv')})" in str(caught.value)


@ranks(2, place="threads")
def test_a_message_that_is_no_number_is_heard_of_by_its_receiver() -> None:
    kind = interlace.AbortedError if interlace.get_rank() else ValueError
    said = r"tensor of send has nan at \[0\] \(on rank 0\)"
    with pytest.raises(kind, match=said), interlace.check_numerics():
        if interlace.get_rank():
            interlace.recv(torch.empty(1), 0)
        else:
            interlace.send(torch.tensor([NAN]), 1)
