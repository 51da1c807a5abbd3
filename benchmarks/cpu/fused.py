"""The fused ops against gloo's collective and torch.mm: subjects of ``interlace bench`` at fixed shapes.

M are all rows, gathered or not yet scattered; (N, K) are per-rank layers of models from 0.1 to 8 billion
parameters.
"""

from collections.abc import Iterator
from functools import partial

import torch
from cpu.measure import Candidates, Case

from interlace.benchmark.requests import FUSED
from interlace.groups.groups import default_group

SMALL = [(256, 512, 512), (1024, 1024, 1024)]
SHAPES = {
    "all_gather_matmul": [*SMALL, (2048, 1024, 2048), (4096, 2048, 1024)],
    "matmul_reduce_scatter": [*SMALL, (2048, 1024, 2048), (4096, 1024, 512)],
    "matmul_all_reduce": [(16, 1024, 1024), *SMALL, (4096, 1024, 512)],
}


def cases(op: str) -> Iterator[Case]:
    place = default_group().place
    baseline = "gloo + torch.mm" if op == "all_gather_matmul" else "torch.mm + gloo"
    for m, n, k in SHAPES[op]:
        subject = FUSED[op](place, torch.float32, m, n, k)
        inputs = subject.inputs(0)
        candidates: Candidates = {
            baseline: partial(subject.theirs, *inputs),
            "pipelined": partial(subject.ours("pipelined"), *inputs),
            "unfused": partial(subject.ours("unfused"), *inputs),
            "torch.mm alone": partial(torch.mm, *subject.matmul_inputs(0)),
        }
        yield Case(op, {"m": m, "n": n, "k": k, "dtype": "float32"}, baseline, candidates)
