"""Negative controls of interlace.verify: every mutant is caught, and what is not mutated is clean."""

import pathlib
from dataclasses import replace

import pytest

from interlace.tools.targets import TARGETS
from interlace.verify import races
from mutants.first_fault import first_fault
from mutants.mutant_checks import caught
from mutants.mutations import Case, Mutant
from mutants.protocol_mutants import CASES
from tiers import few, thorough

BY_NAME = {case.mutant.name: case for case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("mutants")


# What the report must say, where the kind of fault is known.
TEXTS = {
    "release dropped": "weak order (write-read race)",
    "acquire dropped": "weak order (write-read race)",
    "barrier dropped": "no barrier (write-read race)",
    "publish with gpu scope": "narrow scope",
    "flag stored plainly": "mixed access",
    "credit not waited for": "read-write",
    "one region for all sources": "write-write",
    "wait after the load": "read-write",
    "recipe without trailing meeting": "read-write",
    "recipe put of gpu scope": "narrow scope",
    "last program counter of cta scope": "narrow scope",
}


QUICK = [BY_NAME[name] for name in ("acquire dropped", "credit not waited for")]


@pytest.mark.parametrize(
    "case", few(CASES, *QUICK), ids=[name.replace(" ", "_") for name in BY_NAME]
)
def test_mutant_is_caught(case: Case, folder: pathlib.Path) -> None:
    expected = TEXTS.get(case.mutant.name)
    quick = expected is None and case.check == "races"
    found = caught(case, "first race" if quick else case.check, folder)
    assert found
    if expected is not None:
        assert case.check == "races" and any(text.startswith(expected) for text in found), found
        for part in ("  first   rank ", "  second  rank ", ".py:", ", byte ", "  seed    "):
            assert part in found[0]


# Of one slot or of many at once: every kernel does at least one of each.
IN_ALL_KERNELS = [
    ("release dropped", "release of many slots dropped"),
    ("credit not waited for", "credits of all not waited for"),
]
KERNEL_VARIANTS = [
    f"{name} {variant}"
    for name, target in TARGETS.items()
    for variant in target.variants
    if variant in ("fused", "kernel", "multimem", "switch")
]
# Ops whose peers read what a rank has staged: the stream, too, waits for credits between two of them.
WAITED_FOR_TWICE = ["reduce_scatter multimem", "all_reduce multimem"]
# Words carry their flags; and before rows are combined all have dispatched, who have read those before.
WITHOUT_CREDIT = [*WAITED_FOR_TWICE, "decode fused", "combine fused"]


@thorough
@pytest.mark.parametrize(
    ("names", "target"),
    [
        (names, target)
        for names in IN_ALL_KERNELS
        for target in KERNEL_VARIANTS
        if not ("credit" in names[0] and target in WITHOUT_CREDIT)
    ],
)
def test_mutant_is_caught_in_every_kernel(
    names: tuple[str, ...], target: str, folder: pathlib.Path
) -> None:
    cases = [replace(BY_NAME[name], target=target) for name in names]
    assert any(caught(case, "first race", folder) for case in cases)


def test_edits_must_match() -> None:
    """A mutant whose line has changed is an error and not a mutant that does nothing."""
    stale = Mutant("stale", "kernels/signal.py", (*CASES[0].mutant.edits, *CASES[0].mutant.edits))
    with pytest.raises(AssertionError, match="stale"):
        stale.source()


@pytest.mark.parametrize(
    ("name", "variant", "world_size"),
    [
        ("signal", "kernels", 3),
        ("all_gather_matmul", "fused", 2),
        ("broadcast", "low_latency", 2),
    ],
)
def test_what_is_not_mutated_is_clean(name: str, variant: str, world_size: int) -> None:
    """All of them, on all world sizes: ``make verify`` and, in part, ``make verify-fast``."""
    report = races(TARGETS[name].variants[variant], world_size, seeds=1)
    assert report.clean, str(report)
    assert report.events > 100


@thorough
def test_the_first_fault_is_the_first_of_all(folder: pathlib.Path) -> None:
    """And none of what is not mutated; an error of a rank is one, too."""
    case = replace(BY_NAME["release dropped"], target="all_gather kernel")
    (first,), found = (caught(case, check, folder) for check in ("first race", "races"))
    # the cause is not known yet
    assert first.splitlines()[1:4] == found[0].splitlines()[1:4]
    assert first_fault(TARGETS["all_gather"].variants["kernel"], 2, range(2)) == ""

    def refuses() -> None:
        raise ValueError("wrong")

    assert "wrong" in first_fault(refuses, 2, [0])
