"""Every form of ``forms.txt`` gives what it must, interpreted and in a kernel; assemblers take it."""

import pathlib
import subprocess
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends import nvidia

import interlace
import interlace.symmetric_memory as symm_mem
from interlace.verify import launch_ptx
from sim.ptx.ptx_forms import EVERYWHERE, FORMS, GIVEN, OF_ALL_RANKS, OF_LANES, Form
from sim.ptx.ptx_texts import computed

_ROOM = 16  # words of memory for each form

_BLOCK = """
{{
    .reg .b16 ah, bh, ch, dh; .reg .b32 a, b, c, d; .reg .b64 al, bl, cl, dl, m, t0, t1; .reg .pred p, q;
    mov.b64 al, {a}; mov.b64 bl, {b}; mov.b64 cl, {c}; mov.b64 m, {m};
    cvt.u32.u64 a, al; cvt.u32.u64 b, bl; cvt.u32.u64 c, cl;
    cvt.u16.u64 ah, al; cvt.u16.u64 bh, bl; cvt.u16.u64 ch, cl;
    mov.b16 dh, 0; mov.b32 d, 0; mov.b64 dl, 0; setp.ne.b32 p, 0, 0; setp.ne.b32 q, 0, 0;
    {{ {text} }}
    cvt.u64.u32 t0, d; or.b64 dl, dl, t0; cvt.u64.u16 t0, dh; or.b64 dl, dl, t0;
    selp.b64 t0, 1, 0, p; selp.b64 t1, 2, 0, q; or.b64 dl, dl, t0; or.b64 dl, dl, t1;
    mov.b64 {d}, dl;
}}
"""


@triton.jit
def in_the_interpreter(out_ptr, m, a, b, c, ASM: tl.constexpr):
    """One text on an address and three numbers."""
    found = tl.inline_asm_elementwise(ASM, "=l,l,l,l,l", [a, b, c, m], tl.int64, False, 1)
    tl.store(out_ptr, found)


def interpret(form: Form, out: torch.Tensor, address: int) -> None:
    names = dict(zip("abcm", ("$1", "$2", "$3", "$4"), strict=True), d="$0")
    asm = _BLOCK.format(text=form.text, **names)
    in_the_interpreter[(1,)](out, address, *given(form), asm)


def given(form: Form) -> list[int]:
    numbers = [*form.given, 0, 0, 0][:3]
    return [number - 2**64 if number >= 2**63 else number for number in numbers]


def memory_of(forms: list[Form]) -> torch.Tensor:
    words = [[*form.memory, *[0] * _ROOM][:_ROOM] for form in forms]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def interpreted(forms: list[Form]) -> tuple[Any, Any]:
    found, memory = torch.zeros(len(forms), dtype=torch.int64), memory_of(forms)

    def on_rank() -> None:
        for index, form in enumerate(forms):
            interpret(form, found[index:], memory[index].data_ptr())

    interlace.run(on_rank, 1)
    return found, memory


def kernel(forms: list[Form], target: str = "sm_90a", version: str = "8.7") -> str:
    """All of them, one after the other, for one thread, but for barriers."""
    blocks = []
    for index, form in enumerate(forms):
        numbers = {name: str(value) for name, value in zip("abc", given(form), strict=True)}
        blocks.append(
            f"add.s64 %rd3, %rd2, {4 * _ROOM * index};"
            + _BLOCK.format(text=form.text, m="%rd3", d="%rd4", **numbers)
            + f"st.global.b64 [%rd1+{8 * index}], %rd4;"
        )
    return f"""
.version {version}
.target {target}
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
.reqntid 1
{{
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [kernel_param_0]; ld.param.b64 %rd2, [kernel_param_1];
    {"".join(blocks)}
    ret;
}}"""


def in_a_kernel(forms: list[Form]) -> tuple[Any, Any]:
    found, memory = torch.zeros(len(forms), dtype=torch.int64), memory_of(forms)
    interlace.run(lambda: launch_ptx(kernel(forms), 1, found, memory), 1, place="ptx", arch=90)
    return found, memory


BOTH_WAYS = [kind for kind in EVERYWHERE if kind != "atomics"]  # which every thread does


@pytest.mark.parametrize(
    ("kind", "run"),
    [*((kind, interpreted) for kind in BOTH_WAYS), *((kind, in_a_kernel) for kind in EVERYWHERE)],
)
def test_forms(kind: str, run: Any) -> None:
    forms = EVERYWHERE[kind]
    check(forms, *run(forms))


def check(forms: list[Form], found: torch.Tensor, memory: torch.Tensor) -> None:
    wrong = [
        (form.text, hex(value % 2**64), hex(form.expected), [hex(word % 2**32) for word in words])
        for form, value, words in zip(forms, found.tolist(), memory.tolist(), strict=True)
        if value % 2**64 != form.expected % 2**64
        or [word % 2**32 for word in words[: len(form.after)]] != list(form.after)
    ]
    assert not wrong


def test_forms_of_all_ranks() -> None:
    forms = OF_ALL_RANKS

    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        memory = symm_mem.empty(len(forms), _ROOM, dtype=torch.int32)
        memory.copy_(memory_of([f._replace(memory=(f.memory, f.others)[rank()]) for f in forms]))
        handle, found = symm_mem.rendezvous(memory), torch.zeros(len(forms), dtype=torch.int64)
        handle.barrier()
        if rank() == 0:
            launch_ptx(kernel(forms), 1, found, handle.multicast_ptr)
        handle.barrier()
        return found, memory.clone()

    (found, memory), (_, others) = interlace.run(on_rank, 2, place="ptx", arch=90)
    check(forms, found, memory)
    check([form._replace(expected=0) for form in forms], torch.zeros_like(found), others)


def rank() -> int:
    return interlace.get_rank()


def test_forms_of_lanes() -> None:
    for form in OF_LANES:
        body = f"ld.global.b32 %r2, [%rd2]; {form.text} st.global.b32 [%rd1], %r3;"
        assert computed(body, GIVEN, arch=90)[:, 0].tolist() == list(form.expected), form.text


@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "target"), [(80, "sm_80"), (90, "sm_90a"), (100, "sm_100a")])
def test_an_assembler_takes_every_form(arch: int, target: str, tmp_path: pathlib.Path) -> None:
    """So they are PTX and nothing of the list's own making."""
    name, version = ("ptxas-blackwell", "8.8") if arch == 100 else ("ptxas", "8.7")
    assembler = pathlib.Path(nvidia.__file__).parent / "bin" / name
    text = tmp_path / "forms.ptx"
    text.write_text(kernel([form for form in FORMS if form.arch <= arch], target, version))
    options = [f"--gpu-name={target}", "-O0", "-o", tmp_path / "forms.cubin"]
    command = [assembler, *options, text]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
