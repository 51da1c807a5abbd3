"""A few of torch's own tests; ``run_suite.py`` runs all of them, in minutes."""

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


OF_A_CHECKOUT = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def group(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        return dist.group.WORLD._get_backend(torch.device("cpu"))

    @skip_if_lt_x_gpu(2)
    def test_sum(self):
        self.group()
        total = torch.ones(4, device=f"cuda:{self.rank}")
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((4,), 2.0))

    def test_that_only_gloo_passes(self):
        self.assertEqual(type(self.group()).__name__, "ProcessGroupGloo")


class RanksOfGPUs(MultiProcessTestCase):
    world_size = 0

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_that_no_rank_runs(self):
        raise AssertionError
"""


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


@thorough
def test_choice_of_torch_tests() -> None:
    patterns = [f"^{name}$" for name in CHOICE]
    done = run_suite("-w", "2", *patterns)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.startswith(f"interlace, 2 ranks: {len(CHOICE)} tests, {len(CHOICE)} pass"), (
        done.stdout
    )


@thorough
def test_files_of_a_checkout(tmp_path: Path) -> None:
    """Files that gloo cannot import and tests without ranks do not count; GPUs are replaced by CPUs."""
    folder = tmp_path / "test/distributed"
    folder.mkdir(parents=True)
    (folder / "test_device_mesh.py").write_text("import something_of_another_release\n")
    (folder / "test_functional_api.py").write_text(OF_A_CHECKOUT)
    done = run_suite("--pytorch", str(tmp_path))
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "gloo, distributed/test_functional_api.py: 3 tests, 2 pass, 1 skip" in done.stdout
    assert "interlace, distributed/test_functional_api.py: 3 tests, 1 pass" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == ["FAILED, and gloo passes it: Ranks.test_that_only_gloo_passes"]
    assert "something_of_another_release" in done.stdout, done.stdout
