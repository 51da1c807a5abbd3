"""Order of the suite in `make test`: whole files on workers of pytest-xdist, the longest first.

A worker takes the next file when it is done with one, so that they all end at about the same time, and a
fixture of a file is made once. Seconds were measured on two cores in November 2026; what is not here takes
less than eight.
"""

import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent

LONGEST = (
    "multi/functional/test_compile.py",
    "multi/functional/test_functional_compiled.py",
    "documents/test_pages.py",
    "sim/algorithms/test_hierarchical.py",
    "sim/api/test_api_operations.py",
    "build/test_build.py",
    "build/test_nvshmem.py",
    "sim/verify/test_protocol_mutants.py",
    "multi/hosts/test_hosts.py",
    "sim/engines/test_stream_engine.py",
    "sim/verify/test_schedules.py",
    "multi/shm/test_host_engine.py",
    "multi/cli/test_bench_command.py",
    "multi/shm/test_host_steps.py",
    "build/test_pipelining.py",
    "sim/verify/test_verify_command.py",
    "build/bundle/test_bundle.py",
    "sim/algorithms/test_determinism.py",
    "sim/algorithms/test_fused_ops.py",
    "sim/norms/test_norms.py",
    "build/lint/test_lint.py",
    "build/test_loops.py",
    "sim/algorithms/test_node_matmul.py",
    "multi/tensor/test_styles.py",
    "multi/nn/test_tiny_gpt.py",
    "multi/nn/test_nn.py",
    "repository/test_types.py",
    "multi/launching/test_launchers.py",
    "sim/cli/test_new.py",
    "repository/test_action.py",
    "sim/cli/test_report_page.py",
)

assert all((TESTS / name).exists() for name in LONGEST)

BEGUN = pytest.StashKey[object]()
MEASURED = "`make test` took N minutes on two cores of an AMD EPYC in November 2026."

FILES = pytest.StashKey[set[pathlib.Path]]()
"""The files in which tests were found, those that the run leaves out too."""

_PLACES = {TESTS / name: place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; the rest stays as it is, behind."""
    items.sort(key=lambda item: _PLACES.get(item.path, len(LONGEST)))


def workers(cores: int) -> int:
    """One for each core: another worker would import everything and collect all tests once more."""
    return cores
