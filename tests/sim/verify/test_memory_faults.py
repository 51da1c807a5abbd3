"""Accesses that are wrong by themselves: each kind with a kernel that is right and one that is not."""

import mmap
import platform
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import interlace
from interlace import symmetric_memory
from interlace.groups.groups import default_group
from interlace.runtime.core.errors import SourceText
from interlace.verify import Finding, RaceReport, races, schedules
from sim.verify import memory_kernels as kernels

N = 16
MAP_32BIT = 0x40  # of Linux on x86: memory whose addresses have 31 bits


def on_tensor(kernel: Any, first: int) -> None:
    kernel[(1,)](torch.zeros(N), first, N)


def of_a_view(first: int) -> None:
    """A view may go as far as the storage does."""
    kernels.fill[(1,)](torch.zeros(2 * N)[:N], first, N)


def loads(first: int) -> None:
    kernels.copy[(1,)](torch.ones(N), torch.zeros(N), first, N)


def into_another_tensor(first: int) -> None:
    """What lies behind is memory, too, but not the pointer's."""
    both = bytearray(8 * N)
    x, y = (torch.frombuffer(both, dtype=torch.float32, count=N, offset=4 * n) for n in (0, N))
    kernels.fill[(1,)](x, first, N)
    assert not y.any()


def by_address(by: int) -> None:
    x = torch.zeros(N)
    kernels.fill_address[(1,)](torch.tensor([x.data_ptr()]).item(), by, N)


def chosen(first: int) -> None:
    kernels.fill_chosen[(1,)](torch.zeros(N), torch.zeros(N), first, N)


def of_a_peer(first: int) -> None:
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(N))
    kernels.fill_peer[(1,)](handle.buffer_ptrs_dev, handle.rank, first, N)
    interlace.barrier()


def by_switch(by: int) -> None:
    buffer = default_group().place.allocate(4 * N)
    if interlace.get_rank() == 0:
        kernels.fill_by_switch[(1,)](buffer.multicast, by)
    interlace.barrier()


def of_nothing(count: int) -> None:
    """Masks leave everything of an empty tensor out."""
    kernels.copy_masked[(1,)](torch.empty(0), torch.zeros(N), count, N)


def unwritten(count: int) -> None:
    x = torch.empty(N)
    x[:count] = 1
    kernels.copy[(1,)](x, torch.zeros(N), 0, N)


def unwritten_end(count: int) -> None:
    """Of memory that is no multiple of eight bytes long."""
    x = torch.empty(N + 1)
    x[:count] = 1
    kernels.copy[(1,)](x, torch.zeros(1), N, 1)


def unwritten_sum(count: int) -> None:
    x = torch.empty(N)
    x[:count] = 1
    kernels.add[(1,)](x, 0, N)


def flag(how: str, zeroed: bool) -> None:
    """Polled before, perhaps, anybody has written it."""
    flags = symmetric_memory.empty(1, dtype=torch.int32)
    handle = symmetric_memory.rendezvous(flags)
    if zeroed:
        flags.zero_()
    interlace.barrier()
    kernels.raise_peer[(1,)](handle.buffer_ptrs_dev, handle.rank)
    kernels.look[(1,)](handle.buffer_ptrs_dev, handle.rank, how)
    interlace.barrier()


def flag_that_is_raised(first: bool) -> None:
    """Nobody has zeroed it, but somebody has written it when it is looked at, if that is ``first``."""
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(1, dtype=torch.int32))
    kernels.raise_peer[(1,)](handle.buffer_ptrs_dev, handle.rank)
    if first:
        interlace.barrier()
    kernels.look[(1,)](handle.buffer_ptrs_dev, handle.rank, "add")
    interlace.barrier()


def flag_of_a_pad(zeroed: bool) -> None:
    """Whose words are zero from the start."""
    flags = symmetric_memory.empty(1, dtype=torch.int32)
    handle = symmetric_memory.rendezvous(flags)
    addresses = handle.signal_pad_ptrs_dev if zeroed else handle.buffer_ptrs_dev
    kernels.raise_peer[(1,)](addresses, handle.rank)
    kernels.look[(1,)](addresses, handle.rank, "add")
    interlace.barrier()


def unwritten_by_the_peer(count: int) -> None:
    tensor = symmetric_memory.empty(N)
    handle = symmetric_memory.rendezvous(tensor)
    tensor[:count] = 1.0
    interlace.barrier()
    kernels.copy_from_peer[(1,)](handle.buffer_ptrs_dev, torch.zeros(N), handle.rank, N)
    interlace.barrier()


