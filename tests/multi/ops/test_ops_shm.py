"""Every op across processes: all algorithms, asynchronous too, groups, mismatches, torchrun."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import interlace
from multi.ops import op_ranks
from tiers import thorough

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "fused", "pipelined", "unfused"])
def test_fused_ops(algorithm: str, dtype: torch.dtype, async_op: bool) -> None:
    world_size = 3
    results = interlace.run(op_ranks.every_op, world_size, algorithm, dtype, async_op, place="shm")
    inputs = [op_ranks.operands(rank, world_size, dtype) for rank in range(world_size)]
    whole = torch.cat([shard for shard, *_ in inputs])
    product = whole.double() @ inputs[0][1].double()
    total = sum(a.double() @ b.double() for _, _, a, b in inputs)
    scale = TOLERANCE[dtype]
    for gathered, output, _, reduced in results:
        assert torch.equal(gathered, whole)
        assert (output.double() - product).abs().max() <= scale * product.abs().max()
        assert (reduced.double() - total / world_size).abs().max() <= scale * total.abs().max()
        assert torch.equal(reduced, results[0][3])
    scattered = torch.cat([result[2] for result in results])
    assert (scattered.double() - total).abs().max() <= scale * total.abs().max()


@pytest.mark.parametrize("algorithm", ["kernel", "copy", "multimem", "low_latency"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives(algorithm: str, world_size: int) -> None:
    results = interlace.run(op_ranks.collectives, world_size, algorithm, place="shm")
    ranks = torch.arange(float(world_size))
    weights = world_size * (world_size + 1) / 2
    for rank, (gathered, reduced, part) in enumerate(results):
        assert torch.equal(gathered, ranks[:, None].expand(-1, 3))
        assert torch.equal(reduced, torch.arange(7.0) * world_size + ranks.sum())
        assert torch.equal(part, torch.arange(2.0 * rank, 2.0 * rank + 2) * weights)


def test_subgroups() -> None:
    assert interlace.run(op_ranks.in_subgroups, 4, place="shm") == [[2.0], [4.0], [2.0], [4.0]]


def test_async_ops_overlap_and_stay_in_order() -> None:
    assert interlace.run(op_ranks.overlapping, 3, place="shm") == [True] * 3


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("k", ValueError, r"the shape of input off gather_dim differs.*\(8,\) on rank 0, \(9,\)"),
        ("dtype", TypeError, r"dtype of input differs.*float32 on rank 0, torch.float16 on rank 1"),
        ("op", ValueError, r"rank 0 calls all_gather_matmul, rank 1 calls matmul_reduce_scatter"),
        ("reduce_op", ValueError, r"reduce_op differs between ranks: sum on rank 0, avg on rank 1"),
    ],
)
def test_mismatch_names_both_values_and_ranks(what: str, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        interlace.run(op_ranks.mismatched, 2, what, place="shm")


def test_group_is_usable_after_a_mismatch() -> None:
    assert interlace.run(op_ranks.usable_after_error, 2, place="shm") == [2.0, 2.0]


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_ranks_out_of_step_hear_the_first_cause_from_every_later_call(place: str) -> None:
    first = "ranks call different ops at the same time: rank 0 calls all_gather, rank 1 calls all_reduce"
    for rank, said in enumerate(
        interlace.run(op_ranks.out_of_step, 2, place == "shm", place=place)
    ):
        assert said[0] == f"DifferentOpsError: {first}"
        *later, misuse = said[1:]
        assert (
            misuse
            == f"TypeError: output must be a tensor or a list of tensors, got int (on rank {rank})"
        )
        assert len(later) == 5 - rank
        for text in later:
            assert text.startswith(f"InterlaceError: rank {rank}: ") and text.endswith(first)
            assert "out of step" in text


@thorough
def test_same_results_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import interlace, torch
            rank, world_size = interlace.get_rank(), interlace.get_world_size()
            y = interlace.all_gather_matmul(torch.full((2, 4), 1.0 + rank), torch.ones(4, 3))
            assert y[:, 0].tolist() == [4.0, 4.0, 8.0, 8.0], y
            z = interlace.matmul_reduce_scatter(torch.ones(2, 4), torch.ones(4, 1))
            assert z.item() == 8.0
            interlace.barrier()
            print(f"right on {rank} of {world_size}")
            interlace.shutdown()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    assert "right on 0 of 2" in done.stdout and "right on 1 of 2" in done.stdout
