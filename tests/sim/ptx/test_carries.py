"""Carries of threads, and what needs carries; ``forms.txt`` has the instructions."""

import numpy as np
import torch
import triton
import triton.language as tl

import interlace
from sim.ptx.ptx_texts import computed


def test_a_signed_high_product_and_a_guard_keep_to_their_threads() -> None:
    body = """
        setp.lt.u32 %p1, %r1, 16;
        add.cc.u32 %r2, -1, 1;
        @%p1 add.cc.u32 %r2, 1, 1;
        ld.global.v2.b32 {%r10, %r30}, [%rd2];
        madc.hi.s32 %r50, %r10, %r30, 0;
        st.global.b32 [%rd1], %r50;"""
    given = np.random.default_rng(1).integers(-(2**31), 2**31, (32, 2), np.int64)
    found = computed(body, given.astype(np.uint32), words=2)[:, 0]
    carried = np.arange(32) >= 16
    assert found.view(np.int32).tolist() == ((given[:, 0] * given[:, 1] >> 32) + carried).tolist()


@triton.jit
def waves_kernel(x, sines, cosines, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(sines + at, tl.sin(value))
    tl.store(cosines + at, tl.cos(value))


def test_sines_of_large_numbers() -> None:
    """Their argument is reduced by a table of digits of 2 / pi, and carries."""
    given = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x = (given * torch.tensor([[3.0], [1e6], [1e20], [1e37]])).reshape(-1)

    def on_rank() -> list[torch.Tensor]:
        found = [torch.empty(128), torch.empty(128)]
        waves_kernel[(1,)](x, *found, N=128)
        return found

    sines, cosines = interlace.run(on_rank, 1, place="ptx")[0]
    exact = x.numpy().astype(np.float64)
    for found, of_numpy in ((sines, np.sin(exact)), (cosines, np.cos(exact))):
        assert np.abs(found.numpy() - of_numpy).max() < 2**-22  # 2 ulp of what is at most 1