def expanded(extent: int) -> None:
    kernels.fill[(1,)](torch.zeros(1).expand(extent), 0, 1)


def const(kernel: Any) -> None:
    kernel[(1,)](torch.zeros(N), 0, N)


def freed_buffer(kept: bool) -> None:
    tensor = symmetric_memory.empty(N)
    handle = symmetric_memory.rendezvous(tensor)
    addresses, rank = torch.tensor(handle.buffer_ptrs), handle.rank
    interlace.barrier()
    if not kept:
        del tensor, handle
        interlace.barrier()
    kernels.fill_peer[(1,)](addresses, rank, 0, N)
    interlace.barrier()


def freed_tensor(address_of: Callable[[torch.Tensor], int], kept: bool) -> None:
    x = torch.zeros(N)
    address = address_of(x)
    kernels.fill_address[(1,)](address, 0, N)
    if not kept:
        del x
    kernels.fill_address[(1,)](address, 0, N)


def freed_before_any_launch(kept: bool) -> None:
    """Only a table has its address."""
    x = torch.zeros(N)
    table, rank = torch.tensor([x.data_ptr()] * 2), interlace.get_rank()
    if not kept:
        del x
    kernels.fill_peer[(1,)](table, rank, 0, N)


def of_a_view_in_a_table(by: int) -> None:
    """Who was asked for the address is gone at once; the memory is not. Rows are pages apart."""
    x = torch.zeros(4, 1024)
    table = torch.tensor([x[row].data_ptr() + by for row in range(4)])
    kernels.fill_each[(1,)](table, 4)
    assert by or x.sum() == 4 * 7.0


def on_device(device: str) -> None:
    kernels.fill[(1,)](torch.zeros(N, device=device), 0, N)


# What runs on every rank, an argument with which it is right, and one with which it has a fault.
CASES: dict[str, tuple[Callable[[Any], None], Any, Any, str]] = {
    "rows in a table": (of_a_view_in_a_table, 0, 4 * 4 * 1024, "out of bounds"),
    "store": (partial(on_tensor, kernels.fill), 0, 8, "out of bounds"),
    "store before the beginning": (partial(on_tensor, kernels.fill), 0, -1, "out of bounds"),
    "load": (loads, 0, 8, "out of bounds"),
    "view": (of_a_view, N, N + 1, "out of bounds"),
    "neighbour": (into_another_tensor, 0, N, "out of bounds"),
    "atomic": (partial(on_tensor, kernels.add), 0, 1, "out of bounds"),
    "compare and swap": (partial(on_tensor, kernels.swap), 0, 1, "out of bounds"),
    "descriptor": (partial(on_tensor, kernels.fill_by_descriptor), 0, 1, "out of bounds"),
    "inline PTX": (partial(on_tensor, kernels.fill_by_ptx), 0, 1, "out of bounds"),
    "vector": (partial(on_tensor, kernels.fill_by_vector), 4, 3, "misaligned"),
    "address": (by_address, 0, 4, "out of bounds"),
    "chosen pointers": (chosen, 0, 1 << 40, "out of bounds"),  # where nothing is
    "peer": (of_a_peer, 0, 8, "out of bounds"),
    "far beyond a peer's buffer": (of_a_peer, 0, 1 << 20, "out of bounds"),
    "multicast": (by_switch, 4 * N - 4, 4 * N, "out of bounds"),
    "masked": (of_nothing, 0, 1, "out of bounds"),
    "unwritten": (unwritten, N, 4, "uninitialised"),
    "unwritten end": (unwritten_end, N + 1, N, "uninitialised"),
    "unwritten by the peer": (unwritten_by_the_peer, N, 4, "uninitialised"),
    "unwritten sum": (unwritten_sum, N, 4, "uninitialised"),
    **{
        f"flag, looked at by {how}": (partial(flag, how), True, False, "uninitialised")
        for how in ("add", "compare and swap", "swap", "load")
    },
    "flag that is raised": (flag_that_is_raised, True, False, "uninitialised"),
    "flag of a signal pad": (flag_of_a_pad, True, False, "uninitialised"),
    "expanded": (expanded, 1, 2, "read-only"),
    "declared const": (const, kernels.fill, kernels.fill_const, "read-only"),
    "misaligned": (by_address, 0, 2, "misaligned"),
    "freed buffer": (freed_buffer, True, False, "use after free"),
    "tensor freed before any launch": (freed_before_any_launch, True, False, "use after free"),
    "tensor without memory": (on_device, "cpu", "meta", "out of bounds"),
    "freed tensor": (partial(freed_tensor, torch.Tensor.data_ptr), True, False, "use after free"),
    **{
        f"freed tensor, by its {name}": (partial(freed_tensor, by), True, False, "use after free")
        for name, by in {
            "storage": lambda tensor: tensor.untyped_storage().data_ptr(),
            "array": lambda tensor: tensor.numpy().__array_interface__["data"][0],
        }.items()
    },
}
MUTANTS = {name: kind for name, (*_, kind) in CASES.items()}


