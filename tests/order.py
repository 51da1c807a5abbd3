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
    "multi/test_compile.py",
    "multi/test_functional_compiled.py",
    "multi/test_pages.py",
    "sim/test_hierarchical.py",
    "sim/test_api_operations.py",
    "build/test_build.py",
    "build/test_nvshmem.py",
    "sim/test_protocol_mutants.py",
    "multi/test_hosts.py",
    "sim/test_stream_engine.py",
    "sim/test_schedules.py",
    "multi/test_host_engine.py",
    "multi/test_bench_command.py",
    "multi/test_host_steps.py",
    "build/test_pipelining.py",
    "sim/test_verify_command.py",
    "build/test_bundle.py",
    "build/test_aot.py",
    "sim/test_determinism.py",
    "sim/test_fused_ops.py",
    "build/test_lint.py",
    "sim/test_node_matmul.py",
    "multi/test_styles.py",
    "multi/test_tiny_gpt.py",
    "multi/test_nn.py",
)

assert all((TESTS / name).exists() for name in LONGEST)

_PLACES = {TESTS / name: place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file; the rest stays as it is, behind."""
    items.sort(key=lambda item: _PLACES.get(item.path, len(LONGEST)))


def workers(cores: int) -> int:
    """One more than cores: tests of processes, and of what hangs, wait for a third of their time."""
    return cores + 1
