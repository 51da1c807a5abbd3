"""Products of block-scaled operands: numbers of 8 or 4 bits, with a scale for each block along k.

A packed row, or column of B, contains its scales, so code that moves rows moves the scales too::

    values of 128 numbers | ... | scales of 128 numbers | ... | an fp32, if SCALE is "e4m3" | padding

with as many of the first as of the second. The last numbers are zeros, and the padding ends at a multiple
of 16 bytes. So K, the length of a row, determines how many numbers it has. Constants of ``Tiles``:

``VALUES``  "" none; "e4m3", "e5m2", or "e2m1": two numbers in a byte, the first in the low bits
``WEIGHT_VALUES``  the same for B, if it differs from A's: "e4m3" or "e5m2"
``SCALE``   "e8m0" or "e4m3", a byte each; "fp32"
``BLOCK``   numbers along k with one scale
``BLOCK_K`` bytes of values along k that are multiplied at a time, at most 128 numbers; always 128 numbers
            in the interpreter, because sums of 128 are the definition
``NATIVE``  "" converts both factors to bf16, exactly, with integers and one multiplication: the same on
            every GPU and in the interpreter. "values": instructions for fp8, from sm_89 on, convert e4m3,
            and tensor cores take factors of e4m3 as they are where a scale in fp32 multiplies the sum.
            "scales": tensor cores multiply by the scales too, from sm_100 on.
"""

import triton
import triton.language as tl

INNER = 128  # numbers along k whose products are summed before they are added to the rest
_INNER = tl.constexpr(INNER)


@triton.jit
def _e4m3(byte, TILES: tl.constexpr):
    if TILES.NATIVE != "":
        made = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = byte.to(tl.uint16)
        # The fields of e4m3 where fp16 has its own, whose exponent is larger by 8.
        fields = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = fields.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        made = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    return made


