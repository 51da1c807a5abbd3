"""Products, sums, minima and maxima of the simulator have the bits of their definition, in all tiles.

They have them here, and in processes that use the BLAS kernels and vector units of other processors.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings

from interlace.runtime.numerics import exact as formats
from interlace.runtime.numerics.exact import larger, matrix_product, reduce, smaller
from tiers import few, thorough

OTHER_PROCESSORS = [
    f"OPENBLAS_CORETYPE={core} MKL_CBWR={mkl} ATEN_CPU_CAPABILITY={aten} ONEDNN_MAX_CPU_ISA={onednn}"
    f" OPENBLAS_NUM_THREADS={threads} MKL_NUM_THREADS={threads} NPY_DISABLE_CPU_FEATURES={off}"
    for core, mkl, aten, onednn, threads, off in (
        ("Prescott", "COMPATIBLE", "default", "SSE41", 1, "AVX2,FMA3,AVX512F,AVX512_SKX"),
        ("Haswell", "AVX2", "avx2", "AVX2", 2, "AVX512F,AVX512_SKX"),
        ("Zen", "SSE4_2", "avx2", "AVX2", 4, "AVX512_SKX,AVX512_ICL"),
        ("SkylakeX", "AVX512", "avx512", "AVX512_CORE", 2, ""),
    )
]
"""Settings that stand for other processors. Of features that this one lacks numpy warns."""

ROOT = pathlib.Path(__file__).parents[3]
DETERMINISM = [
    f"tests/sim/algorithms/test_determinism.py::{test}"
    for test in ("test_same_bits_in_every_schedule", "test_all_ranks_get_the_same_bits")
]
NARROW = [tl.bfloat16, tl.float8e4nv, tl.float8e5]
DTYPES = ["fp32", "fp16", "fp64", *(dtype.name for dtype in NARROW)]


def numbers(seed: int, shape: tuple[int, ...], dtype: str, spread: int) -> Any:
    """Numbers of ``dtype`` as the interpreter widens them; ``spread`` of their exponents."""
    generator = np.random.default_rng(seed)
    values = np.ldexp(
        generator.integers(-4096, 4097, shape), generator.integers(-spread, spread + 1, shape)
    )
    values = values * np.ldexp(1.0, -12)
    for narrow in NARROW:
        if narrow.name == dtype:
            return formats.widen(formats.narrow(values, narrow), narrow)
    return values.astype({"fp32": np.float32, "fp16": np.float16, "fp64": np.float64}[dtype])


def bits(values: Any) -> Any:
    return values.view(np.uint64 if values.dtype == np.float64 else np.uint32)


def defined(left: Any, right: Any) -> Any:
    """Multiply two matrices by the definition, in Python's floats."""
    result = np.empty((len(left), right.shape[1]), np.float64)
    for row, column in np.ndindex(*result.shape):
        total = 0.0
        for a, b in zip(left[row].tolist(), right[:, column].tolist(), strict=True):
            total += a * b
        result[row, column] = total
    return result if left.dtype == np.float64 else result.astype(np.float32)


def special(values: Any, seed: int) -> Any:
    """``values`` with zeros of both signs, infinities and a nan."""
    generator = np.random.default_rng(seed)
    flat = values.reshape(-1)
    for number in (0.0, -0.0, np.inf, -np.inf, np.nan):
        flat[generator.integers(0, flat.size)] = number
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0, 3, 12]))
def test_no_split_of_a_product_changes_a_bit(dtype: str, data: Any, seed: int, spread: int) -> None:
    """The tiles have many sizes and orders."""
    rows, columns, depth = (data.draw(st.integers(1, most)) for most in (9, 9, 40))
    left = numbers(seed, (rows, depth), dtype, spread)
    right = numbers(seed + 1, (depth, columns), dtype, spread)
    if data.draw(st.booleans()):  # a BLAS may not cancel these terms
        left, right = np.concatenate([left, -left], 1), np.concatenate([right, right], 0)
    if data.draw(st.booleans()):
        left = special(left, seed)
    with np.errstate(all="ignore"):
        whole = matrix_product(left, right)
        right_bits = bits(defined(left, right) + whole.dtype.type(0))
    number = ~np.isnan(whole)
    assert (bits(whole) == right_bits)[number].all()
    tall = data.draw(st.permutations(range(rows))), data.draw(st.permutations(range(columns)))
    cuts = [sorted({0, len(each), *data.draw(st.sets(st.integers(0, len(each))))}) for each in tall]
    for (top, bottom), (first, last) in itertools.product(*map(itertools.pairwise, cuts)):
        here = tall[0][top:bottom], tall[1][first:last]
        with np.errstate(all="ignore"):
            tile = matrix_product(left[here[0]], np.asfortranarray(right[:, here[1]]))
        assert (bits(tile) == bits(whole)[np.ix_(*here)]).all()


