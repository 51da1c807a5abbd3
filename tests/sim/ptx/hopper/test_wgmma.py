"""``wgmma``: fragments and tiles in shared memory against products of whole matrices; what is pending."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from sim.ptx.ptx_texts import TYPES, computed, octets

THREADS, WORDS = 128, 192
LANE, WARP = np.arange(THREADS) % 32, np.arange(THREADS) // 32
NUMPY = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
MODES = {16: 0, 128: 1, 64: 2, 32: 3}


class Tile(NamedTuple):
    """A matrix as it lies in shared memory, and what a descriptor says of it, but for where it is."""

    image: Any
    leading: int
    stride: int
    width: int

    def descriptor(self, start: int) -> int:
        return (
            start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | MODES[self.width] << 62
        )


def tile(rows: Any, width: int, turned: bool) -> Tile:
    """(rows, 32) octets in the layout of TMA; ``turned``, (rows, 16) numbers with neighbours in a column.

    Panels as wide as the swizzle, one behind the other; of a panel's line, piece i is at i ^ line.
    """
    numbers = rows.reshape(len(rows), -1, 2) if turned else rows[:, :, None]
    lines = numbers.swapaxes(0, 1) if turned else numbers
    count = len(lines)
    across = lines.reshape(count, -1)
    panels = -(-across.shape[1] // width)
    across = np.pad(across, ((0, 0), (0, panels * width - across.shape[1])))
    image = np.zeros((panels, count, width // 16, 16), np.uint8)
    for line in range(count):
        for piece in range(width // 16):
            swapped = piece ^ (line * width >> 7 & (width // 16 - 1))
            for panel in range(panels):
                start = panel * width + piece * 16
                image[panel, line, swapped] = across[line, start : start + 16]
    panel_bytes, eight_lines = count * width, 8 * width
    leading, stride = panel_bytes, eight_lines
    if turned and width == 16:  # then the two change roles
        leading, stride = stride, leading
    return Tile(image.reshape(-1), leading, stride, width)


def products(
    names: tuple[str, str, str],
    columns: int,
    *,
    widths: tuple[int, int] = (128, 128),
    turned: tuple[bool, bool] = (False, False),
    registers: bool = False,
    flags: str = "1, 1, 1",
    rest: str = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
) -> tuple[Any, Any, Any]:
    """(A, B, D) of one instruction, where all sums begin with 5; ``rest`` is what follows it."""
    total, left, right = names
    depth = 32 // TYPES[left].itemsize
    random = np.random.default_rng(columns)
    low = 0 if "u8" in (left, right) else -4
    a, b = (random.integers(low, 5, (n, depth)).astype(np.float32) for n in (64, columns))
    first = tile(octets(a, left), widths[0], turned[0])
    second = tile(octets(b, right), widths[1], turned[1])
    image = np.zeros(4 * THREADS * WORDS, np.uint8)
    image[: len(first.image)] = first.image
    image[16384 : 16384 + len(second.image)] = second.image
    sums = columns // (4 if total == "f16" else 2)
    d = "{" + ", ".join(f"%r{100 + i}" for i in range(sums)) + "}"
    factor, fragment = f"{first.descriptor(0)}", ""
    if registers:  # lane (g, t): neighbours from t on, of rows g and g + 8, and of the next columns
        rows = octets(a, left).view(np.uint32)
        where = [(8 * (i % 2), 4 * (i // 2)) for i in range(4)]
        each = [rows[16 * WARP + LANE // 4 + r, LANE % 4 + c] for r, c in where]
        image[65536 : 65536 + 16 * THREADS] = np.stack(each, axis=1).view(np.uint8).ravel()
        factor = "{%r10, %r11, %r12, %r13}"
        fragment = f"""
            mov.b32 %r6, memory; mad.lo.u32 %r6, %r1, 16, %r6;
            ld.shared.v4.b32 {factor}, [%r6+65536];"""
    scale, *signs = flags.split(", ", 1)
    if turned != (False, False) or depth == 16:
        signs += [", ".join(str(int(each)) for each in turned[registers:])]
    five = {"f32": np.float32(5).view(np.uint32), "s32": 5, "f16": 0x45004500}[total]
    put = "\n".join(
        f"ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd2+{16 * i}];"
        f"st.shared.v4.b32 [%r5+{16 * i}], {{%r20, %r21, %r22, %r23}};"
        for i in range(WORDS // 4)
    )
    body = f"""
        mov.b32 %r5, memory; mad.lo.u32 %r5, %r1, {4 * WORDS}, %r5;
        {put}
        {" ".join(f"mov.b32 %r{100 + i}, {five};" for i in range(sums))}
        fence.proxy.async.shared::cta; bar.sync 0;
        {fragment}
        mov.b32 %r6, {scale}; setp.eq.s32 %p1, %r6, 1;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{total}.{left}.{right}
            {d}, {factor}, {second.descriptor(16384)}, {", ".join(["%p1", *signs])};
        {rest}
        {" ".join(f"st.global.b32 [%rd1+{4 * i}], %r{100 + i};" for i in range(sums))}"""
    given = image.view(np.uint32).reshape(THREADS, WORDS)
    found = computed(
        body, given, threads=THREADS, words=WORDS, shared_bytes=4 * THREADS * WORDS, arch=90
    )
    numbers = np.ascontiguousarray(found[:, :sums]).view(NUMPY[total])
    d_matrix = np.zeros((64, columns))
    for i in range(columns // 2):
        row = 16 * WARP + LANE // 4 + 8 * (i // 2 % 2)
        d_matrix[row, 8 * (i // 4) + 2 * (LANE % 4) + i % 2] = numbers[:, i]
    return a, b, d_matrix


KINDS = [
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "bf16", "bf16"),
    ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e5m2"),
    ("f16", "e5m2", "e4m3"),
    ("s32", "s8", "u8"),
]


@pytest.mark.parametrize("names", KINDS)
@pytest.mark.parametrize("registers", [False, True])
def test_products_of_all_types(names: tuple[str, str, str], registers: bool) -> None:
    flags = "1" if names[0] == "s32" else "1, 1, 1"
    a, b, d = products(names, 24, registers=registers, flags=flags)
    assert (d == a @ b.T + 5).all()


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_tiles_of_all_swizzles(width: int, turned: tuple[bool, bool]) -> None:
    other = {16: 128, 32: 64, 64: 32, 128: 16}[width]
    a, b, d = products(("f32", "f16", "f16"), 72, widths=(width, other), turned=turned)
    assert (d == a @ b.T + 5).all()


@pytest.mark.parametrize("columns", [8, 256])
def test_widths_of_a_product(columns: int) -> None:
    a, b, d = products(("f32", "bf16", "bf16"), columns)
    assert (d == a @ b.T + 5).all()


@pytest.mark.parametrize(
    ("flags", "factor", "before"), [("0, 1, 1", 1, 0), ("1, -1, 1", -1, 5), ("1, -1, -1", 1, 5)]
)
def test_sums_are_scaled_and_factors_negated(flags: str, factor: int, before: int) -> None:
    a, b, d = products(("f32", "f16", "f16"), 8, flags=flags)
    assert (d == factor * (a @ b.T) + before).all()


COMMIT = "wgmma.commit_group.sync.aligned;"


@pytest.mark.parametrize("rest", ["", COMMIT, f"{COMMIT} wgmma.wait_group.sync.aligned 1;"])
def test_who_does_not_wait_sees_what_was_there(rest: str) -> None:
    _, _, d = products(("f32", "f16", "f16"), 8, rest=rest)
    assert (d == 5).all()


@pytest.mark.parametrize(
    ("copy", "waited"),
    [
        ("mov.b32 %r30, %r100;", True),
        ("add.u32 %r30, %r100, 0;", False),
        ("add.f32 %r30, %r100, 0f00000000;", True),
    ],
)
def test_a_copy_of_a_sum_waits_with_it(copy: str, waited: bool) -> None:
    """And so does a sum of it, as compilers have both; whatever else looks before sees what was there."""
    rest = f"{COMMIT} {copy} wgmma.wait_group.sync.aligned 0; mov.b32 %r100, %r30;"
    a, b, d = products(("f32", "f16", "f16"), 8, rest=rest)
    assert (d[::16, 0] == ((a @ b.T + 5)[::16, 0] if waited else 5)).all()


def test_memory_is_read_until_the_wait() -> None:
    """The first factor is zero where a thread has written before it waited."""
    zero = "mov.b32 %r30, memory; mov.b32 %r31, 0; st.shared.b32 [%r30], %r31;"
    rest = f"{COMMIT} {zero} wgmma.wait_group.sync.aligned 0;"
    a, b, d = products(("f32", "f16", "f16"), 8, rest=rest)
    a[0, :2] = 0
    assert (d == a @ b.T + 5).all()


def test_shapes_that_do_not_exist_are_named() -> None:
    with pytest.raises(NotImplementedError, match=r"m64n12k16.*is not known"):
        products(("f32", "f16", "f16"), 12)
