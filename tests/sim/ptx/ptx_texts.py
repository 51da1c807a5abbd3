"""Kernels in PTX for the tests of the machine: a body of instructions, with a place for each thread."""

from typing import Any

import numpy as np
import torch

import interlace
from interlace.verify import launch_ptx

_KERNEL = """
.version 8.0
.target {target}
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 kernel_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<16>;
    .reg .b32 %r<256>;
    .reg .b64 %rd<16>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, {width};
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    {body}
    ret;
}}
"""


TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
    "f32": torch.float32,
    "s32": torch.int32,
}


def octets(matrix: Any, name: str) -> Any:
    """(rows, bytes) of the numbers in a row."""
    return torch.from_numpy(matrix).to(TYPES[name]).contiguous().view(torch.uint8).numpy()


def kernel(body: str, *, threads: int = 32, words: int = 1, arch: int = 80) -> str:
    """%r1 is the thread; %rd1 where its result goes, %rd2 its input, each ``words`` words of 32 bits."""
    target = {80: "sm_80", 90: "sm_90a"}[arch]
    return _KERNEL.format(body=body, threads=threads, width=4 * words, target=target)


def computed(
    body: str,
    given: Any,
    *,
    threads: int = 32,
    words: int = 1,
    shared_bytes: int = 4096,
    arch: int = 80,
    **options: Any,
) -> Any:
    """The words (threads, words) that ``body`` makes of ``given``, an array of as many."""
    texts = kernel(body, threads=threads, words=words, arch=arch)
    input = torch.from_numpy(np.ascontiguousarray(given, np.uint32).view(np.int32).reshape(-1))
    output = torch.zeros(threads * words, dtype=torch.int32)

    def on_rank() -> None:
        launch_ptx(texts, 1, output, input, shared_bytes=shared_bytes)

    interlace.run(on_rank, 1, place="ptx", arch=arch, **options)
    return output.numpy().view(np.uint32).reshape(threads, words)