@triton.jit
def _e5m2(byte):
    # The upper byte of an fp16.
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(code):
    bits = code.to(tl.uint16)
    # As in _e4m3; the exponent of fp16 is larger by 14.
    fields = ((bits & 8) << 12) | ((bits & 7) << 9)
    return fields.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _e8m0(byte):
    bits = byte.to(tl.int32)
    # 0 is 2**-127, which in fp32 has no exponent; 255 is nan.
    power = tl.where(bits == 0, 0x400000, bits << 23)
    return tl.where(bits == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(bytes, VALUES: tl.constexpr, TILES: tl.constexpr, ALONG: tl.constexpr):
    """Return bytes ``[M, N]`` as numbers in fp32; numbers of one byte are neighbours along ALONG."""
    if VALUES == "e2m1":
        pairs = tl.join(_e2m1(bytes & 15), _e2m1(bytes >> 4))
        if ALONG == 0:
            turned = tl.permute(pairs, (0, 2, 1))
            made = tl.reshape(turned, (2 * bytes.shape[0], bytes.shape[1]))
        else:
            made = tl.reshape(pairs, (bytes.shape[0], 2 * bytes.shape[1]))
    elif VALUES == "e5m2":
        made = _e5m2(bytes)
    else:
        made = _e4m3(bytes, TILES)
    return made


@triton.jit
def _scales(loaded, TILES: tl.constexpr):
    """Return scales in fp32."""
    if TILES.SCALE == "fp32":
        made = loaded
    elif TILES.SCALE == "e4m3":
        made = _e4m3(loaded, TILES)
    else:
        made = _e8m0(loaded)
    return made


@triton.jit
def _for_rows(scales, NUMBERS: tl.constexpr):
    """Repeat ``[M, blocks]`` to ``[M, NUMBERS]``."""
    M: tl.constexpr = scales.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    repeated = tl.broadcast_to(scales[:, :, None], (M, BLOCKS, NUMBERS // BLOCKS))
    return tl.reshape(repeated, (M, NUMBERS))


@triton.jit
def _for_columns(scales, NUMBERS: tl.constexpr):
    """Repeat ``[blocks, N]`` to ``[NUMBERS, N]``."""
    BLOCKS: tl.constexpr = scales.shape[0]
    N: tl.constexpr = scales.shape[1]
    repeated = tl.broadcast_to(scales[:, None, :], (BLOCKS, NUMBERS // BLOCKS, N))
    return tl.reshape(repeated, (NUMBERS, N))


@triton.jit
def _native(scales, TILES: tl.constexpr):
    """Return scales as tensor cores take them: bytes of e8m0, or e4m3."""
    made = scales
    if TILES.SCALE == "e4m3":
        made = scales.to(tl.float8e4nv, bitcast=True)
    return made


@triton.jit
def add_scaled_product(acc, a, a_scales, b, b_scales, TILES: tl.constexpr):
    """Add to ``acc`` the product of A's and B's tiles, both of ``BLOCK_K`` bytes along k, with scales.

    Legend: ``a`` ``[M, bytes]``, ``a_scales`` ``[M, blocks]``, ``b`` ``[bytes, N]``, ``b_scales``
    ``[blocks, N]``. A scale of 8 bits is multiplied into its values first. The result is a bf16 number,
    exactly, unless its exponent is beyond bf16's. A scale in fp32 is one for all of them, and multiplies
    the sum, which is added in fp32 outside of the tensor cores.
    """
    LEFT: tl.constexpr = TILES.VALUES
    RIGHT: tl.constexpr = TILES.VALUES if TILES.WEIGHT_VALUES == "" else TILES.WEIGHT_VALUES
    if TILES.NATIVE == "scales":
        of_rows = _native(a_scales, TILES)
        of_columns = _native(tl.trans(b_scales), TILES)
        acc = tl.dot_scaled(a, of_rows, LEFT, b, of_columns, RIGHT, acc)
    else:
        of_rows = _scales(a_scales, TILES)
        of_columns = _scales(b_scales, TILES)
        if TILES.NATIVE == "values" and TILES.SCALE == "fp32":
            product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
            acc += product * (of_rows * of_columns)
        elif TILES.SCALE == "fp32":
            left = _numbers(a, LEFT, TILES, 1).to(tl.bfloat16)
            right = _numbers(b, RIGHT, TILES, 0).to(tl.bfloat16)
            acc += tl.dot(left, right) * (of_rows * of_columns)
        else:
            left = _numbers(a, LEFT, TILES, 1)
            right = _numbers(b, RIGHT, TILES, 0)
            left = left * _for_rows(of_rows, left.shape[1])
            right = right * _for_columns(of_columns, right.shape[0])
            acc = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), acc)
    return acc


@triton.jit
def multiply_packed(
    a, a_ptr, stride_am, rows, weight, b, b_ptr, N, K, tile_m, tile_n, first_row,
    TILES: tl.constexpr,
):  # fmt: skip
    """Return ``A[tile_m] @ B[:, tile_n]`` in fp32; both are packed, and K is the length of a packed row.

    Values are loaded by descriptors ``a`` and ``b``, if there are any; ``first_row`` is of ``a``.
    """
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    VALUE_BYTES: tl.constexpr = TILES.BLOCK_K
    NUMBERS: tl.constexpr = 2 * VALUE_BYTES if TILES.VALUES == "e2m1" else VALUE_BYTES
    SCALES: tl.constexpr = max(1, NUMBERS // TILES.BLOCK)
    KIND: tl.constexpr = tl.float32 if TILES.SCALE == "fp32" else tl.uint8
    # int64, because their product with a stride may pass 2**31.
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_value = tl.arange(0, VALUE_BYTES)
    offs_scale = tl.arange(0, SCALES)
    mask_m = (offs_m < rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    steps = K // _step_bytes(TILES) * (_INNER // NUMBERS)  # padding is less than 128 numbers
    value_bytes = steps * VALUE_BYTES
    a_rows = a_ptr + offs_m * stride_am
    b_columns = b_ptr + offs_n * weight.stride_n
    a_scales = (a_rows + value_bytes).to(tl.pointer_type(KIND))
    b_scales = (b_columns + value_bytes).to(tl.pointer_type(KIND))
    a_ptrs = a_rows[:, None] + offs_value[None, :]
    b_ptrs = b_columns[None, :] + offs_value[:, None]
    a_scale_ptrs = a_scales[:, None] + offs_scale[None, :]
    b_scale_ptrs = b_scales[None, :] + offs_scale[:, None]
    row = (first_row + tile_m * BLOCK_M).to(tl.int32)
    column = (tile_n * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        if TILES.DESCRIPTORS == "":
            a_values = tl.load(a_ptrs, mask=mask_m, other=0)
            b_values = tl.load(b_ptrs, mask=mask_n, other=0)
            a_ptrs += VALUE_BYTES
            b_ptrs += VALUE_BYTES
        else:
            a_values = a.load([row, step * VALUE_BYTES])
            b_values = b.load([column, step * VALUE_BYTES]).T
        of_rows = tl.load(a_scale_ptrs, mask=mask_m, other=0)
        of_columns = tl.load(b_scale_ptrs, mask=mask_n, other=0)
        acc = add_scaled_product(acc, a_values, of_rows, b_values, of_columns, TILES)
        passed = SCALES
        if NUMBERS < TILES.BLOCK:  # the last of several steps with the same scale
            passed = (step + 1) % (TILES.BLOCK // NUMBERS) == 0
        a_scale_ptrs += passed
        b_scale_ptrs += passed
    if TILES.SCALE == "e4m3":
        of_row = (a_scales + steps * SCALES).to(tl.pointer_type(tl.float32))
        of_column = (b_scales + steps * SCALES).to(tl.pointer_type(tl.float32))
        whole_rows = tl.load(of_row, mask=offs_m < rows, other=0.0)[:, None]
        whole_columns = tl.load(of_column, mask=offs_n < N, other=0.0)[None, :]
        # A scale above 1 and one below it are multiplied first: with either alone the sum may overflow
        # fp32 although the result does not. Two above 1, or two below it, may be multiplied together.
        apart = (whole_rows > 1.0) != (whole_columns > 1.0)
        together = acc * (whole_rows * whole_columns)
        acc = tl.where(apart, together, acc * whole_rows * whole_columns)
    return acc


@triton.jit
def packed_length(N, TILES: tl.constexpr):
    """Return the bytes of a packed row of N numbers: ``BlockFormat.row_bytes``."""
    return tl.cdiv(tl.maximum(packed_end(N, TILES), 1), 16) * 16


@triton.jit
def packed_end(N, TILES: tl.constexpr):
    """Return the bytes before the padding of a packed row of N numbers."""
    WHOLE: tl.constexpr = 4 if TILES.SCALE == "e4m3" else 0
    return tl.cdiv(N, _INNER) * _step_bytes(TILES) + WHOLE


@triton.jit
def _step_bytes(TILES: tl.constexpr):
    """Return the bytes of 128 numbers, and of their scales."""
    SCALE_BYTES: tl.constexpr = 4 if TILES.SCALE == "fp32" else 1
    VALUE_BYTES: tl.constexpr = _INNER // 2 if TILES.VALUES == "e2m1" else _INNER
    return VALUE_BYTES + _INNER // TILES.BLOCK * SCALE_BYTES


@triton.jit
def _rounded(size, VALUES: tl.constexpr):
    """Return the bits of non-negative numbers, rounded to nearest, ties to even; the same everywhere.

    Numbers beyond the largest, infinity and nan get the largest bits of the format.
    """
    MANTISSA: tl.constexpr = 1 if VALUES == "e2m1" else 2 if VALUES == "e5m2" else 3
    BIAS: tl.constexpr = 1 if VALUES == "e2m1" else 15 if VALUES == "e5m2" else 7
    MOST: tl.constexpr = 7 if VALUES == "e2m1" else 0x7F
    SHIFT: tl.constexpr = 23 - MANTISSA
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    # A nan would overflow in the sum below.
    bits = tl.minimum(size.to(tl.int32, bitcast=True), 0x7F800000)
    normal = ((bits + HALF + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # The last bit of this number in fp32 is the least number of the format: an addition rounds to it.
    LARGE_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    LARGE: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (size + LARGE).to(tl.int32, bitcast=True) - LARGE_BITS
    return tl.minimum(tl.where(bits < ((128 - BIAS) << 23), small, normal), MOST)


@triton.jit
def quantized(numbers, TILES: tl.constexpr):
    """Return rows of fp32 numbers as values, ``[M, bytes]``, and scales of their blocks, ``[M, blocks]``.

    The bits are those of ``formats.quantize``, with a scale of the whole tensor that is 1.
    """
    M: tl.constexpr = numbers.shape[0]
    BLOCKS: tl.constexpr = numbers.shape[1] // TILES.BLOCK
    LARGEST: tl.constexpr = (
        6.0 if TILES.VALUES == "e2m1" else 57344.0 if TILES.VALUES == "e5m2" else 448.0
    )
    # As integers, where nan is the largest.
    sizes = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sizes = tl.max(tl.reshape(sizes, (M, BLOCKS, TILES.BLOCK)), axis=2)
    largest = tl.full((M, BLOCKS), LARGEST, tl.float32)
    wanted = tl.div_rn(sizes.to(tl.float32, bitcast=True), largest)
    bits = wanted.to(tl.int32, bitcast=True)
    if TILES.SCALE == "fp32":
        scales = tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)
    elif TILES.SCALE == "e4m3":
        scales = tl.minimum(tl.maximum(_rounded(wanted, "e4m3"), 1), 0x7E)
        scales = tl.where(bits > 0x7F800000, 0x7F, scales).to(tl.uint8)
    else:
        exact = tl.where(bits < 0x00800000, 0x400000, 0)  # 2**-127 has no exponent in fp32
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) > exact, 1, 0)
        scales = tl.minimum(exponent, 255).to(tl.uint8)
        # So that no value times its scale overflows fp32; see LARGEST_PRODUCTS of formats.py.
        FRACTION: tl.constexpr = (
            1.5 if TILES.VALUES == "e2m1" else 1.75 if TILES.VALUES == "e5m2" else 1.875
        )
        numbers = tl.clamp(numbers, -FRACTION * 2.0**127, FRACTION * 2.0**127)
    quotient = tl.div_rn(numbers, _for_rows(_scales(scales, TILES), numbers.shape[1]))
    sign = tl.where(quotient.to(tl.int32, bitcast=True) < 0, 1, 0)
    values = _rounded(tl.abs(quotient), TILES.VALUES)
    if TILES.VALUES == "e2m1":
        pairs = tl.reshape(values | (sign << 3), (M, numbers.shape[1] // 2, 2))
        low, high = tl.split(pairs)
        values = low | (high << 4)
    else:
        values = values | (sign << 7)
    return values.to(tl.uint8), scales
