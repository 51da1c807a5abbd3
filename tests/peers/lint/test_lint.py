"""Lint of kernels in other projects' styles: what is right there is no finding, what is wrong is one."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from interlace.cli import main
from interlace_verify import shims
from interlace_verify.suite.jobs import (
    CheckPlan,
    JobResult,
    function_jobs,
    lint_launches,
    load_function,
)
from mutants.mutations import mutant_of, mutated_function
from peers.test_peers import MULTIMEM, MUTANTS, PEERS, PROGRESS, TUPLE, TWO_SHOTS, Peer
from tiers import thorough

PEERS_FOLDER = pathlib.Path(__file__).parents[1]
LITTLE = ["--seeds", "1", "--schedules", "1", "--arch", "90"]


def lint_of(fn: Callable[[], Any], world_size: int) -> list[JobResult]:
    """Lint of what a race check of one schedule has seen launched."""
    return both_of(fn, world_size)[1]


def both_of(fn: Callable[[], Any], world_size: int) -> tuple[set[str], list[JobResult]]:
    """The kinds of its races, too, which lint leaves to them."""
    plan = CheckPlan((world_size,), 1, 0, (90,))
    raced = [job.result() for job in function_jobs("", fn, plan)]
    races = {finding.kind for each in raced for finding in each.report.findings}
    return races, lint_launches("", raced, plan)


@thorough
@pytest.mark.parametrize(
    ("peer", "name", "kind"),
    [
        (TWO_SHOTS, "the meeting before the sums acquires nothing", "weak order"),
        (PROGRESS, "a poll that acquires nothing", "weak order"),
        (TUPLE, "threads that signal do not wait for those that store", "release without barrier"),
        (MULTIMEM, "sums of all threads signalled by one", "release without barrier"),
    ],
)
def test_what_others_need_is_a_finding(
    peer: Peer, name: str, kind: str, tmp_path: pathlib.Path
) -> None:
    (edit,) = (edit for of, _, mutant, edit in MUTANTS if of == peer and mutant == name)
    with shims.installed(*peer.shims):
        kinds, results = both_of(peer.loaded(peer.mutant(name, edit), tmp_path), peer.world_size)
    assert kind in kinds | {fault.rule for each in results for fault in each.report.findings}


@thorough
def test_a_signal_within_one_gpu_is_none_of_scope_gpu_and_one_of_scope_cta(
    tmp_path: pathlib.Path,
) -> None:
    for scope, kinds in (("gpu", set()), ("cta", {"narrow scope"})):
        edit = 'sem="acq_rel", scope="gpu"', f'sem="acq_rel", scope="{scope}"'
        counter = mutant_of("tests/sim/verify/user_exchange.py", scope, edit)
        fn = mutated_function(counter, "last_program", tmp_path)
        found, (result,) = both_of(fn, 2)
        assert (found, result.report.findings) == (kinds, ())


@thorough
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.file} {peer.function}")
def test_the_command_finds_nothing_in_what_is_right(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{PEERS_FOLDER / peer.file}::{peer.function}"
    named = [word for shim in peer.shims for word in ("--shims", shim)]
    code = main.run(["verify", target, *named, "--ranks", str(peer.world_size), *LITTLE])
    assert code == 0, capsys.readouterr().out


@thorough
def test_a_file_that_imports_what_is_not_installed_is_told() -> None:
    with shims.installed("torch"):
        fn = load_function(f"{PEERS_FOLDER / 'gpu_code.py'}::waits_for_values")
        results = lint_of(fn, 2)
    assert [(r.variant, r.findings) for r in results] == [("twice_kernel sm_90", ())]


@thorough
def test_a_kernel_that_calls_a_shim_is_not_told(tmp_path: pathlib.Path) -> None:
    """A shim is not compiled to what the package that it stands for is compiled to."""
    shimmed = {peer for peer in PEERS if peer.shims != ("torch",) or "nvshmem" in peer.file}
    assert TUPLE not in shimmed
    for peer in shimmed:
        with shims.installed(*peer.shims):
            fn = peer.loaded(peer.mutant("none"), tmp_path)
            assert lint_of(fn, peer.world_size) == []
