"""Surroundings of every test: where kernels run, one thread, and which tests this machine can do."""

import gc
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import order
import tiers

try:
    import hypothesis
    from hypothesis.internal.conjecture import providers
except ImportError:  # tests/gpu does without
    hypothesis = None  # type: ignore[assignment]

pytest_plugins = ("guard",)

# Asked of NVML: the driver itself, once asked, would not work in the processes that tests/gpu forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA and "TRITON_INTERPRET" not in os.environ:
    # Triton reads this when it is imported and when @triton.jit runs: later is silently ignored.
    if "triton" in sys.modules:
        raise RuntimeError("a pytest plugin imported triton before tests/conftest.py could choose")
    os.environ["TRITON_INTERPRET"] = "1"

# Inductor would take code for other vectors from its cache of graphs.
if "ATEN_CPU_CAPABILITY" in os.environ:
    capability = os.environ["ATEN_CPU_CAPABILITY"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"/tmp/torchinductor_for_{capability}")

# Tuned values of this machine must not change the tests.
os.environ["INTERLACE_TUNE_CACHE"] = "off"
os.environ["INTERLACE_CALIBRATION"] = "off"
os.environ["INTERLACE_RECORD"] = "off"  # but for tests of it: hundreds provoke failures

# Many ranks share few cores here; torch's own threads would only fight them.
torch.set_num_threads(1)

# The interpreter is slow, so no deadline per example; the same examples on every run, so a red test
# stays red. New examples: pytest --hypothesis-profile=explore
if hypothesis is not None:
    hypothesis.settings.register_profile(
        "interlace", deadline=None, derandomize=True, max_examples=50
    )
    hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
    hypothesis.settings.load_profile("interlace")
    # It would also draw numbers that it finds in the files of imported modules: others for each order of
    # tests, and it reads all of these files.
    providers.is_local_module_file = lambda path: False

gc.disable()  # until all tests are imported: see warmed_up.py

# Modules that a rank's process would import in seconds are imported once and forked, without a
# GPU. A process that is spawned, as it is outside of tests: tests/multi/shm/test_shm_place.py.
PRELOADED = [
    "interlace.runtime.places.pool",
    "interlace.functional",
    "interlace.compile",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.fuse_attention",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
    "warmed_up",
]

GPU_TESTS = pathlib.Path(__file__).parent / "gpu"


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Processes of ranks start in milliseconds."""
    import guard
    from interlace import launcher
    from interlace.runtime.places import pool

    if HAS_CUDA:
        yield
        return
    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "START_METHOD", "forkserver")
        for run in (launcher.run, pool.ProcessPool.run):  # 300 s are short where others are busy
            patch.setitem(run.__kwdefaults__, "timeout", guard.MOST)
        yield


def _groups_there() -> set[str]:
    groups, dist = sys.modules.get("interlace.groups.groups"), torch.distributed
    there = {name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ}
    if groups is not None:
        known = {"_default": groups._default.get()}
        known |= {name: getattr(groups, name) for name in ("_of_run", "_of_process")}
        there |= {name for name, value in known.items() if value is not None}
    if dist.is_available() and dist.is_initialized():
        there.add("torch's default group")
    return there


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """A test that leaves a group behind fails itself, and not one that comes after it."""
    before = _groups_there()
    yield
    left = _groups_there() - before
    assert not left, f"left behind: {', '.join(sorted(left))}"


class Backwards(pytest.Dir):
    """A folder whose files are imported in reverse order."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: pathlib.Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Every other worker begins at the end, so that two do not rewrite the same files."""
    worker = getattr(parent.config, "workerinput", {"workerid": "gw0"})["workerid"]
    backwards = int(worker.removeprefix("gw")) % 2
    return Backwards.from_parent(parent, path=path) if backwards else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``pytest -n auto``."""
    return order.workers(len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Print once the number of tests and a known duration."""
    config = node.config
    if config.stash.setdefault(order.BEGUN, node) is node:
        config.get_terminal_writer().line(f"{len(ids)} tests. {order.MEASURED}")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu, and skip it where there is no GPU; sort for several workers."""
    config.stash[order.FILES] = {item.path for item in items}
    tiers.mark_cases(items)
    on_gpu = {path for path in config.stash[order.FILES] if GPU_TESTS in path.parents}
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none on this machine")
    for item in items:
        if item.path in on_gpu:
            item.add_marker(pytest.mark.gpu)
        if not HAS_CUDA and item.get_closest_marker("gpu"):
            item.add_marker(skip)
    if hasattr(config, "workerinput"):
        order.sort(items, finding=config.getoption("minutes") is not None)


def pytest_collection_finish() -> None:
    """All tests are imported."""
    import warmed_up  # noqa: F401
