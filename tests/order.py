"""How `make test` spreads the suite over workers of pytest-xdist: whole files, the longest first.

A worker takes the next file when it is done with one, so that they all end at about the same time, and a
fixture of a file is made once. Seconds were measured on two cores in November 2026; what is not here takes
less than eight.
"""

from __future__ import annotations

import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent

LONGEST = (
    "multi/test_functional_compiled.py",
    "multi/test_compile.py",
    "sim/test_hierarchical.py",
    "multi/test_hosts.py",
    "sim/test_stream_engine.py",
    "sim/test_node_matmul.py",
    "multi/test_backend.py",
    "multi/test_bench_command.py",
    "multi/test_host_engine.py",
    "sim/test_api_operations.py",
    "build/test_lint.py",
    "multi/test_pages.py",
    "multi/test_tune_ranks.py",
    "conformance/test_suite.py",
    "multi/test_functional.py",
    "multi/test_shm_place.py",
    "test_installation.py",
    "multi/test_styles.py",
    "sim/test_protocol_mutants.py",
    "sim/test_fused_ops.py",
    "sim/test_given_up_waits.py",
    "sim/test_verify_command.py",
    "build/test_pipelining.py",
    "multi/test_ops_shm.py",
    "build/test_build.py",
    "sim/test_bare_installation.py",
    "sim/test_schedules.py",
    "sim/test_determinism.py",
    "multi/test_symm_mem_ops.py",
    "sim/test_cuda_failures.py",
)

assert all((TESTS / name).exists() for name in LONGEST)

_PLACES = {TESTS / name: place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; the rest stays as it is, behind."""
    items.sort(key=lambda item: _PLACES.get(item.path, len(LONGEST)))


def workers(cores: int) -> int:
    """One more than cores: tests of processes, and of what hangs, wait for a third of their time."""
    return cores + 1