def found(report: RaceReport) -> Finding:
    (finding,) = report.findings
    assert not report.errors, report.errors
    return finding


def kinds(report: RaceReport) -> set[str]:
    """Of what was found; each access is a step of its schedule's story, which says the same of it."""
    stories = {story.seed: story for story in report.stories}
    for finding in report.findings:
        story, words = stories[finding.seed], finding.memory.partition(" (")[0]
        for access in filter(None, (finding.first, finding.second)):
            assert access.step is not None
            step = story.steps[access.step - story.first]
            assert (step.rank, step.who, step.lines) == (access.rank, access.who, access.lines)
            verb = access.what.partition(" ")[0]
            assert step.text.startswith((verb, "polls")) and words in step.text, step
    return {kind for finding in report.findings for kind in finding.kinds}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_and_its_absence_is_not(name: str) -> None:
    on_rank, right, wrong, kind = CASES[name]
    report = races(on_rank, 2, right, seeds=1)
    assert report.clean, str(report)
    report = races(on_rank, 2, wrong, seeds=2)
    assert kind in kinds(report) <= {kind, "out of bounds", "write-write"}, str(report)


def test_a_finding_says_who_where_and_how() -> None:
    finding = found(races(of_a_peer, 2, 8, seeds=1))
    rank = finding.second.rank
    assert finding.first is None and finding.second.what == "stores"
    assert finding.second.who == "fill_peer program 0"
    assert [line.partition(" in ")[2] for line in finding.second.lines] == ["fill", "fill_peer"]
    assert finding.memory == f"symmetric buffer 0 of rank {1 - rank} (64 bytes)"
    assert (finding.offset, finding.count) == (64, 8)
    assert finding.index == "16, element (8,) of a block of 16"
    assert "\n  access  rank" in str(finding) and "seeds=[0]" in str(finding)


def test_a_finding_counts_elements_that_there_are() -> None:
    finding = found(races(unwritten_end, 1, N, seeds=1))
    assert (finding.offset, finding.count) == (4 * N, 1)
    finding = found(races(lambda: kernels.fill[(2,)](torch.ones(1), 0, 1), 1, seeds=1))
    assert (finding.kind, finding.offset, finding.count) == ("write-write", 0, 1)


@pytest.mark.parametrize("arch", [None, 80])
def test_a_flag_that_nobody_has_zeroed_is_one_finding(arch: int | None) -> None:
    finding = found(races(flag, 2, "add", False, seeds=3, arch=arch))
    assert (finding.offset, finding.count) == (0, 1) and finding.second.what.endswith(
        "(acquire, sys)"
    )


@pytest.mark.parametrize("arch", [None, 80])
def test_elements_are_counted_once_however_many_threads_access_them(arch: int | None) -> None:
    assert found(races(on_tensor, 1, kernels.fill, 8, seeds=1, arch=arch)).count == 8


def test_a_line_is_told_once_for_all_elements_programs_and_ranks() -> None:
    def on_rank() -> None:
        kernels.add[(4,)](torch.zeros(N), 1, N)

    assert found(races(on_rank, 3, seeds=2)).count == 1


@pytest.mark.parametrize("count", [N, 4])
def test_a_load_that_is_too_early_is_one_finding_of_its_race(count: int) -> None:
    """Where it comes first it reads what nobody has written yet. What nobody writes is another fault."""

    def on_rank() -> None:
        tensor = symmetric_memory.empty(N)
        handle = symmetric_memory.rendezvous(tensor)
        tensor[:count] = 1.0
        kernels.copy_from_peer[(1,)](handle.buffer_ptrs_dev, torch.zeros(N), handle.rank, N)
        interlace.barrier()

    race, *others = races(on_rank, 2, seeds=4).findings
    if race.first is None:
        (race,), others = others, [race]
    assert race.kinds == {"write-read", "read-write"} and race.first is not None
    if count == N:
        assert not others and any(text.startswith("uninitialised if") for text in race.also)
    else:
        assert [each.kind for each in others] == ["uninitialised"]


