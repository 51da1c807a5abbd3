"""Instructions of the kernels by the switch, and of those with flags in their words."""

import re

import pytest

from cases.builds import compiled
from interlace.runtime.compiler.request import Entry
from interlace.tools.catalogue.catalogue import entries
from tiers import thorough

ARCHES = (80, 90, 100)
# One of each kernel: the rest differ in dtype and unit, and are built with the whole catalogue.
CHOSEN = {
    "low_latency_all_gather": ARCHES,
    "low_latency_all_reduce bf16": (90,),
    "low_latency_broadcast by bytes": (80, 90),
    "multimem_all_gather bf16": (90, 100),
    "multimem_reduce_scatter bf16": (90,),
    "multimem_all_reduce fp16": (90,),
    "multimem_all_reduce fp32": (90,),
}


def chosen() -> dict[str, Entry]:
    return {
        f"{entry.name} {arch}": entry
        for arch in ARCHES
        for entry in entries(arch)
        if arch in CHOSEN.get(entry.name, ())
    }


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = chosen()
    assert len(made) == sum(map(len, CHOSEN.values()))
    reports, texts = compiled(made.values(), tmp_path_factory.mktemp("collectives"))
    for report in reports:
        assert not report.problems(), (report.name, report.arch, report.problems())
        assert report.spills == 0 and report.stack == 0
    return dict(zip(made, texts, strict=True))


@thorough
def test_words_are_whole_and_relaxed(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        if name.startswith("low_latency"):
            assert text.count("st.relaxed.sys.global.b64") == 1, name  # in a loop over peers
            assert text.count("ld.relaxed.sys.global.b64") == 2, (
                name
            )  # the first look, and later ones
            assert "mov.b64 word, {" in text and "membar" not in text


SUMS = {"bf16": "acc::f32.v4.bf16x2", "fp16": "acc::f32.v4.f16x2", "fp32": "v4.f32"}


@thorough
def test_the_switch_sends_and_sums(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        if not name.startswith("multimem"):
            continue
        entry = chosen()[name]
        vector = 16 // (4 if "fp32" in name else 2)
        per_thread = int(entry.constants["BLOCK"]) // vector // (32 * entry.num_warps)
        sums = re.findall(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.(\S+)", text)
        assert sums == ([] if "gather" in name else [SUMS[name.split()[1]]] * per_thread), name
        sends = text.count("multimem.st.relaxed.sys.global.v4.f32")
        assert sends == (0 if "scatter" in name else per_thread), name
        assert re.search(r"atom\.\S*release\S*exch", text), name
