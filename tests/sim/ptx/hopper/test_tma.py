"""TMA, mbarriers and the async proxy, by hand-written PTX: values, and mutants that running finds."""

import re
from typing import Any

import pytest
import torch

import interlace
from interlace import verify
from interlace.groups.groups import default_group
from interlace.runtime.core.errors import InterlaceError
from interlace_verify.machine.bulk_copies import tensor_map
from sim.ptx.ptx_texts import kernel
from sim.ptx.test_ptx_races import ACQUIRE, BARRIER, RELEASE, without

ROWS, COLUMNS, THREADS = 6, 32, 64
U32 = 2
# %r1 is the thread, %p1 the first; %r9 the tile of 8 x 32 words, %r10 the mbarrier behind it
SETUP = """
    ld.param.b64 %rd4, [kernel_param_0]; ld.param.b64 %rd5, [kernel_param_1];
    setp.eq.s32 %p1, %r1, 0;
    mov.b32 %r9, memory; add.s32 %r10, %r9, 1024; mov.b32 %r11, {column}; mov.b32 %r12, {row};"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r10], 1;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 1024;"
LOAD = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    " [%r9], [%rd5, {%r11, %r12}], [%r10];"
)
AWAIT = """
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0;
    @!%p3 bra AGAIN;"""
FENCE = "fence.proxy.async;"
STORE = (
    "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd5, {%r11, %r12}], [%r9];"
    "@%p1 cp.async.bulk.commit_group;"
)
COMPLETE = "cp.async.bulk.wait_group 0;"
# thread i has four words of the tile from 16 i on
OWN = "shl.b32 %r20, %r1, 4; add.s32 %r20, %r9, %r20;"
TAKE = OWN + "ld.shared.v4.b32 {%r21, %r22, %r23, %r24}, [%r20];"
GIVE = OWN + "st.shared.v4.b32 [%r20], {%r1, %r1, %r1, %r1};"
OUT = "mul.wide.u32 %rd8, %r1, 16; add.s64 %rd8, %rd4, %rd8;"
OUT += "st.global.v4.b32 [%rd8], {%r21, %r22, %r23, %r24};"
LOADED = [INIT, BARRIER, EXPECT, LOAD, AWAIT, TAKE, OUT]


def text(steps: list[str], row: int = 0, column: int = 0) -> str:
    return kernel(
        "\n".join([SETUP.format(row=row, column=column), *steps]), threads=THREADS, arch=90
    )


def map_of(tensor: Any, swizzle: int = 0, words: int = 32) -> torch.Tensor:
    """A map of a 6 x 32 tensor of words, in boxes of 1024 bytes with rows of so many words."""
    base = tensor if isinstance(tensor, int) else tensor.data_ptr()
    box = words, 256 // words
    raw = tensor_map(base, (COLUMNS, ROWS), (4 * COLUMNS,), box, U32, swizzle=swizzle)
    return torch.frombuffer(bytearray(raw), dtype=torch.int64)


def launched(steps: list[str], output: Any, map: torch.Tensor, **options: Any) -> None:
    default_group().place.announce(NUMBERS)  # which the map alone tells of
    verify.launch_ptx(text(steps, **options), 1, output, map, shared_bytes=2048)


NUMBERS = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS) + 5


@pytest.mark.parametrize(("swizzle", "words"), [(0, 32), (0, 4), (1, 8), (2, 16), (3, 32)])
@pytest.mark.parametrize(("row", "column"), [(2, 8), (-3, -4)])
def test_a_box_of_a_tensor(swizzle: int, words: int, row: int, column: int) -> None:
    """What is outside is 0; pieces of 16 bytes are swapped by the number of their line of 128 bytes."""
    output = torch.full((64, 4), 7, dtype=torch.int32)

    def on_rank() -> None:
        launched(LOADED, output, map_of(NUMBERS, swizzle, words), row=row, column=column)

    interlace.run(on_rank, 1, place="ptx", arch=90)
    padded = torch.nn.functional.pad(NUMBERS, (8, 64, 8, 64))
    rows, columns = 256 // words, slice(8 + column, 8 + column + words)
    box = padded[8 + row : 8 + row + rows, columns].reshape(64, 4)
    for piece in range(64):
        line, others = piece // 8, 2**swizzle - 1
        assert output[piece ^ (line & others)].tolist() == box[piece].tolist()


def test_what_tma_refuses() -> None:
    for swizzle, words, match in [(2, 32, "a row of a box has 128 bytes"), (0, 2, "has 8 bytes")]:
        map = map_of(NUMBERS, swizzle, words)
        with pytest.raises(ValueError, match=match):
            interlace.run(launched, 1, LOADED, NUMBERS, map, place="ptx", arch=90)


def test_a_map_that_is_a_parameter() -> None:
    """As host code gives it: 128 bytes, of which the kernel takes the address."""
    found = torch.zeros(ROWS * COLUMNS + 64, dtype=torch.int32)
    made = text(LOADED).replace(".u64 kernel_param_1", ".align 64 .b8 kernel_param_1[128]")
    made = re.sub(r"ld.param.b64 (%rd\d), \[kernel_param_1\]", r"mov.b64 \1, kernel_param_1", made)
    raw = map_of(NUMBERS).numpy().tobytes()

    def on_rank(*given: Any) -> None:
        default_group().place.announce(NUMBERS)
        verify.launch_ptx(made, 1, found, *given, shared_bytes=2048)

    interlace.run(on_rank, 1, raw, place="ptx", arch=90)
    assert found[: ROWS * COLUMNS].tolist() == NUMBERS.flatten().tolist()
    with pytest.raises(TypeError, match="kernel_param_1 takes 128 bytes, got 0"):
        interlace.run(on_rank, 1, place="ptx", arch=90)


def test_a_box_is_stored_and_reduced() -> None:
    """What is outside the tensor is not stored."""
    output = torch.full((ROWS + 2, COLUMNS), 7, dtype=torch.int32)
    reduce = STORE.replace("cp.async", "cp.reduce.async", 1).replace(
        ".bulk_group", ".add.bulk_group"
    )
    steps = [GIVE, FENCE, BARRIER, STORE, COMPLETE, reduce, COMPLETE]
    interlace.run(lambda: launched(steps, output, map_of(output)), 1, place="ptx", arch=90)
    expected = 2 * (torch.arange(8 * 32, dtype=torch.int32).reshape(8, 32) // 4)
    assert torch.equal(output[:ROWS], expected[:ROWS])
    assert output[ROWS:].tolist() == [[7] * COLUMNS] * 2


def test_lines_of_bytes() -> None:
    given, found = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    load = "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd5], 1024, [%r10];"
    store = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r9], 512;"
    steps = [INIT, BARRIER, EXPECT, load, AWAIT, store, "cp.async.bulk.commit_group;", COMPLETE]
    interlace.run(lambda: launched(steps, found, given), 1, place="ptx", arch=90)
    assert found.tolist() == [*range(128), *[0] * 128]


# -- mutants ---------------------------------------------------------------------------------------


def races(steps: list[str]) -> set[str]:
    output = torch.zeros(8, 8, 4, dtype=torch.int32)

    def on_rank() -> None:
        launched(steps, output, map_of(NUMBERS))

    report = verify.races(on_rank, 1, seeds=2, arch=90)
    assert not report.errors, str(report)
    return {kind for finding in report.findings for kind in finding.kinds}


FILLED = [GIVE, BARRIER, FENCE, *LOADED]


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        (LOADED, set()),
        (without(LOADED, AWAIT), {"write-read"}),
        (without(LOADED, BARRIER), {"write-read"}),  # of the mbarrier
        (FILLED, set()),
        (without(FILLED, FENCE), {"no proxy fence"}),
        # what is read may be overwritten without a fence, not without an order
        ([*LOADED, BARRIER, EXPECT, LOAD], set()),
        ([*LOADED, EXPECT, LOAD], {"no barrier"}),
        ([GIVE, FENCE, BARRIER, STORE, COMPLETE], set()),
        ([GIVE, BARRIER, FENCE, STORE, COMPLETE], set()),
        ([GIVE, BARRIER, STORE, COMPLETE], {"no proxy fence"}),
        ([GIVE, FENCE, STORE, COMPLETE], {"no barrier"}),
        ([GIVE, FENCE, BARRIER, STORE, BARRIER, GIVE], {"read-write"}),
        ([GIVE, FENCE, BARRIER, STORE, "cp.async.bulk.wait_group.read 0;", BARRIER, GIVE], set()),
        ([GIVE, FENCE, BARRIER, STORE, STORE, COMPLETE], {"write-write"}),
        ([FENCE, BARRIER, STORE, COMPLETE], {"uninitialised"}),
    ],
)
def test_races_within_a_program(steps: list[str], kinds: set[str]) -> None:
    assert races(steps) == kinds


TELL = RELEASE.replace("+256", "+1024")
HEAR = ACQUIRE.replace("+256", "+1024")
PUBLISH = [GIVE, FENCE, BARRIER, STORE, COMPLETE, TELL]
FETCH = [INIT, HEAR, FENCE, BARRIER, EXPECT, LOAD, AWAIT, TAKE, OUT.replace("%rd4", "%rd7")]
AT = "mul.wide.u32 %rd8, %r1, 16; add.s64 %rd8, %rd4, %rd8;"
READ = AT + "ld.global.v4.b32 {%r21, %r22, %r23, %r24}, [%rd8];"


def exchange(publish: list[str], fetch: list[str]) -> Any:
    """Rank 0 stores a tile in rank 1's memory and tells it, by TMA or without; rank 1 fetches it."""

    def on_rank() -> None:
        place, rank = default_group().place, interlace.get_rank()
        buffer = place.allocate(2048)
        found = torch.zeros(8, 8, 4, dtype=torch.int32)
        seen = f"mov.b64 %rd7, {found.data_ptr()};"
        place.announce(found)
        steps = [seen, *(publish if rank == 0 else fetch)]
        launched(steps, buffer.addresses[1], map_of(buffer.addresses[1]))
        if rank == 1 and found[:ROWS, 0, 0].tolist() != [8 * row for row in range(ROWS)]:
            raise AssertionError("wrong words")

    return on_rank


