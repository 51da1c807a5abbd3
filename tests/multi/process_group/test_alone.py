"""A world of one: all calls of a kind are alike; and torchrun's restart after the death of a rank."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
import torch_names
from ranks import ranks
from support import under_torchrun
from tiers import thorough

Make = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(6.0)
    return whole[1:5], whole[:4]


def _same() -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.arange(4.0)
    return tensor, tensor


def _nested() -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return tensor.clone(), tensor


def _freed() -> tuple[torch.Tensor, torch.Tensor]:
    tensors = torch.zeros(4), torch.ones(4)
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return tensors


CASES: dict[str, Make] = {
    "plain": lambda: (torch.zeros(4), torch.arange(4.0)),
    "in place": _same,
    "empty": lambda: (torch.zeros(0), torch.zeros(0)),
    "0-dim": lambda: (torch.zeros(()), torch.ones(())),
    "bool": lambda: (torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)),
    "complex": lambda: (torch.zeros(2, dtype=torch.complex64), torch.ones(2) * (1 + 2j)),
    "conjugated": lambda: (torch.zeros(2, dtype=torch.complex64), (torch.ones(2) * 1j).conj()),
    "negated": lambda: (torch.zeros(2), (torch.ones(2) * 1j).conj().imag),
    "transposed output": lambda: (torch.zeros(3, 2).t(), torch.arange(6.0).view(2, 3)),
    "transposed input": lambda: (torch.zeros(2, 3), torch.arange(6.0).view(3, 2).t()),
    "requires grad": lambda: (torch.zeros(2), torch.ones(2, requires_grad=True)),
    "parameter": lambda: (torch.zeros(2), torch.nn.Parameter(torch.ones(2))),
    "dtypes": lambda: (torch.zeros(2), torch.ones(2, dtype=torch.int32)),
    "shapes": lambda: (torch.zeros(2), torch.ones(3)),
    "stacked": lambda: (torch.zeros(1, 3), torch.arange(3.0)),
    "overlapping": _overlapping,
    "quantized": lambda: (
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ),
    "nested": _nested,
    "no memory": _freed,
    "uint1": lambda: (
        torch.zeros(8, dtype=torch.uint8).view(torch.uint1)[::2],
        torch.ones(8, dtype=torch.uint8).view(torch.uint1)[::2],
    ),
}

Op = Callable[..., Any]
OPS: dict[str, Op] = {
    "all_gather": lambda out, x, **kw: dist.all_gather([out], x, **kw),
    "all_gather_single": lambda out, x, **kw: torch_names.all_gather_single(out, x, **kw),
    "reduce_scatter": lambda out, x, **kw: dist.reduce_scatter(out, [x], **kw),
    "reduce_scatter_single": lambda out, x, **kw: torch_names.reduce_scatter_single(out, x, **kw),
    "bitwise": lambda out, x, **kw: dist.reduce_scatter(out, [x], dist.ReduceOp.BAND, **kw),
    "premul_sum": lambda out, x, **kw: dist.reduce_scatter(
        out, [x], torch_names.premul_sum(2.0), **kw
    ),
    "all_to_all": lambda out, x, **kw: dist.all_to_all([out], [x], **kw),
    "all_to_all_single": lambda out, x, **kw: dist.all_to_all_single(out, x, **kw),
    "gather": lambda out, x, **kw: dist.gather(x, [out], 0, **kw),
    "scatter": lambda out, x, **kw: dist.scatter(out, [x], 0, **kw),
}
FEW = {name: OPS[name] for name in ("all_gather", "reduce_scatter_single", "all_to_all", "scatter")}


def _outcome(op: Op, make: Make, async_op: bool) -> tuple[str, str]:
    out, x = make()
    try:
        work = op(out, x, async_op=async_op)
        if async_op:
            work.wait()
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    if out.dtype in (torch.uint1,):  # torch cannot print it
        return "gave", str(out.untyped_storage().tolist())
    return "gave", f"{out!r} from {x!r}"


@ranks(1, backend="interlace")
def test_remembered_and_asynchronous_calls_are_as_the_first() -> None:
    for case, make in CASES.items():
        for name, op in OPS.items() if case in ("plain", "in place", "shapes") else FEW.items():
            first, general = _outcome(op, make, False), _outcome(op, make, True)
            assert first == general == _outcome(op, make, False), f"{name}, {case}"


@ranks(1, backend="interlace")
def test_an_output_of_another_size_is_refused_and_nothing_is_written() -> None:
    for sent in (32, 3):
        for name, op in OPS.items():
            for async_op in (False, True):
                memory = torch.full((64,), 7, dtype=torch.int32)
                given = memory[:6], torch.arange(sent, dtype=torch.int32)
                kind, text = _outcome(op, lambda given=given: given, async_op)  # type: ignore[misc]
                about = f"{name} {sent} to 6: {kind} {text}"
                assert kind == "raised" and text.startswith(("ValueError", "RuntimeError")), about
                assert bool((memory == 7).all()), about


@ranks(1, backend="interlace")
def test_a_call_counts_is_profiled_and_ends_with_its_group() -> None:
    out, x = torch.zeros(2), torch.ones(2)
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_gather([out], x)
    assert group._get_sequence_number_for_group() == before + 1
    with torch.autograd.profiler.profile() as profile:
        dist.all_gather([out], x)
    assert "interlace:all_gather on 0" in {event.name for event in profile.function_events}
    dist.destroy_process_group()
    with pytest.raises(interlace.InterlaceError):
        group.allgather([[out]], [x])


SCRIPT = """
import os, signal, torch, torch.distributed as dist, interlace

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, whatever the other rank says

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("interlace")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # torchrun is to wait for what is said here
whole = torch.ones(1000)
dist.all_reduce(whole)
if generation == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(whole)
    interlace.all_reduce(whole)
except interlace.InterlaceError as error:
    left = dist.get_world_size(interlace.shrink())
    say(f"{error} in generation {generation}, {left} is left")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while True:
        dist.all_reduce(whole)
place = dist.group.WORLD.interlace_communicator.place.name
say(f"rank {dist.get_rank()} of generation {generation} has {whole[-1]:.0f} in {place}")
dist.destroy_process_group()
"""


@thorough
def test_torchrun_restarts_all_ranks_after_a_death(tmp_path: Path) -> None:
    """One rank has continued alone meanwhile, and the store has keys of the first generation."""
    script = tmp_path / "elastic.py"
    script.write_text(SCRIPT)
    command = "torchrun --standalone --nproc-per-node=2 --max-restarts=1 --monitor-interval=0.1"
    said = under_torchrun(command, str(script))
    died, *completed = said.splitlines()
    assert died.startswith("rank 1 (pid") and died.endswith("all_reduce in generation 0, 1 is left")
    assert sorted(completed) == [f"rank {rank} of generation 1 has 8 in shm" for rank in (0, 1)]
