"""Order of the suite: whole files on workers of pytest-xdist.

A worker takes the next file when it is done with one, and a fixture of a file is made once. `make test`
begins with the longest files, so that all workers end at about the same time. `make test-all` begins with
the files that find most, because it ends after some minutes. Measured on two cores in November 2026.
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

FIND_MOST = (
    "multi/ops/test_ops_shm.py",
    "sim/algorithms/test_warp_roles.py",
    "sim/engines/test_stream_engine.py",
    "sim/norms/test_norms.py",
    "multi/cli/test_tune_layers.py",
    "multi/ops/test_hooks.py",
    "multi/process_group/test_backend_frameworks.py",
    "sim/cuda/test_cuda_streams.py",
    "sim/functional/test_functional_gradients.py",
    "sim/algorithms/test_fused_ops.py",
    "sim/attention/test_attention.py",
    "multi/shm/test_host_engine.py",
    "sim/compat/test_imports.py",
    "sim/cuda/test_cuda_graphs.py",
    "sim/algorithms/test_node_matmul.py",
    "sim/algorithms/test_multimem.py",
    "sim/algorithms/test_hierarchical.py",
    "sim/attention/test_decode.py",
    "sim/attention/test_attention_on_streams.py",
    "sim/nn/test_moe.py",
    "sim/experts/test_experts_on_streams.py",
    "sim/api/test_api_operations.py",
    "multi/tensor/test_styles.py",
    "multi/shm/test_shm_place.py",
    "sim/core/test_given_up_waits.py",
    "sim/algorithms/test_determinism.py",
    "sim/interpreter/test_defined_arithmetic.py",
    "sim/verify/test_protocol_mutants.py",
    "sim/verify/test_memory_faults.py",
    "sim/verify/test_races.py",
    "documents/test_pages.py",
    "documents/test_site.py",
    "repository/test_installation.py",
)
"""By how many of 100 mutants they find; then negative controls, pages and the wheel (November 2026)."""

assert all((TESTS / name).exists() for name in (*LONGEST, *FIND_MOST))

BEGUN = pytest.StashKey[object]()
MEASURED = (
    "With cold caches `make test` takes four minutes on two quiet cores (AMD EPYC, AVX-512, 2026)."
)

FILES = pytest.StashKey[set[pathlib.Path]]()
"""The files in which tests were found, those that the run leaves out too."""


def sort(items: list[pytest.Item], *, finding: bool) -> None:
    """Sort by file: first the tests that find most, or the longest; then the others by name."""
    files = FIND_MOST if finding else LONGEST
    places = {TESTS / name: place for place, name in enumerate(files)}
    items.sort(key=lambda item: (places.get(item.path, len(files)), item.path))


def workers(cores: int) -> int:
    """Return one worker per core: another one would import everything and collect all tests once more."""
    return cores
