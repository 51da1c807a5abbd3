"""Kernels in other projects' styles, with their device functions: right ones are clean, mutants are found.

A mutant is the kernel with one fault, as people make it. ``races`` calls it one of ``kinds``, which is two
where it depends on the schedule which of two accesses comes first.
"""

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from interlace.verify import races, schedules, shims
from interlace_verify.schedule_check.check import ScheduleReport
from mutants.mutations import Mutant, mutant_of, mutated_function
from tiers import few

FOLDER = "tests/peers"


@dataclass(frozen=True)
class Peer:
    """A file of kernels, the function in it that every rank runs, and the shims that it imports."""

    file: str
    function: str
    shims: tuple[str, ...] = ()
    world_size: int = 2

    def mutant(self, name: str, *edits: tuple[str, str]) -> Mutant:
        return mutant_of(f"{FOLDER}/{self.file}", name, *edits)

    def loaded(self, mutant: Mutant, folder: pathlib.Path) -> Callable[[], Any]:
        return mutated_function(mutant, self.function, folder)


IRIS = Peer("iris_kernels.py", "two_rounds", ("iris",))
TRITON_DISTRIBUTED = Peer("triton_distributed_kernels.py", "one_launch", ("triton_dist",))
WARPS = Peer("triton_distributed_kernels.py", "slices", ("triton_dist",))
NVSHMEM = Peer("nvshmem_kernels.py", "gather", ("torch",), 3)
FLAG = Peer("nvshmem_kernels.py", "tell", ("torch",))
TUPLE = Peer("tuple_kernels.py", "two_rounds", ("torch",))
TWO_SHOTS = Peer("tuple_kernels.py", "two_shots", ("torch",))
PROGRESS = Peer("progress_kernels.py", "two_rounds", ("torch",))
EXPERTS = Peer("expert_kernels.py", "two_rounds", ("torch",), 3)
MULTIMEM = Peer("multimem_kernels.py", "two_rounds", ("torch",))
PEERS = [
    IRIS,
    TRITON_DISTRIBUTED,
    WARPS,
    NVSHMEM,
    FLAG,
    TUPLE,
    TWO_SHOTS,
    PROGRESS,
    EXPERTS,
    MULTIMEM,
]

