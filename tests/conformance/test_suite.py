"""A few of torch's own tests; ``run_suite.py`` runs all of them, in minutes.

The choice has a test of every kind that interlace once failed: coalesced and sparse reductions, timeouts,
monitored barriers, any-source receives, object collectives, DDP with its C++ reducer and logger.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tiers import thorough

pytest.importorskip("expecttest", reason="torch's tests need it")

SCRIPT = Path(__file__).with_name("run_suite.py")
CHOICE = (
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_barrier_timeout_full_group",
    "test_all_gather_object_default_pg",
    "test_get_backend",
    "test_monitored_barrier_gloo",
    "test_scatter_full_group",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
)


@thorough
def test_choice_of_torch_tests() -> None:
    patterns = [f"^{name}$" for name in CHOICE]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-w", "2", *patterns],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith(f"interlace, 2 ranks: {len(CHOICE)} tests, {len(CHOICE)} pass"), (
        done.stdout
    )
