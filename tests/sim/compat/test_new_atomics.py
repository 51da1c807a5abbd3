"""``tl.atomic_load``, ``atomic_store`` and ``atomic_poll`` of Triton 3.9: simulated ranks wait by them."""

import pytest
import torch
import triton
import triton.language as tl

import interlace

pytestmark = pytest.mark.skipif(
    not hasattr(tl, "atomic_poll"), reason="this Triton has no such atomics"
)


@triton.jit
def hand_on(peers, rank, out_ptr, MINE: tl.constexpr):
    """Rank 0 publishes 7, rank 1 polls for it and then loads what was stored before."""
    data = tl.load(peers).to(tl.pointer_type(tl.int64))
    if MINE == 0:
        tl.store(data + 1, 40)
        tl.debug_barrier()
        tl.atomic_store(data, 7, sem="release", scope="sys")
    else:
        tl.atomic_poll(data, 7, sem="acquire", scope="sys")
        seen = tl.atomic_load(data, sem="acquire", scope="sys")
        tl.store(out_ptr, seen + tl.load(data + 1))


def exchange() -> int:
    rank = interlace.get_rank()
    handle = interlace.symmetric_memory.rendezvous(
        interlace.symmetric_memory.empty(2, dtype=torch.int64)
    )
    table = torch.tensor([handle.buffer_ptrs[0]], dtype=torch.int64)
    handle.barrier()
    out = torch.zeros(1, dtype=torch.int64)
    hand_on[(1,)](table, rank, out, MINE=rank)
    return int(out)


@pytest.mark.parametrize("seed", range(4))
def test_a_poll_lets_others_go_on(seed: int) -> None:
    assert interlace.run(exchange, 2, seed=seed) == [0, 47]
