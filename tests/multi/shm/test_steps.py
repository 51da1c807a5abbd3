"""Steps of machine code, without ranks: every kind, every sum, and what becomes an error."""

import ctypes
import functools
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from llvmlite import binding

from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.shm import machine_code
from interlace.runtime.places.shm.machine_code import RING, SUMS, Copier, Steps
from interlace.runtime.processes.control import ANYONE, BELL
from tiers import thorough

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="no machine code on this host")

Write = Callable[[Steps], None]


def listed(write: Write, *, spin: bool = False) -> Steps:
    made = Steps()
    write(made)
    return made.complete(spin=spin)


def words(*values: int) -> tuple[torch.Tensor, list[int]]:
    memory = torch.tensor(values, dtype=torch.int64)
    return memory, [memory.data_ptr() + 8 * number for number in range(len(values))]


# -- sums --------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype, seed: int, count: int) -> torch.Tensor:
    """Return numbers of every size of the dtype, without NaN and with positive infinities only."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)
    if not dtype.is_floating_point:
        return raw
    ordinary = torch.randn(count, generator=generator).to(dtype)
    strange = torch.rand(count, generator=generator) < 0.3
    values = torch.where(strange, raw, ordinary)
    return torch.where(values.isnan() | (values == -torch.inf), 1.5, values.double()).to(dtype)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def summed(dtype: torch.dtype, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    addresses = [part.data_ptr() for part in parts]
    made = listed(lambda s: s.sum(dtype, target.data_ptr(), addresses, target.numel()))
    assert made.run(0) == -1


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_sums_have_the_bits_that_torch_gives(dtype: torch.dtype) -> None:
    for sources in range(1, 9):
        count = 103
        parts = [numbers(dtype, 10 * sources + s, count) for s in range(sources)]
        got = numbers(dtype, 0, count)
        wanted = got.clone()
        addresses = [part.data_ptr() for part in parts]
        made = listed(
            lambda s, a=addresses: s.sum(dtype, (0, 2), [(each, 1) for each in a], (0, 3))
        )
        whole = torch.zeros_like(wanted)
        fold("sum", parts, whole)
        for n in range(count - 2):
            first = n % 3  # an address that no vector is aligned to
            made.registers[1] = made.registers[2] = first * dtype.itemsize
            made.registers[2] += got.data_ptr()
            made.registers[3] = n
            assert made.run(0) == -1
            wanted[first : first + n] = whole[first : first + n]
            assert same_bits(got, wanted), (sources, n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_once_to_the_nearest_even(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    one, half = 1.0, info.eps / 2
    most, step = info.max, info.max * info.eps / (2 - info.eps)  # to what would be the next
    rows = [
        (one, half, 0.0), (one + info.eps, half, 0.0), (one, half, half * info.eps),
        (one, half, -half * info.eps), (-one, -half, 0.0), (most, step / 2, 0.0), (most, step / 4, 0.0),
        (most, most, -most), (info.smallest_normal, -info.smallest_normal / 2, 0.0),
        (info.smallest_normal * info.eps, info.smallest_normal * info.eps, 0.0),
        (-0.0, -0.0, -0.0), (-0.0, 0.0, -0.0), (torch.inf, most, one), (-torch.inf, -most, one),
    ]  # fmt: skip
    columns = torch.tensor(rows, dtype=torch.float64).T.to(dtype).repeat(1, 9)  # vectors and a rest
    parts = [column.contiguous() for column in columns]
    got, wanted = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    fold("sum", parts, wanted)
    summed(dtype, parts, got)
    assert same_bits(got, wanted)
    exact = columns.float().sum(0) if dtype == torch.bfloat16 else columns.double().sum(0)
    assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("dtype", [dtype for dtype in SUMS if dtype.is_floating_point], ids=str)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    count = 77
    for place in range(3):
        parts = [torch.ones(count, dtype=dtype) for _ in range(3)]
        parts[place][::2] = torch.nan
        parts[place][1::4] = torch.inf
        parts[(place + 1) % 3][1::4] = -torch.inf
        got = torch.zeros(count, dtype=dtype)
        summed(dtype, parts, got)
        wanted = torch.full((count,), 3.0)
        wanted[::2] = wanted[1::4] = torch.nan
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(7.0).float(), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("bits", [0x7F81, 0xFFFF, 0x7FFF])
def test_no_nan_of_bfloat16_is_rounded_to_something_else(bits: int) -> None:
    """The first is a NaN by its last bit alone; rounding would carry from the others."""
    nan = torch.full((40,), bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = torch.zeros_like(nan)
    summed(torch.bfloat16, [nan, torch.ones_like(nan)], got)
    assert got.isnan().all()


# -- the other kinds ---------------------------------------------------------------------------


@pytest.mark.parametrize("past", [False, True])
def test_copies_of_any_number_of_bytes_from_anywhere_to_anywhere(past: bool) -> None:
    source = torch.arange(4000, dtype=torch.int16).view(torch.uint8)
    copier = Copier(past=past)
    for nbytes in (*range(70), 127, 128, 129, 159, 160, 255, 256, 257, 1000, 4096, 5003):
        for to, start in ((0, 0), (1, 0), (31, 5), (32, 1), (nbytes % 64, nbytes % 37)):
            memory = torch.full((5200,), 255, dtype=torch.uint8)
            first = -memory.data_ptr() % 64 + to
            wanted = memory.clone()
            wanted[first : first + nbytes] = source[start : start + nbytes]
            copier(memory.data_ptr() + first, source.data_ptr() + start, nbytes)
            assert torch.equal(memory, wanted), (nbytes, to, start)


@pytest.mark.parametrize("shift", [-3, 0, 3, 500])
def test_a_copy_may_overlap(shift: int) -> None:
    memory = torch.arange(2000, dtype=torch.int16).view(torch.uint8)
    wanted = memory.clone()
    wanted[1000 + shift : 1700 + shift] = memory[1000:1700].clone()
    base = memory.data_ptr()
    made = listed(lambda s: s.copy((1000 + shift, 1), (1000, 1), (600, 2)))
    made.registers[1], made.registers[2] = base, 100
    assert made.run(0) == -1
    assert torch.equal(memory, wanted)


def test_ring_wakes_who_sleeps_for_it_or_for_anyone() -> None:
    memory = torch.zeros(3, 2 * BELL // 8, dtype=torch.int64)
    addresses = [memory[place].data_ptr() for place in range(3)]
    made = listed(lambda s: s.ring(addresses, 5))
    assert made.kinds[0] == RING
    for place, (value, rung) in itertools.product(range(3), ((5, 1), (ANYONE, 1), (4, 0), (0, 0))):
        memory.zero_()
        memory[place, 0] = value
        assert made.run(0) == -1
        bells = [0, 0, 0]
        bells[place] = rung
        assert memory[:, BELL // 8].tolist() == bells


def test_a_wait_is_bounded_in_time_where_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A yield beside busy processes may take many milliseconds."""
    monkeypatch.setattr(machine_code, "TURNS", 1 << 40)
    monkeypatch.setattr(machine_code, "PATIENCE_NS", 20_000_000)
    memory, addresses = words(1, 1, 0)
    made = listed(lambda s: s.wait(addresses, 1))
    before = time.perf_counter()
    assert made.run(0) == 0  # so many yields would take hours
    assert time.perf_counter() - before >= 0.02
    memory[2] = 1
    assert made.run(0) == -1


