"""torch's own tests in this process: ``DistributedTest`` of ``torch.testing._internal``, or a file's.

    python torch_suite.py gloo|interlace WORLD_SIZE|FILE RESULTS [PATTERN ...]

Writes one line of JSON per test to RESULTS: name, verdict ("pass", "skip", "fail"), message. It reads
backend and world size at import, so each combination runs in a new process. Each test forks its ranks from
that process after all imports.
"""

import json
import multiprocessing
import os
import re
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

MESSAGE_LENGTH = 4000
CPU_FOR_GPUS = (  # in the text of a file
    (r"\bcpu:gloo,cuda:nccl\b|\bnccl\b", "gloo"),
    (r"\bBackend\.NCCL\b", "Backend.GLOO"),
    (r"\.cuda\((\(\)|[^()])*\)|\.to\((self\.)?rank\)", ".cpu()"),
    (r"\bdevice(_id)?=(self\.)?rank\b", r'device\1=torch.device("cpu")'),
    (r"\bdevice_ids=\[[^]]*\]", "device_ids=None"),
    (r"(?<!backends\.)\bcuda\b(:(\d|\{.+?\}))?", "cpu"),
)
# Tests look for profiler events of the C++ Work class, whose name no Python Work can set.
LISTS_OF_PROFILED_BACKENDS = (
    "PROFILING_SUPPORTED_BACKENDS",
    "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
    "CUDA_PROFILING_SUPPORTED_BACKENDS",
)
GUARDS = (  # decorators of tests that ask for GPUs
    "skip_if_lt_x_gpu",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_nccl",
)


def name_of(test: unittest.TestCase) -> str:
    """Return a test's name without its module, and in the suite also without its class."""
    return re.sub(r"^.*\bSuite\.|^\w+\.", "", test.id())


class Recorder(unittest.TestResult):
    """Writes a line for every test as it ends."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def stopTest(self, test: unittest.TestCase) -> None:
        """Write a failed subtest as a failure of its test."""
        super().stopTest(test)
        unexpected = [(each, "was expected to fail") for each in self.unexpectedSuccesses]
        wrong = [*self.failures, *self.errors, *unexpected]
        failed = [text for each, text in wrong if test in (each, getattr(each, "test_case", None))]
        skipped = [reason for each, reason in self.skipped if each is test]
        verdict = "fail" if failed else "skip" if skipped else "pass"
        message = "\n".join(failed or skipped)[-MESSAGE_LENGTH:]
        record = {"test": name_of(test), "verdict": verdict, "message": message}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def impersonate() -> None:
    """Let torch make interlace's process group for "gloo".

    Many of torch's tests run for the names "gloo", "nccl" and "mpi" only. A real gloo group answers other
    requests of torch's C++ code (the logger of DDP needs its network device).
    """
    import torch.distributed as dist

    from interlace import CollectiveTimeoutError
    from interlace.process_group.group import InterlaceProcessGroup

    class InterlaceAsGloo(InterlaceProcessGroup):
        create_device = dist.ProcessGroupGloo.create_device
        _backend_kind = dist.ProcessGroup.BackendType.GLOO

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(store, rank, size, timeout, name="as gloo")
            self.options = types.SimpleNamespace(
                global_ranks_in_group=[], group_name="", _timeout=timeout, backend="gloo"
            )
            self._make_dispatchable()

        def getBackendName(self) -> str:
            return "gloo"

        def _run(self, *args: Any, **options: Any) -> Any:
            """Add gloo's word to errors of timeouts, which tests look for."""
            try:
                return super()._run(*args, **options)
            except CollectiveTimeoutError as error:
                error.args = (f"a timeout : {error.args[0]}", *error.args[1:])
                raise

    dist.distributed_c10d.ProcessGroupGloo = InterlaceAsGloo


def fork_ranks(test: Any) -> None:
    if test.world_size == 0:  # it would pass
        test.skipTest("it has a rank for each GPU")
    test._start_processes(multiprocessing.get_context("fork").Process)


def load(backend: str, what: str) -> unittest.TestSuite:
    """Load torch's tests, with ranks that are forked."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=what if what.isdigit() else "4")
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())

    import torch

    torch.set_num_threads(1)
    torch.distributed.is_available() or sys.exit("this torch has no torch.distributed")
    if backend == "interlace":
        impersonate()
    if not what.isdigit():
        return of_file(Path(what))
    import torch.testing._internal.distributed.distributed_test as suite

    for name in LISTS_OF_PROFILED_BACKENDS if backend == "interlace" else ():
        setattr(suite, name, [each for each in getattr(suite, name) if each != "gloo"])

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            fork_ranks(self)

    return unittest.defaultTestLoader.loadTestsFromTestCase(Suite)


def without_gpus() -> None:
    """Run tests that are skipped without GPUs on the CPU; tests that name another device fail."""
    import torch
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp
    from torch.testing._internal import common_cuda, common_distributed, common_fsdp
    from torch.testing._internal.distributed._shard import sharded_tensor

    def init_device_handle(*args: Any) -> Any:
        """Give FSDP1 the CPU, which it accepts only explicitly."""
        return init_device_of_fsdp(*args[:-1], args[-1] or torch.device("cpu"))

    init_device_of_fsdp, fsdp._init_device_handle = fsdp._init_device_handle, init_device_handle
    for name in GUARDS:
        setattr(common_distributed, name, lambda *_, **__: lambda test: test)
    common_distributed.skip_if_no_gpu = lambda test: test
    common_cuda.TEST_MULTIGPU = True
    sharded_tensor.with_comms.__defaults__ = (None, True, "gloo")
    common_fsdp.DEVICE_COUNT = 2
    torch.accelerator.device_count = torch.cpu.device_count = lambda: 4
    torch.cpu.current_device = lambda: torch.device("cpu")
    torch.cpu.manual_seed = torch.manual_seed


def of_file(file: Path) -> unittest.TestSuite:
    """Load the tests of a file of PyTorch's repository without new processes and GPUs."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    MultiProcessTestCase._spawn_processes = fork_ranks
    without_gpus()
    multiprocessing.set_start_method("fork")
    sys.path.insert(0, str(file.parent))
    text = file.read_text()
    for gpu, cpu in CPU_FOR_GPUS:
        text = re.sub(gpu, cpu, text)
    module = sys.modules[file.stem] = types.ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(text, file, "exec"), vars(module))
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def flat(tests: Any) -> Iterator[unittest.TestCase]:
    for each in tests:
        yield from flat(each) if isinstance(each, unittest.TestSuite) else [each]


def main(backend: str, what: str, results: str, patterns: list[str]) -> None:
    tests = list(flat(load(backend, what)))
    if patterns:
        tests = [test for test in tests if any(re.search(each, name_of(test)) for each in patterns)]
    with open(results, "w") as file:
        unittest.TestSuite(tests).run(Recorder(file))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