def test_what_is_out_of_bounds_reads_as_other_and_is_not_stored() -> None:
    seen = []

    def on_rank() -> None:
        x, y = torch.ones(4), torch.zeros(N)
        kernels.copy_masked[(1,)](x, y, N, N)
        seen.append(y.tolist())

    report = races(on_rank, 1, seeds=1)
    assert found(report).count == 12
    assert seen[0] == [1.0] * 4 + [-1.0] * 12


@pytest.mark.parametrize("late", [False, True])
def test_outside_of_races_it_is_an_error_of_the_rank(late: bool) -> None:
    text = r"fill program 0, memory_kernels.py:\d+ in fill: out of bounds: stores 8 elements at byte 64"
    with pytest.raises(interlace.MemoryAccessError, match=text) as caught:
        interlace.run(on_tensor, 2, kernels.fill, 8)
    assert caught.value.__cause__.kind == "out of bounds"  # type: ignore[union-attr]
    report = schedules(
        on_tensor, 2, kernels.fill, 8, n=2, workers=1, shrink=False, store_buffers=late
    )
    assert report.failing == (0, 1) and "out of bounds" in str(report)


def test_who_polls_out_of_bounds_is_ended() -> None:
    report = races(lambda: kernels.poll[(1,)](torch.ones(N), N), 1, seeds=1)
    assert {finding.kind for finding in report.findings} == {"out of bounds"} and report.errors


def test_what_user_code_writes_unseen_is_written() -> None:
    def on_rank() -> None:
        x = torch.empty(N)
        x.numpy()[:] = 1
        kernels.copy[(1,)](x, torch.zeros(N), 0, N)

    assert races(on_rank, 1, seeds=1).clean


@pytest.mark.parametrize(
    ("first", "stride", "text"),
    [(1, N, "its base.* is not a multiple of 16 bytes"), (0, N + 1, "stride 0 .* 68 bytes")],
)
def test_a_descriptor_that_tma_cannot_read_is_named(first: int, stride: int, text: str) -> None:
    memory = torch.zeros(4 * N)
    interlace.run(lambda: kernels.describe[(1,)](memory, N, N), 1)
    with pytest.raises(ValueError, match=text):
        interlace.run(lambda: kernels.describe[(1,)](memory[first:], stride, N), 1)


@pytest.mark.parametrize("arch", [None, 80])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("device_assert", r"device_assert fails .*the first \(?8\b.*: too; \{large\}"),
        ("assert", r".*too; \{large\}"),
        ("assume", "assume fails"),
        ("multiple_of", "multiple_of fails: 8 is not a multiple of 16"),
        ("masked", ""),
    ],
)
def test_a_condition_that_does_not_hold_is_found(how: str, says: str, arch: int | None) -> None:
    def on_rank(limit: int) -> None:
        kernels.state[(1,)](torch.arange(float(N)), limit, how, N)

    assert races(on_rank, 1, N, seeds=1, arch=arch).clean
    report = races(on_rank, 1, 8, seeds=1, arch=arch)
    says = (
        "" if how == "multiple_of" and arch else says
    )  # compiled code shows it by what it accesses
    assert report.clean == (not says)
    if says:
        ((_, text),) = report.errors
        place = r" at memory_kernels.py:\d+ in state"
        assert re.search(f"rank 0: .*state program 0: {says}.*{place}", text), text
        assert isinstance(text, SourceText) and text.frames


def test_no_compiler_takes_a_store_to_what_is_const() -> None:
    report = races(const, 1, kernels.fill_const, seeds=1, arch=80)
    ((_, text),) = report.errors
    assert re.search(r"Cannot store to a constant pointer at memory_kernels.py:\d+", text), text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is x86's")
def test_an_address_of_32_bits_is_one() -> None:
    """Triton makes an int32 of such an argument; some processes have their heap there."""

    def on_rank() -> list[float]:
        low = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT)
        x = torch.frombuffer(low, dtype=torch.float32)
        assert x.data_ptr() < 2**31
        kernels.fill_address[(1,)](x.data_ptr(), 4, 2)
        return x[:4].tolist()

    assert interlace.run(on_rank, 1) == [[0.0, 7.0, 7.0, 0.0]]