@pytest.mark.parametrize("keeps_lock", [False, True])
def test_a_word_that_another_thread_stores_ends_a_wait(
    keeps_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait releases the interpreter's lock; otherwise the other thread could not run."""
    monkeypatch.setattr(machine_code, "TURNS", 1 << 40)
    monkeypatch.setattr(machine_code, "PATIENCE_NS", 20_000_000 if keeps_lock else 600_000_000_000)
    memory, (word,) = words(0)
    made = listed(lambda s: s.wait([word], 3), spin=True)
    if keeps_lock:
        kind = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        run: Any = made.run
        code = kind(ctypes.cast(run.func, ctypes.c_void_p).value)
        made.run = functools.partial(code, *run.args)
    waits = threading.Event()
    other = threading.Thread(target=lambda: waits.wait() and memory.fill_(3))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)  # the thread gets the lock only when this one releases it
    try:
        waits.set()
        assert made.run(0) == (0 if keeps_lock else -1)
    finally:
        sys.setswitchinterval(interval)
        other.join()


# -- the machine code --------------------------------------------------------------------------


def assembly(ir: str, processor: str) -> str:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(f"{processor}-unknown-linux-gnu").create_target_machine(
        cpu={"x86_64": "x86-64-v3", "aarch64": "generic"}[processor]
    )
    module = binding.parse_assembly(ir)
    module.triple = machine.triple
    return machine.emit_assembly(module)


