"""PTX as others write it inline: each form, whose kernels have it, and what it must give.

The forms were collected from the public sources of these projects in 2026; where nobody is named, a form
is of the same family as its neighbours, or a compiler writes it. They are facts about PTX; nothing else is
theirs. A text computes with registers ``a``, ``b``, ``c``, which have the given bits (``al`` is the same of
64 bits, ``ah`` of 16), and ``m``, the address of 64 bytes of global memory. Its result is in ``d``, ``dl``,
``dh`` or ``p``, with ``q`` as the second bit, and in memory.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Form(NamedTuple):
    """``after``: 32-bit words in memory afterwards, from the first on. ``arch``: the first that has it.

    ``others``: the memory of a second rank, where an address is one of both ranks'.
    """

    text: str
    given: Sequence[int]
    expected: int
    used: str = ""
    memory: Sequence[int] = ()
    after: Sequence[int] = ()
    arch: int = 80
    others: Sequence[int] = ()


def bits(*values: float, dtype: torch.dtype = torch.float32) -> int:
    """Of several numbers, the first in the lowest bits."""
    octets = torch.tensor(values, dtype=torch.float32).to(dtype).view(torch.uint8)
    return int.from_bytes(bytes(octets.tolist()), "little")


def halves(*values: float) -> int:
    return bits(*values, dtype=torch.float16)


def brains(*values: float) -> int:
    return bits(*values, dtype=torch.bfloat16)


def double(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF, THIRD = float("nan"), float("inf"), 1 / 3
F, H, B = bits, halves, brains
MINUS = 2**32 - 1  # -1

BARRIERS = "kraken, Megatron-core, torchao, SGLang, FlashInfer"
ARITHMETIC = [
    Form("add.bf16x2 d, a, b;", [B(1, 2), B(0.5, 256)], B(1.5, 258), "symm-mem-recipes, Megatron-core",
     arch=90),
    Form("sub.rn.bf16x2 d, a, b;", [B(1, 2), B(0.5, 256)], B(0.5, -254), "FlashInfer", arch=90),
    Form("mul.bf16x2 d, a, b;", [B(3, -2), B(0.5, 4)], B(1.5, -8), "triton_kernels", arch=90),
    Form("fma.rn.bf16x2 d, a, b, c;", [B(3, 2), B(5, 4), B(1, -1)], B(16, 7), "triton_kernels"),
    Form("fma.rn.relu.bf16x2 d, a, b, c;", [B(3, -2), B(5, 4), B(1, 1)], B(16, 0)),
    Form("max.bf16x2 d, a, b;", [B(3, NAN), B(5, 4)], B(5, 4), "FlashInfer"),
    Form("max.NaN.bf16x2 d, a, b;", [B(3, NAN), B(5, 4)], B(5) | 0x7FFF0000, "FlashInfer"),
    Form("neg.bf16x2 d, a;", [B(3, -4)], B(-3, 4)),
    Form("abs.bf16x2 d, a;", [B(3, -4)], B(3, 4), "FlashInfer"),
    Form("add.f16x2 d, a, b;", [H(1, 2), H(0.5, 0.25)], H(1.5, 2.25), "FlashInfer"),
    Form("sub.f16x2 d, a, b;", [H(1, 2), H(0.5, 0.25)], H(0.5, 1.75), "TileLang"),
    Form("mul.rn.f16x2 d, a, b;", [H(1, 2), H(0.5, 0.25)], H(0.5, 0.5), "Triton"),
    Form("fma.rn.f16x2 d, a, b, c;", [H(1, 2), H(3, 4), H(0.5, 0.5)], H(3.5, 8.5), "TileLang"),
    Form("min.f16x2 d, a, b;", [H(1, 2), H(0.5, 3)], H(0.5, 2), "Triton"),
    Form("add.bf16 dh, ah, bh;", [B(1), B(0.5)], B(1.5), arch=90),
    Form("fma.rn.f16 dh, ah, bh, ch;", [H(1), H(0.5), H(2)], H(2.5)),
    Form("add.f32x2 dl, al, bl;", [F(1, 2), F(3, -4)], F(4, -2), "Triton", arch=100),
    Form("sub.f32x2 dl, al, bl;", [F(1, 2), F(3, -4)], F(-2, 6), "Triton", arch=100),
    Form("mul.f32x2 dl, al, bl;", [F(1, 2), F(3, -4)], F(3, -8), "Triton", arch=100),
    Form("fma.rn.f32x2 dl, al, bl, cl;", [F(1, 2), F(3, -4), F(1, 1)], F(4, -7), "Triton", arch=100),
    Form("add.rn.f32 d, a, b;", [F(1), F(2**-24)], F(1), "vLLM"),
    Form("sub.rn.f32 d, a, b;", [F(1), F(2**-24)], F(1 - 2**-24), "PyTorch Inductor"),
    Form("mul.rn.f32 d, a, b;", [F(3), F(THIRD)], F(1), "vLLM"),
    Form("add.rz.f32 d, a, b;", [F(1), F(-(2**-26))], F(1 - 2**-24)),
    Form("add.rm.ftz.f32 d, a, b;", [F(-1), F(-(2**-30))], F(-1 - 2**-23), "FlashInfer"),
    Form("mul.rp.f32 d, a, b;", [F(3), F(THIRD)], F(1 + 2**-23)),
    Form("fma.rm.f32 d, a, b, c;", [F(1), F(1), F(-(2**-30))], F(1 - 2**-24)),
    Form("fma.rn.sat.f32 d, a, b, c;", [F(3), F(2), F(0)], F(1)),
    Form("add.sat.f32 d, a, b;", [F(3), F(-5)], F(0)),
    Form("fma.rn.f64 dl, al, bl, cl;", [double(1 + 2**-52), double(1 - 2**-52), double(-1)],
     double(-(2.0**-104))),
    Form("max.NaN.xorsign.abs.f32 d, a, b;", [F(-3), F(2)], F(-3), "triton_kernels", arch=90),
    Form("min.NaN.xorsign.abs.f32 d, a, b;", [F(-3), F(2)], F(-2), "triton_kernels", arch=90),
    Form("max.NaN.f32 d, a, b;", [F(NAN), F(2)], 0x7FFFFFFF),
    Form("max.f32 d, a, b, c;", [F(1), F(5), F(2)], F(5), "FlashInfer", arch=100),
    Form("copysign.f32 d, a, b;", [F(-1), F(7)], F(-7)),
    Form("mov.f32 d, a;", [F(-1)], F(-1), "flash-linear-attention"),
    Form("setp.lt.f16x2 p|q, a, b;", [H(1, 5), H(2, 4)], 1, "Triton"),
    Form("set.gt.f16x2.f16x2 d, a, b;", [H(1, 5), H(2, 4)], H(0, 1)),
    Form("set.lt.u32.f32 d, a, b;", [F(1), F(2)], MINUS),
    Form("slct.f32.s32 d, a, b, c;", [F(1), F(2), MINUS], F(2)),
    Form("testp.finite.f32 p, a;", [F(INF)], 0),
    Form("testp.subnormal.f32 p, a;", [1], 1),
    Form("ex2.approx.ftz.f32 d, a;", [F(3)], F(8), "flash-linear-attention, FlashInfer"),
    Form("ex2.approx.f32 d, a;", [F(-2)], F(0.25), "FlashInfer"),
    Form("ex2.approx.ftz.bf16x2 d, a;", [B(3, -1)], B(8, 0.5), arch=90),
    Form("ex2.approx.f16x2 d, a;", [H(3, -1)], H(8, 0.5), "FlashInfer"),
    Form("lg2.approx.ftz.f32 d, a;", [F(8)], F(3), "flash-linear-attention"),
    Form("rcp.approx.ftz.f32 d, a;", [F(4)], F(0.25), "FlashInfer"),
    Form("rcp.rn.f64 dl, al;", [double(4)], double(0.25)),
    Form("rsqrt.approx.f32 d, a;", [F(16)], F(0.25), "Megatron-core, PyTorch"),
    Form("rsqrt.approx.ftz.f32 d, a;", [F(16)], F(0.25), "FlashInfer"),
    Form("sqrt.approx.f32 d, a;", [F(16)], F(4), "FlashInfer"),
    Form("sin.approx.f32 d, a;", [F(0)], F(0)),
    Form("cos.approx.f32 d, a;", [F(0)], F(1)),
    Form("tanh.approx.f32 d, a;", [F(0)], F(0), "Triton, FlashInfer"),
    Form("tanh.approx.bf16x2 d, a;", [B(0, 1)], B(0, 0.76159416), arch=90),
    Form("div.full.f32 d, a, b;", [F(1), F(3)], F(THIRD), "FlashInfer"),
]  # fmt: skip

WHOLE = [
    Form("add.u32 d, a, b;", [MINUS, 2], 1, "Triton-distributed"),
    Form("mad.lo.u32 d, a, b, c;", [7, 6, 5], 47, "Triton"),
    Form("mad.hi.u32 d, a, b, c;", [2**31, 6, 5], 8),
    Form("mul.lo.u32 d, a, b;", [7, 6], 42, "Triton-distributed"),
    Form("mul24.lo.s32 d, a, b;", [2**24 - 1, 5], 2**32 - 5),
    Form("mad24.hi.u32 d, a, b, c;", [2**23, 2**10, 1], 2**17 + 1),
    Form("add.sat.s32 d, a, b;", [2**31 - 1, 1], 2**31 - 1),
    Form("sad.u32 d, a, b, c;", [3, 10, 100], 107),
    Form("min.s16x2 d, a, b;", [0x0005FFFF, 0x00040001], 0x0004FFFF, arch=90),
    Form("max.u16x2 d, a, b;", [0x0005FFFF, 0x00040001], 0x0005FFFF, arch=90),
    Form("add.u16x2 d, a, b;", [0x0005FFFF, 0x00040001], 0x00090000, arch=90),
    Form("max.relu.s32 d, a, b;", [MINUS, MINUS - 1], 0, arch=90),
    Form(
        "dp4a.s32.s32 d, a, b, c;", [0x01FF0203, 0x04FF0506, 100], 100 + 4 + 1 + 10 + 18, "Triton"
    ),
    Form("dp4a.u32.s32 d, a, b, c;", [0x000000FF, 0x000000FF, 0], 2**32 - 255),
    Form("dp2a.lo.s32.s32 d, a, b, c;", [0xFFFF0003, 0x00000504, 1], 12 - 5 + 1),
    Form("lop3.b32 d, a, 0x80008000, b, 0xEA;", [0xFFFF1234, 0x5], 0x80000005, "Triton"),
    Form("prmt.b32 d, a, b, 0x5410;", [0x03020100, 0x13121110], 0x11100100, "Triton"),
    Form("prmt.b32 d, 0x020100ff, 0x020100ff, a;", [0x3210], 0x020100FF, "Triton"),
    Form("prmt.b32.f4e d, a, b, c;", [0x03020100, 0x13121110, 2], 0x11100302),
    Form("prmt.b32.rc16 d, a, b, c;", [0x03020100, 0x13121110, 1], 0x03020302),
    Form("bfe.u32 d, a, 23, 8;", [F(1)], 127, "FlashInfer"),
    Form("bmsk.clamp.b32 d, a, b;", [4, 3], 0x70, "CUB"),
    Form("bmsk.clamp.b32 d, a, b;", [4, 40], 0xFFFFFFF0, "CUB"),
    Form("bmsk.clamp.b32 d, a, b;", [33, 1], 0, "CUB"),
    Form("bmsk.wrap.b32 d, a, b;", [36, 35], 0x70, "CUB"),
    Form("bfi.b32 d, a, b, 4, 8;", [0xAB, MINUS], 0xFFFFFABF, "TileLang"),
    Form("bfi.b64 dl, al, bl, 60, 8;", [0xAB, 0], 0xB << 60),
    Form("bfind.u32 d, a;", [0x00800001], 23),
    Form("bfind.shiftamt.s32 d, a;", [2**32 - 5], 29),
    Form("brev.b32 d, a;", [0x80000001 | 2], 0xC0000001 & MINUS, "FlashInfer"),
    Form("brev.b64 dl, al;", [1], 1 << 63),
    Form("popc.b32 d, a;", [0xF0F0], 8, "Triton-distributed"),
    Form("clz.b32 d, a;", [0xF0F0], 16, "Triton-distributed"),
    Form("cnot.b32 d, a;", [0], 1),
    Form("shf.l.wrap.b32 d, a, b, c;", [0x80000000, 1, 1], 3, "Triton"),
    Form("shf.r.clamp.b32 d, a, b, c;", [0x80000000, 1, 31], 3),
    Form("shl.b32 d, a, 3;", [5], 40, "Triton"),
    Form("shr.u32 d, a, 5;", [127], 3, "Triton-distributed"),
    Form("selp.u32 d, 1, 0, p;", [], 0, "Triton-distributed"),
    Form("selp.b16 dh, ah, bh, p;", [3, 4], 4, "Triton"),
    Form("mov.b64 dl, {a, b};", [1, 2], 2**33 + 1, "Triton-distributed, symm-mem-recipes"),
    Form(".reg .b8 t; cvt.u8.u32 t, a; mov.b32 d, {t, t, t, t};", [0x1AB], 0xABABABAB, "torchao"),
    Form(".reg .v4 .b32 v; mov.v4.b32 v, 7; add.u32 d, v.x, v.w;", [], 14, "symm-mem-recipes"),
    Form(".reg .v2 .b32 v; mov.v2.b32 v, {a, b}; mov.b32 d, v.y;", [1, 2], 2),
    Form(".reg .b128 v; mov.b128 v, {al, bl}; mov.b128 {bl, dl}, v;", [1, 2], 2, arch=90),
    Form("mov.u32 d, %ntid.x; mov.u32 d, %ctaid.x;", [], 0, BARRIERS),
    Form("mov.u32 d, %tid.y; mov.u32 d, %ntid.z;", [], 1, BARRIERS),
    Form("mov.u32 d, %smid;", [], 0, "Triton, FlashInfer"),
    Form("mov.u64 dl, %globaltimer; mov.b64 dl, 0;", [], 0, "Triton-distributed, Triton"),
    Form("mov.u64 dl, %clock64; mov.b64 dl, 0;", [], 0),
]

CONVERSIONS = [
    Form("cvt.rn.bf16x2.f32 d, a, b;", [F(1), F(2)], B(2, 1), "Triton-distributed"),
    Form("cvt.rn.relu.bf16x2.f32 d, a, b;", [F(-1), F(2)], B(2, 0)),
    Form("cvt.rz.bf16x2.f32 d, a, b;", [F(1.999), F(2)], B(2, 1.9921875), "FlashInfer"),
    Form("cvt.rn.f16x2.f32 d, a, b;", [F(1), F(1e6)], H(INF, 1), "FlashInfer"),
    Form("cvt.rn.satfinite.f16.f32 dh, a;", [F(1e6)], H(65504)),
    Form("cvt.rz.f16.f32 dh, a;", [F(2049.9)], H(2048)),
    Form("cvt.rp.f16.f32 dh, a;", [F(-2049.9)], H(-2048)),
    Form("cvt.rz.f32.s32 d, a;", [2**24 + 1], F(2**24)),
    Form("cvt.rm.f32.f64 d, al;", [double(-1 - 2**-40)], F(-1 - 2**-23)),
    Form("cvt.f32.bf16 d, ah;", [B(-3)], F(-3), "Triton-distributed"),
    Form("cvt.rna.tf32.f32 d, a;", [F(1 + 2**-11)], F(1 + 2**-10), "triton_kernels"),
    Form("cvt.rn.tf32.f32 d, a;", [F(1 + 2**-11)], F(1), "triton_kernels", arch=90),
    Form("cvt.rn.satfinite.e4m3x2.f32 dh, a, b;", [F(1e9), F(-1.0625)], bits(-1, 448, dtype=E4M3),
     "Triton, vLLM", arch=90),
    Form("cvt.rn.satfinite.e5m2x2.f32 dh, a, b;", [F(1e9), F(-1.125)], bits(-1, 57344, dtype=E5M2),
     "Triton", arch=90),
    Form("cvt.rn.satfinite.e4m3x2.f16x2 dh, a;", [H(3, -4)], bits(3, -4, dtype=E4M3), arch=90),
    Form("cvt.rn.f16x2.e4m3x2 d, ah;", [bits(3, -0.25, dtype=E4M3)], H(3, -0.25), "FlashInfer", arch=90),
    Form("cvt.rn.f16x2.e5m2x2 d, ah;", [bits(3, -0.25, dtype=E5M2)], H(3, -0.25), "FlashInfer", arch=90),
    Form(".reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, a, b; cvt.u32.u8 d, t;", [F(100), F(-1.5)], 0x7B,
     "vLLM, torchao, triton_kernels", arch=100),
    Form(".reg .b8 t; cvt.u8.u32 t, a; cvt.rn.f16x2.e2m1x2 d, t;", [0x7B], H(-1.5, 6), "triton_kernels",
     arch=100),
    Form("cvt.rn.satfinite.e2m3x2.f32 dh, a, b;", [F(100), F(0.125)], 0x1F01, arch=100),
    Form("cvt.rn.satfinite.e3m2x2.f32 dh, a, b;", [F(-0.0625), F(28)], 0x211F, arch=100),
    Form("cvt.rn.f16x2.e3m2x2 d, ah;", [0x211F], H(28, -0.0625), arch=100),
    Form("cvt.rp.satfinite.ue8m0x2.f32 dh, a, b;", [F(1.5), F(1)], 0x807F, "Triton, torchao", arch=100),
    Form("cvt.rz.ue8m0x2.f32 dh, a, b;", [F(1.5), F(0)], 0x7F00, arch=100),
    Form("cvt.rn.bf16x2.ue8m0x2 d, ah;", [0x807F], B(1, 2), "FlashInfer", arch=100),
    Form("cvt.rs.f16x2.f32 d, a, b, c;", [F(1 + 2**-11), F(1 + 2**-11), 0x1000], H(1 + 2**-10, 1),
     "FlashInfer", arch=100),
    Form("cvt.rs.satfinite.e4m3x4.f32 d, {a, a, b, b}, c;", [F(1 + 2**-4), F(3), 1 << 31], bits(3, 3, 1.125,
     1, dtype=E4M3), "FlashInfer", arch=100),
    Form("cvt.rs.satfinite.e2m1x4.f32 dh, {a, a, b, b}, c;", [F(1), F(-6), 5], 0x22FF, "torchao", arch=100),
    Form("cvt.rni.sat.s8.f32 d, a; and.b32 d, d, 255;", [F(-300)], 0x80, "FlashInfer"),
    Form("cvt.rzi.s32.f32 d, a;", [F(-2.9)], 2**32 - 2),
    Form("cvt.u32.u64 d, al;", [2**40 + 5], 5, "Triton-distributed"),
]  # fmt: skip

ONES = [F(1)] * 4
ACCESSES = [
    Form("ld.global.u32 d, [m+4];", [], 7, "Megatron-core", [6, 7]),
    Form("ld.global.v2.u32 {d, a}, [m]; shl.b32 d, d, a;", [], 14, "Megatron-core", [7, 1]),
    Form("ld.global.v4.u32 {a, b, c, d}, [m]; sub.u32 d, d, a;", [], 3, "Megatron-core", [1, 2, 3, 4]),
    Form("isspacep.global p, m; isspacep.shared q, m;", [], 1),
    Form("ld.global.v2.u64 {al, dl}, [m];", [], 2**32 + 3, "symm-mem-recipes", [1, 2, 3, 1]),
    Form("ld.relaxed.sys.global.v4.b32 {a, b, c, d}, [m];", [], 4, "SGLang", [1, 2, 3, 4]),
    Form("ld.volatile.global.v2.u32 {a, d}, [m];", [], 2, "Triton-distributed", [1, 2]),
    Form("ld.volatile.global.u64 dl, [m];", [], 2**32, "torchcomms", [0, 1]),
    Form("ld.global.acquire.sys.b64 dl, [m];", [], 2**32, "torchcomms", [0, 1]),
    Form("ld.acquire.sys.global.u32 d, [m];", [], 3, "symm-mem-recipes", [3]),
    Form("ld.global.relaxed.gpu.u32 d, [m];", [], 3, "symm-mem-recipes", [3]),
    Form("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {a, b, c, d}, [m];", [], 4,
     "Triton-distributed, FlashInfer", [1, 2, 3, 4]),
    Form("ld.global.nc.L1::evict_last.L2::64B.b32 d, [m];", [], 4, "", [4]),
    Form("ld.global.v8.b32 {a, a, a, a, a, a, a, d}, [m];", [], 8, "FlashInfer", range(1, 9), arch=100),
    Form("createpolicy.fractional.L2::evict_first.b64 al, 1.0; ld.global.L2::cache_hint.b32 d, [m], al;",
     [], 4, "Triton, FlashInfer", [4]),
    Form(".reg .b128 v; ld.global.b128 v, [m]; mov.b128 {al, dl}, v;", [], 3, "", [1, 0, 3, 0], arch=90),
    Form(".reg .v4 .b32 v; ld.global.v4.b32 v, [m]; mov.b32 d, v.z;", [], 3, "", [1, 2, 3, 4]),
    Form("st.global.f32 [m], a;", [F(1)], 0, "Megatron-core", [0], [F(1)]),
    Form("st.global.v4.f32 [m], {a, b, a, b};", [1, 2], 0, "Megatron-core", [0], [1, 2, 1, 2]),
    Form("st.global.v2.f32 [m+8], {a, b};", [1, 2], 0, "Megatron-core", [0] * 4, [0, 0, 1, 2]),
    Form("st.global.relaxed.sys.b64 [m], al;", [2**32 + 5], 0, "torchcomms", [0], [5, 1]),
    Form("st.release.gpu.global.s32 [m], 9;", [], 0, "TileLang", [0], [9]),
    Form("st.global.L1::no_allocate.v4.b32 [m], {a, b, a, b};", [1, 2], 0, "FlashInfer", [0], [1, 2]),
    Form("st.mmio.relaxed.sys.global.u32 [m], a;", [4], 0, "", [0], [4]),
    Form("st.global.b8 [m+1], a;", [0x1AB], 0, "Triton", [0], [0xAB00]),
    Form("prefetch.global.L2::evict_last [m]; discard.global.L2 [m], 128;", [], 0),
    Form("prefetchu.L1 [m]; applypriority.global.L2::evict_normal [m], 128;", [], 0),
]  # fmt: skip

ATOMICS = [
    Form("atom.global.release.sys.cas.b32 d, [m], 0, 1;", [], 0, BARRIERS, [0], [1]),
    Form("atom.global.sys.acquire.cas.b32 d, [m], 1, 0;", [], 1, BARRIERS, [1], [0]),
    Form("atom.global.sys.relaxed.cas.b32 d, [m], 1, 0;", [], 1, BARRIERS, [1], [0]),
    Form("atom.global.sys.cas.b32 d, [m], 1, 0;", [], 2, "symm-mem-recipes", [2], [2]),
    Form("atom.acq_rel.sys.global.add.u64 dl, [m], al;", [5], 2**32, "Triton-distributed", [0, 1], [5, 1]),
    Form("atom.relaxed.gpu.global.add.s32 d, [m], a;", [MINUS], 3, "Triton-distributed", [3], [2]),
    Form("atom.relaxed.gpu.global.cas.b64 dl, [m], al, bl;", [3, 9], 3, "Triton-distributed", [3, 0], [9]),
    Form("red.release.gpu.global.add.s32 [m], a;", [4], 0, "Triton-distributed", [3], [7]),
    Form("red.release.sys.global.add.u32 [m], 1;", [], 0, "torchcomms", [3], [4]),
    Form("atom.global.max.u32 d, [m], a;", [4], 3, "torchao", [3], [4]),
    Form("atom.add.noftz.f16 dh, [m], ah;", [H(1)], H(2), "TileLang", [H(2)], [H(3)]),
    Form("atom.global.add.noftz.bf16x2 d, [m], a;", [B(1, 2)], B(3, 4), "", [B(3, 4)], [B(4, 6)], arch=90),
    Form("red.global.add.noftz.f16x2 [m], a;", [H(1, 2)], 0, "FlashInfer", [H(3, 4)], [H(4, 6)]),
    Form("atom.global.v2.f32.add {d, c}, [m], {a, b};", [F(2), F(3)], F(1), "TileLang", ONES, [F(3), F(4),
     F(1)], 90),
    Form("red.global.v4.f32.add [m], {a, b, a, b};", [F(2), F(3)], 0, "FlashInfer", ONES, [F(3), F(4), F(3),
     F(4)], 90),
    Form("red.global.add.noftz.v2.bf16x2 [m], {a, b};", [B(1, 2), B(3, 4)], 0, "FlashInfer", [B(1, 1), B(1,
     1)], [B(2, 3), B(4, 5)], 90),
    Form("red.global.v2.f16.max.noftz [m], {ah, bh};", [H(1), H(5)], 0, "", [H(3, 4)], [H(3, 5)], 90),
    Form("atom.global.exch.b64 dl, [m], al;", [7], 1, "", [1, 0], [7, 0]),
    Form("atom.global.inc.u32 d, [m], a;", [2], 2, "", [2], [0]),
]  # fmt: skip

ORDERING = [
    Form(
        "fence.acq_rel.sys; fence.sc.gpu; membar.sys; membar.gl;",
        [],
        0,
        "Triton-distributed, torchcomms",
    ),
    Form("fence.acquire.sys; fence.release.gpu;", [], 0, "", arch=90),
    Form("bar.sync 0;", [], 0, BARRIERS),
    Form("bar.warp.sync 0xffffffff;", [], 0, "Triton-distributed"),
    Form("nanosleep.u32 20;", [], 0, "FlashInfer"),
    Form("griddepcontrol.wait; griddepcontrol.launch_dependents;", [], 0, "Triton", arch=90),
]

EVERYWHERE: list[Any] = [*ARITHMETIC, *WHOLE, *CONVERSIONS, *ACCESSES, *ATOMICS, *ORDERING]
"""Those that run in the interpreter and in a kernel."""
