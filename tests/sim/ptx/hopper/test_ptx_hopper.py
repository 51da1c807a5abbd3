"""Kernels compiled for sm_90 in the place ``ptx``: TMA and wgmma, and mutants of what is compiled."""

import re
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import interlace
from interlace import functional, verify
from interlace.runtime.core.errors import SourceText
from interlace.runtime.tuning.configuration import override
from sim.ptx import product_kernels

SMALL: dict[str, Any] = {"block_m": 64, "block_n": 64, "block_k": 32, "programs": 2, "num_warps": 4}
BY_TMA = {**SMALL, "copiers": 1, "output_descriptors": True}
ROLES = {**SMALL, "copiers": 0, "output_descriptors": True, "warp_roles": True, "num_stages": 2}
VARIANTS = {
    "tma": {**SMALL, "copiers": 1},
    "tma, stored too": BY_TMA,
    "pointers": {**SMALL, "copiers": 1, "descriptors": False},
    "two warpgroups": {**BY_TMA, "num_warps": 8, "block_m": 128, "epilogue_subtile": 2},
    "roles": ROLES,
    "roles, 3 stages, 2 parts": {**ROLES, "num_stages": 3, "epilogue_subtile": 2},
}


def step(
    configuration: dict[str, Any], dtype: torch.dtype, rows: int = 80, *, turned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both fused matmuls; whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(interlace.get_rank())
    shard, weight = (
        torch.randint(-2, 3, s, generator=generator).to(dtype) for s in ((rows, 64), (64, 64))
    )
    weight = weight.t().contiguous().t() if turned else weight
    with override(**configuration):
        return (
            interlace.all_gather_matmul(shard, weight, algorithm="fused"),
            interlace.matmul_reduce_scatter(shard, weight, algorithm="fused"),
        )


def compare(*arguments: Any, **options: Any) -> None:
    found = interlace.run(step, 2, *arguments, place="ptx", arch=90, seed=1, **options)
    for ones, others in zip(found, interlace.run(step, 2, *arguments, **options), strict=True):
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one, other)


def test_matmuls_by_tma_and_wgmma_are_those_of_sim() -> None:
    compare(BY_TMA, torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("turned", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_that_of_sim(variant: str, dtype: torch.dtype, turned: bool) -> None:
    """150 rows: some programs have several tiles, and rings of roles go round."""
    compare(VARIANTS[variant], dtype, 150, turned=turned)


# -- mutants ---------------------------------------------------------------------------------------

MUTANTS = {
    "wait_group 0 made .read": (r"bulk\.wait_group\s+0", "bulk.wait_group.read 0", "write-read"),
    "no fence.proxy.async": (r"fence\.proxy\.async[\w.:]*\s*;", "", "no proxy fence"),
    "no mbarrier wait": (r"mbarrier\.try_wait[^;]*;\s*@!complete[^;]*;", "", "write-read"),
    "no bar.sync": (r"bar\.sync\s+0(, \d+)?;", "", "write-read"),
    ".sys narrowed": (r"\.sys\b", ".gpu", "narrow scope"),
    ".release relaxed": (r"(?<=sys)\.release\b", ".relaxed", "weak order"),
}


def races(configuration: dict[str, Any], pattern: str, by: str) -> set[str]:
    changed = []

    def rewrite(name: str, ptx: str) -> str:
        mutant = re.sub(pattern, by, ptx)
        changed.append(mutant != ptx)
        return mutant

    report = verify.races(step, 2, configuration, torch.bfloat16, arch=90, seeds=1, rewrite=rewrite)
    assert any(changed) == bool(pattern)
    return {kind for finding in report.findings for kind in finding.kinds} | (
        {"error"} if report.errors else set()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("configuration", [BY_TMA, ROLES], ids=["tma", "roles"])
def test_what_is_compiled_has_no_races(configuration: dict[str, Any]) -> None:
    assert races(configuration, "", "") == set()


@pytest.mark.thorough
@pytest.mark.parametrize("configuration", [BY_TMA, ROLES], ids=["tma", "roles"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_compiled_code_are_found(mutant: str, configuration: dict[str, Any]) -> None:
    """Warps with roles that wait for no mbarrier arrive more often than one expects: that is an error."""
    pattern, by, kind = MUTANTS[mutant]
    runs_ahead = mutant == "no mbarrier wait" and configuration is ROLES
    assert ("error" if runs_ahead else kind) in races(configuration, pattern, by)


@pytest.mark.parametrize(
    ("kernel", "arch", "text"),
    [
        ("told_falsely", 80, "misaligned: .* not a multiple of 16; line"),
        ("unknown", 80, "instruction 'brkpt' is not known"),
        (
            "begins_anywhere",
            90,
            "TMA cannot use this tensor map: its base, address 0x.* multiple of 16 bytes",
        ),
    ],
)
def test_what_compiled_code_does_wrong_has_a_line(kernel: str, arch: int, text: str) -> None:
    def on_rank() -> None:
        getattr(product_kernels, kernel)[(1,)](torch.zeros(4096), BLOCK=512)

    report = verify.races(on_rank, 1, seeds=1, arch=arch)
    ((_, told),) = (*report.errors, *report.refusals)
    assert isinstance(told, SourceText) and re.search(text, told), told
    assert re.search(rf"product_kernels\.py:\d+ in {kernel}(:|$)", told), told
    assert told.frames[0][0].endswith("product_kernels.py")


def scaled_step() -> tuple[torch.Tensor, torch.Tensor]:
    generator, one = torch.Generator().manual_seed(interlace.get_rank()), torch.ones(())
    x, w = (
        torch.randint(-2, 3, (n, 64), generator=generator).float().to(torch.float8_e4m3fn)
        for n in (80, 64)
    )
    how: dict[str, Any] = {"algorithm": "fused", "out_dtype": torch.bfloat16}
    with override(**BY_TMA):
        return (
            functional.all_gather_scaled_matmul(x, w.t(), one, one, **how),
            functional.scaled_matmul_reduce_scatter(x, w.t(), one, one, **how),
        )


def test_matmuls_of_fp8_are_those_of_sim() -> None:
    """Their parts are summed up before the wait for the group of the products."""
    found = interlace.run(scaled_step, 2, place="ptx", arch=90, seed=1)
    for ones, others in zip(found, interlace.run(scaled_step, 2), strict=True):
        assert all(map(torch.equal, ones, others))


@pytest.mark.parametrize("arch", [None, 80, 90])
@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_descriptors_of_the_host(arch: int | None, padding: str) -> None:
    """Beyond the source's 24 rows there are zeros, or nan."""
    source, target = torch.arange(24.0 * 16).reshape(24, 16), torch.zeros(32, 16)

    def on_rank() -> None:
        given = TensorDescriptor.from_tensor(source, [16, 16], padding)
        taken = TensorDescriptor.from_tensor(target, [16, 16])
        product_kernels.shifted[(2,)](given, taken, 16)

    report = verify.races(on_rank, 1, seeds=1, arch=arch)
    assert report.clean and torch.equal(target[:24], source + 1), str(report)
    assert target[24:].isnan().all() if padding == "nan" else (target[24:] == 1).all()