MUTANTS = [
    (IRIS, ("narrow scope",), "the scope of iris' atomics is gpu unless told otherwise",
     ('rank, to_rank, heap_bases, sem="release", scope="sys")', "rank, to_rank, heap_bases)")),
    (IRIS, ("no barrier",), "the exchange releases one thread's stores",
     ("tl.debug_barrier()\n    iris.atomic_xchg(ready", "iris.atomic_xchg(ready")),
    (TRITON_DISTRIBUTED, ("narrow scope",), "a wait of scope gpu for a word of another GPU",
     ('dl.wait(signal_ptr + slot, 1, "sys"', 'dl.wait(signal_ptr + slot, 1, "gpu"')),
    (TRITON_DISTRIBUTED, ("no barrier",), "notify is thread 0's alone",
     ("__syncthreads()\n            dl.notify(signal_ptr + slot, to_rank",
     "dl.notify(signal_ptr + slot, to_rank")),
    (WARPS, ("weak order",), "a fence orders its own thread's puts",
     ("libshmem_device.quiet()", "libshmem_device.fence()")),
    (WARPS, ("write-read",), "nobody waits for the signals",
     ("        libshmem_device.signal_wait_until(signal_ptr + thread, "
      "libshmem_device.NVSHMEM_CMP_EQ, 1)\n", "")),
    (NVSHMEM, ("weak order",), "a signal is in no order with puts", ("nvshmem.fence()", "pass")),
    (NVSHMEM, ("write-read",), "a signal before the put",
     ("nvshmem.put(block, block, ELEMENTS, to_rank)\n        nvshmem.fence()\n"
     "        nvshmem.signal_op(signal + step, 1, 9, to_rank)",
     "nvshmem.signal_op(signal + step, 1, 9, to_rank)\n        nvshmem.fence()\n"
     "        nvshmem.put(block, block, ELEMENTS, to_rank)")),
    (FLAG, ("weak order",), "nothing between data and a flag that are both put",
     ("        nvshmem.quiet()\n", "")),
    (FLAG, ("write-read",), "no wait for a flag that is put", ("        nvshmem.wait_until(flag, 0, 1)\n",
     "")),
    (TUPLE, ("weak order",), "the meeting after the stores is one that orders none",
     ("meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=True)",
     "meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=False, BEFORE_LOADS=True)")),
    (TUPLE, ("read-write", "write-read"), "no meeting at the end",
     ("    meet(pads_ptr, rank, WORLD_SIZE, AFTER_STORES=True, BEFORE_LOADS=False)\n", "")),
    (TWO_SHOTS, ("weak order", "write-read"), "the meeting before the sums acquires nothing",
     ("AFTER_STORES=True, BEFORE_LOADS=True)\n    total = tl.zeros((BLOCK,)",
     "AFTER_STORES=True, BEFORE_LOADS=False)\n    total = tl.zeros((BLOCK,)")),
    (TUPLE, ("no barrier",), "threads that signal do not wait for those that store",
     ("    if AFTER_STORES:\n        tl.debug_barrier()\n", "")),
    (TUPLE, ("no barrier", "write-read"), "threads that load do not wait for those that wait",
     ("    if BEFORE_LOADS:\n        tl.debug_barrier()\n", "")),
    (PROGRESS, ("weak order",), "a poll that acquires nothing", ('sem="acquire"', 'sem="relaxed"')),
    (PROGRESS, ("write-read",), "no wait for the progress of a shard",
     ('        while tl.atomic_add(progress_ptr + source, 0, sem="acquire", scope="sys") == 0:\n'
     "            pass\n", "")),
    (PROGRESS, ("write-read",), "the word before the copy",
     ("            gathered[source].copy_(handle.get_buffer(source, shard.shape, shard.dtype))\n"
     "            handle.stream_write_value32(progress, offset=source, val=1)\n",
     "            handle.stream_write_value32(progress, offset=source, val=1)\n"
     "            gathered[source].copy_(handle.get_buffer(source, shard.shape, shard.dtype))\n")),
    (PROGRESS, ("mixed access", "write-read"),
     "the stream does not wait for what the current one has been given",
     ("    stream.wait_stream(torch.cuda.current_stream())\n", "")),
    (PROGRESS, ("read-write",), "the next call gathers into what this one may still read",
     ("    torch.cuda.current_stream().wait_stream(stream)\n", "")),
    (EXPERTS, ("write-read",), "no barrier between dispatch and experts", ("        there.barrier()\n",
     "")),
    (EXPERTS, ("write-write",), "rows of all ranks begin at 0", ("flat[:i]", "flat[i - i % TOKENS : i]")),
    (MULTIMEM, ("write-read", "mixed access"), "added up before all inputs are there",
     ("    meet(counts_ptr, 2 * step + 1, rank, WORLD_SIZE)\n", "")),
    (MULTIMEM, ("no barrier",), "sums of all threads signalled by one",
     ("    tl.debug_barrier()\n    table", "    table")),
]  # fmt: skip


def late_stores(fn: Callable[[], Any], world_size: int, n: int) -> ScheduleReport:
    return schedules(fn, world_size, n=n, store_buffers=True, workers=1, shrink=False)


@pytest.mark.parametrize(
    "peer", few(PEERS, IRIS, WARPS, FLAG, PROGRESS), ids=lambda peer: f"{peer.file} {peer.function}"
)
def test_a_right_kernel_is_clean(peer: Peer, tmp_path: pathlib.Path) -> None:
    with shims.installed(*peer.shims):
        fn = peer.loaded(peer.mutant("none"), tmp_path)
        report = races(fn, peer.world_size, seeds=3)
        assert report.clean and report.events > 100, str(report)
        assert late_stores(fn, peer.world_size, 4).clean


@pytest.mark.parametrize(
    ("peer", "kinds", "name", "edit"),
    few(
        MUTANTS,
        *(
            next(m for m in MUTANTS if m[0] is peer)
            for peer in PEERS
            if peer not in (NVSHMEM, EXPERTS, TUPLE, TRITON_DISTRIBUTED, WARPS)
        ),
        *(m for m in MUTANTS if m[2] == "no wait for a flag that is put"),
    ),
    ids=[f"{m[0].file} {m[2]}" for m in MUTANTS],
)
def test_a_mutant_is_found(
    peer: Peer, kinds: tuple[str, ...], name: str, edit: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    with shims.installed(*peer.shims):
        fn = peer.loaded(peer.mutant(name, edit), tmp_path)
        report = races(fn, peer.world_size, seeds=2)
    assert set().union(*(each.kinds for each in report.findings)) & set(kinds), str(report)
