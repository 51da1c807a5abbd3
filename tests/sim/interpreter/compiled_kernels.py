"""Kernels that name what only the compiler has, and kernels in decorators; for test_threads.py."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda, libdevice
from triton.language.math import rsqrt

aggregate = tl.core._aggregate


@triton.jit
def bound_at_import(x_ptr, y_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(y_ptr + offsets, rsqrt(tl.load(x_ptr + offsets)))


@triton.jit
def by_libdevice(x_ptr, y_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, libdevice.rsqrt(x) + tl.extra.cuda.libdevice.trunc(x))


@triton.jit
def of_cuda(x_ptr, y_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    cuda.gdc_wait()
    x = tl.load(x_ptr + offsets) + cuda.num_threads()
    cuda.gdc_launch_dependents()
    later = tl.extra.cuda.globaltimer() > 0
    tl.store(y_ptr + offsets, tl.where(later, x + cuda.smid(), 0.0))


@triton.jit
def of_target(x_ptr, y_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    if tl.target_info.is_cuda():
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


@aggregate
class Pair:
    first: tl.tensor
    second: tl.tensor
    factor: tl.constexpr

    @triton.constexpr_function
    def __init__(self, first, second, factor):
        self.first = first
        self.second = second
        self.factor = tl.constexpr(factor)

    @triton.jit
    def total(self):
        return self.first + self.second * self.factor


@triton.jit
def total(pair):
    return pair.total()


@triton.jit
def of_aggregates(x_ptr, y_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, total(Pair(x, x, 3)))


@gluon.jit
def of_gluon(x_ptr, y_ptr, COUNT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offsets = gl.arange(0, COUNT, layout=layout)
    gl.store(y_ptr + offsets, gl.load(x_ptr + offsets) + 1)


CONFIGS = [triton.Config({"BLOCK": 16}, num_warps=2), triton.Config({"BLOCK": 32})]
PRUNED = {"early_config_prune": lambda configs, arguments, **named: configs[1:]}


@triton.autotune(configs=CONFIGS, key=["count"])
@triton.heuristics({"DOUBLE": lambda arguments: 2 * arguments["BLOCK"]})
@triton.jit
def tuned(x_ptr, y_ptr, count, BLOCK: tl.constexpr, DOUBLE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, offsets < count) + DOUBLE, offsets < count)


pruned = triton.autotune(configs=CONFIGS, key=["count"], prune_configs_by=PRUNED)(tuned.fn)


def launched(name):
    """Return the kernel's results for 1 to 64."""
    x, y, kernel = torch.arange(1.0, 65.0), torch.zeros(64), globals()[name]
    if "BLOCK" in kernel.arg_names:
        kernel[lambda arguments: (triton.cdiv(64, arguments["BLOCK"]),)](x, y, 64)
    else:
        kernel[(1,)](x, y, 64)
    return y


def nested():
    @triton.jit
    def inside(y_ptr):
        tl.store(y_ptr, tl.extra.cuda.smid())

    inside[(1,)](torch.empty(1))
