"""Attention over a sharded sequence, made ready for ``python -m interlace bench``::

python -m interlace bench docs/examples/bench_attention.py::ring --m 4096 --n 8 --k 64 --place shm

M tokens of all ranks, N heads of size K, causal. The baseline gathers keys and values, then calls torch's
attention with a mask.
"""

import torch
import torch.nn.functional as F

import interlace
from interlace import nn, reference
from interlace.attention_reference import AttentionReference, visible
from interlace.benchmark import Kernel


def _attention(method, m, n, k, dtype):
    """Called on every rank, once per size: sets up, and says what to run."""
    device, world_size = interlace.device(), interlace.get_world_size()
    places = nn.functional.shard_sequence(torch.arange(m), 0)  # of this rank's tokens
    every = torch.empty(m, dtype=torch.int64)
    lengths = [m // world_size + (rank < m % world_size) for rank in range(world_size)]
    interlace.all_gather_v(every, places, lengths)
    order = every.argsort()  # where each token is among what is gathered
    mask = (places.unsqueeze(1) >= torch.arange(m)).to(device)

    def whole(number):
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(1, m, n, k, generator=generator).to(dtype) for _ in range(3)]

    def inputs(number):
        return tuple(each[:, places].to(device) for each in whole(number))

    def run(q, k, v):
        with torch.no_grad():
            made = nn.functional.context_parallel_attention(q, k, v, causal=True, method=method)
            return interlace.functional.wait(made)

    def gathered(q, k, v):
        both = torch.stack([k, v], 1).transpose(0, 2).contiguous()  # tokens first
        keys = both.new_empty(m, *both.shape[1:])
        interlace.all_gather_v(keys, both, lengths)
        heads = [each.transpose(0, 1).transpose(1, 2) for each in keys[order].unbind(1)]
        return F.scaled_dot_product_attention(q.transpose(1, 2), *heads, attn_mask=mask).transpose(
            1, 2
        )

    def check(result, number):
        heads = [each.transpose(1, 2) for each in whole(number)]
        known = AttentionReference(*heads, visible(m, causal=True), k**-0.5).output()
        right, bound = (each[:, :, places] for each in known)
        return reference.worst_ratio(result.cpu().transpose(1, 2), right, bound)

    return Kernel(
        run=run,
        inputs=inputs,
        check=check,
        nbytes=2 * m * n * k * dtype.itemsize,
        flops=2 * m * m * n * k / world_size,  # half of what it were without the mask
        baselines={"gather + torch": gathered},
    )


def all_gather(m, n, k, dtype):
    return _attention("all_gather", m, n, k, dtype)


def ring(m, n, k, dtype):
    return _attention("ring", m, n, k, dtype)


def ulysses(m, n, k, dtype):
    return _attention("ulysses", m, n, k, dtype)