@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(64,), (8, 16), (3, 4, 8), (5, 7)]))
def test_no_layout_of_a_reduction_changes_a_bit(seed: int, shape: tuple[int, ...]) -> None:
    values = special(numbers(seed, (1, int(np.prod(shape))), "fp32", 6), seed).reshape(shape)
    for axis, combine in itertools.product(range(len(shape)), (np.add, larger, smaller)):
        with np.errstate(all="ignore"):
            whole = reduce(combine, values, axis)
            turned = reduce(combine, np.asfortranarray(values), axis)
            lines = np.moveaxis(values, axis, -1).reshape(-1, shape[axis])
            alone = [reduce(combine, line.copy(), 0) for line in lines]
        for other in (turned, np.array(alone).reshape(whole.shape)):
            nan = np.isnan(whole)
            assert (np.isnan(other) == nan).all()
            assert (bits(np.asarray(other)) == bits(np.asarray(whole)))[~nan].all()


def test_zeros_have_an_order() -> None:
    for count in range(1, 40):  # numpy has other code for what is left of a vector
        zeros = np.zeros(count, np.float32)
        for x, y in ((zeros, -zeros), (-zeros, zeros)):
            assert not np.signbit(larger(x, y)).any() and np.signbit(smaller(x, y)).all()


def digests() -> dict[str, str]:
    """Return digests of products and sums of every dtype; for large ones a BLAS starts threads."""
    found = {}
    for dtype, (rows, columns, depth) in itertools.product(DTYPES, [(64, 48, 256), (16, 8, 16)]):
        with np.errstate(all="ignore"):
            left = special(numbers(1, (rows, depth), dtype, 6), 2)
            product = matrix_product(left, numbers(3, (depth, columns), dtype, 6))
            product = np.where(np.isnan(product), 7, product)
            total = np.nan_to_num(reduce(np.add, left, 1).astype(np.float64), nan=7)
        at = f"{dtype} {rows}x{columns}x{depth}"
        found[at] = hashlib.sha1(product.tobytes() + total.tobytes()).hexdigest()[:12]
    return found


def on_other_processor(variables: str, *command: str) -> str:
    """Return the output of Python with these settings; it must succeed."""
    for feature, there in (
        ("avx2", torch.cpu._is_avx2_supported), ("avx512", torch.cpu._is_avx512_supported)
    ):  # fmt: skip
        if f"={feature} " in variables and not there():
            pytest.skip(f"this processor has no {feature}")
    environment = {**os.environ, **dict(each.split("=") for each in variables.split())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("variables", few(OTHER_PROCESSORS, OTHER_PROCESSORS[0]))
def test_other_processors_give_the_same_bits(variables: str) -> None:
    code = f"import json; from {__name__} import digests; print(json.dumps(digests()))"
    said = on_other_processor(variables, "-c", code)
    assert json.loads(said.splitlines()[-1]) == digests()


@thorough
@pytest.mark.parametrize("variables", OTHER_PROCESSORS[:2])
def test_promises_hold_on_other_processors(variables: str) -> None:
    """These are the tests that the page of promises names for equal bits."""
    page = (ROOT / "docs/reference/promises.md").read_text()
    section = page.partition("## Equal bits")[2].partition("\n## ")[0]
    tests = sorted({*re.findall(r"`(tests/\S+::\w+)`", section), *DETERMINISM})
    chosen = [test for test in tests if not test.endswith("_on_other_processors")]
    assert len(chosen) > 5
    on_other_processor(variables, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)


def test_control_a_blas_does_not_have_the_bits_of_the_definition() -> None:
    """Triton's interpreter multiplies by a BLAS."""
    left, right = numbers(5, (64, 256), "fp32", 6), numbers(6, (256, 48), "fp32", 6)
    assert (left @ right != defined(left, right)).any()
    assert (matrix_product(left, right) == defined(left, right)).all()
