"""Tiles of attention, compiled for 9.0 and run as PTX: keys by TMA, with masks and without."""

import re
from dataclasses import replace

import pytest
import torch

from cases.attention_cases import AttentionCase, check
from interlace import verify
from interlace.tools.targets import TARGETS

CAUSAL = AttentionCase(
    (150, 140), (1, 1), 32, batch=1, dtype=torch.float16, balance="contiguous", tiles=(64, 64)
)
WINDOW = replace(CAUSAL, lengths=(130, 160), causal=False, window=(100, 60))
KERNEL = "all_gather_attention_kernel"
FENCE = r"fence\.proxy\.async[\w.:]*\s*;"


@pytest.mark.thorough
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", [CAUSAL, WINDOW])
def test_agrees_with_the_whole_sequence(case: AttentionCase, arch: int) -> None:
    check(case, "all_gather", "fused", place="ptx", arch=arch)


@pytest.mark.thorough
@pytest.mark.parametrize("fenced", [True, False])
def test_keys_of_peers_are_fenced_before_tma_loads_them(fenced: bool) -> None:
    seen = []

    def rewrite(name: str, ptx: str) -> str:
        if name != KERNEL:
            return ptx
        assert "cp.async.bulk.tensor" in ptx
        seen.append(name)
        return ptx if fenced else re.sub(FENCE, "", ptx)

    target = TARGETS["attention"].variants["all_gather fused"]
    report = verify.races(target, 2, seeds=1, arch=90, rewrite=rewrite)
    kinds = {kind for finding in report.findings for kind in finding.kinds}
    assert seen and ("no proxy fence" in kinds) != fenced, str(report)
