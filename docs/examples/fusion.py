"""A tensor-parallel MLP: the ops that torch.compile fuses, and why. Nothing runs, no group is needed."""

import torch

import interlace
import interlace.compile
from interlace import functional

group = interlace.GroupSpec("tp", 4)


def mlp(x, up, down):
    hidden = torch.relu(functional.all_gather(x, group=group) @ up)
    return functional.reduce_scatter(hidden @ down, group=group) * 1.0


x, up, down = torch.ones(1024, 512), torch.ones(512, 2048), torch.ones(2048, 512)
explanation = interlace.compile.explain(mlp, x, up, down, policy="always")
print(explanation)
print("\nbefore\n" + explanation.reports[0].before)
print("\nafter\n" + explanation.reports[0].after)