STORED = AT + "st.global.v4.b32 [%rd8], {%r1, %r1, %r1, %r1};"
PLAIN = [STORED, BARRIER, TELL]
LOOK = [HEAR, BARRIER, READ, OUT.replace("%rd4", "%rd7")]
ONLY_READ = COMPLETE.replace("wait_group", "wait_group.read")


@pytest.mark.parametrize(
    ("publish", "fetch", "kinds"),
    [
        (PUBLISH, FETCH, set()),
        (PUBLISH, LOOK, set()),
        (PLAIN, FETCH, set()),
        (without(PUBLISH, COMPLETE, ONLY_READ), LOOK, {"write-read"}),
        (without(PUBLISH, COMPLETE, ONLY_READ), FETCH, {"write-read"}),
        (PLAIN, without(FETCH, FENCE), {"no proxy fence"}),
        (PUBLISH, without(LOOK, BARRIER), {"no barrier"}),
        (without(PUBLISH, TELL, TELL.replace("release", "relaxed")), LOOK, {"weak order"}),
        (without(PUBLISH, TELL, TELL.replace("sys", "gpu")), FETCH, {"narrow scope"}),
    ],
)
def test_races_between_ranks(publish: list[str], fetch: list[str], kinds: set[str]) -> None:
    report = verify.races(exchange(publish, fetch), 2, seeds=1, arch=90)
    assert {kind for finding in report.findings for kind in finding.kinds} == kinds, str(report)


@pytest.mark.parametrize(
    ("publish", "right"), [(PUBLISH, True), (without(PUBLISH, COMPLETE, ONLY_READ), False)]
)
@pytest.mark.parametrize("store_buffers", [False, True])
def test_a_late_store_is_seen_late(publish: list[str], right: bool, store_buffers: bool) -> None:
    found = exchange(publish, LOOK)
    report = verify.schedules(
        found, 2, n=8, arch=90, store_buffers=store_buffers, workers=1, shrink=False
    )
    assert (report.failure is None) == right, str(report)


@pytest.mark.parametrize(
    "steps", [without(LOADED, EXPECT, EXPECT.replace("1024", "1040")), without(LOADED, LOAD)]
)
def test_bytes_that_never_come(steps: list[str]) -> None:
    with pytest.raises(InterlaceError, match=r"wait for each other, at mbarrier\.try_wait"):
        interlace.run(
            lambda: launched(steps, torch.zeros(256), map_of(NUMBERS)), 1, place="ptx", arch=90
        )