ORDERING = {
    "x86_64": {"pause", "sfence", "vmovntps|vmovntdq"},
    "aarch64": {"yield", "ldar|ldapr", "stlr", "stnp"},
}


def missing(ir: str, processor: str) -> set[str]:
    code = assembly(ir, processor)
    return {each for each in ORDERING[processor] if not re.search(rf"\b({each})\b", code)}


@pytest.mark.parametrize("processor", machine_code.PROCESSORS)
def test_code_waits_and_orders_as_the_processor_has_it(processor: str) -> None:
    assert not missing(machine_code.module_ir("run", processor), processor)


def test_weaker_orders_would_be_seen() -> None:
    """Machine code must request these orders on other processors; x86-64 keeps them always."""
    for order, instruction in (("acquire", "ldar|ldapr"), ("release", "stlr")):
        weaker = machine_code.module_ir("run", "aarch64").replace(
            f"{order}, align", "monotonic, align"
        )
        assert missing(weaker, "aarch64") == {instruction}
    unfenced = machine_code.module_ir("run", "x86_64").replace(
        "call void @llvm.x86.sse.sfence()", ""
    )
    assert missing(unfenced, "x86_64") == {"sfence"}


@pytest.mark.parametrize("processor", machine_code.PROCESSORS)
def test_sums_call_nothing_and_are_within_the_usual_mode(processor: str) -> None:
    """LLVM may move instructions past the two that set and reset the mode."""
    setting, adding = {
        "x86_64": (r"\bv?ldmxcsr\b", r"\bv?addp[sd]\b|\bv?adds[sd]\b"),
        "aarch64": (r"\bmsr\s+FPCR\b", r"\bfadd\b"),
    }[processor]
    for element in machine_code.ELEMENTS:
        code = assembly(machine_code.sum_ir(element, processor), processor)
        assert not re.search(r"\b(call|bl|blr)\b", code), element.name
        to_usual, back = (each.start() for each in re.finditer(setting, code))
        additions = [each.start() for each in re.finditer(adding, code)]
        assert bool(additions) == (element.type in ("float", "double"))
        assert all(to_usual < each < back for each in additions), element.name


# -- switched off ------------------------------------------------------------------------------


def refuse() -> None:
    raise OSError("no memory may be executed")


@pytest.mark.parametrize(
    "missing",
    [
        mock.patch.dict("os.environ", {machine_code.VARIABLE: "0"}),
        mock.patch.object(machine_code, "PROCESSOR", "riscv64"),
        mock.patch.object(binding, "get_host_cpu_features", dict),
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(binding, "llvm_version_info", (15, 0, 7)),
        mock.patch.dict(sys.modules, llvmlite=None),
        mock.patch.object(binding, "check_jit_execution", refuse),
    ],
    ids=["variable", "processor", "halves", "system", "version", "llvmlite", "refused"],
)
def test_without_machine_code_there_are_no_steps(missing: Any) -> None:
    # facts about this process are cached
    known = {name: getattr(machine_code, name).__wrapped__ for name in ("is_supported", "_run")}
    with mock.patch.multiple(machine_code, PROCESSOR="x86_64", **known), missing:
        assert not machine_code.available()
        with pytest.raises(RuntimeError, match="no machine code"):
            Steps()


@thorough
def test_llvm_is_loaded_by_who_needs_it() -> None:
    """A process that never calls a CPU collective does not pay for LLVM."""
    module = "interlace.runtime.places.shm.machine_code"
    loaded = "print('llvmlite' in sys.modules)"
    code = f"import sys, interlace, {module} as s; {loaded}; s.available(); {loaded}"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.split()[-2:] == ["False", "True"]
