"""The host's cost of a call on a GPU, once calls like it were made: ``python benchmarks/host_cost.py``.

Without a GPU a stub replaces the driver: streams, events and copies that do nothing, and a
``libcuda.so.1`` that answers Triton's own launcher (``stub_libcuda.py``). Without gcc, or with
``--no-launcher``, launches do nothing either. Kernels are compiled for sm_90. So the time covers the Python
and C++ of torch, interlace and Triton up to the driver, without CUDA and without waiting for a host.

Agreement is real. Rank 0 of RANKS writes its calls to memory that it shares with a second process. That
process plays all other ranks and writes the same as soon as it sees it. ``agreement`` is the time that this
adds to the call without it (other ranks that are not asked).

``--gpu`` runs on a GPU, with processes as ranks, which share it if there are more of them than GPUs. The
device is idle at the start of every block, and a block is so short that no queue fills up.

Protocol: blocks of CALLS calls, candidates alternate block by block; medians over blocks. ``launches`` and
``events`` are what one call asks of the driver.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from circumstances import circumstances, in_turn, new_result

CALLS = 50
BUDGET_US = 30.0

driver: Counter[str] = Counter()


def launched() -> int:
    return 0


# -- the stub ------------------------------------------------------------------------------------


class _Stream:
    handles = itertools.count(1)
    device = 0

    def __init__(self, handle: Any = None, **options: Any) -> None:
        self.cuda_stream = handle if isinstance(handle, int) else next(self.handles)

    def wait_event(self, event: Any) -> None:
        driver["waits"] += 1

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        driver["events"] += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Kernel:
    metadata = SimpleNamespace(global_scratch_size=0, num_ctas=1)
    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        driver["launches"] += 1


class _Words:
    def write(self, stream: int, address: int, value: int) -> None:
        driver["words"] += 1
        ctypes.c_int64.from_address(address).value = value


class _Host:
    """A host's place whose peers repeat this rank's calls: at once, or in a separate process."""

    name, linger, joining = "shm", 0.0, 0.0
    rank = 0

    def __init__(self, world_size: int, *, peers: bool) -> None:
        self.world_size, self.direct_access = world_size, peers
        self.group = self  # the group of processes, which waits
        self.names = range(world_size)
        self._child = 0

    def allocate(self, nbytes: int) -> Any:
        from interlace.runtime.core.memory import SymmetricBuffer

        whole = torch.frombuffer(mmap.mmap(-1, nbytes * self.world_size), dtype=torch.uint8)
        parts = list(whole.chunk(self.world_size))
        self._child = os.fork()
        if not self._child:
            with contextlib.suppress(BaseException):
                _play_peers(parts, self.world_size)
            os._exit(0)
        return SymmetricBuffer(0, nbytes, torch.tensor([p.data_ptr() for p in parts]), parts)

    def end(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return [payload] * self.world_size

    exchanged, control = exchange, None

    def known_as(self, ranks: Any) -> None: ...

    def wait_until(self, predicate: Callable[[], bool], doing: str, waited_for: Any) -> None:
        while not predicate():
            pass

    def check(self) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def trouble(self, doing: str) -> None: ...


def _play_peers(parts: list[torch.Tensor], world_size: int) -> None:
    """Note every call that rank 0 notes, as ranks 1, 2, ...; see ``cuda_processes/agreement.py``."""
    from interlace.runtime.places.gpu import agreement

    # memory views, for torch's threads do not live in a forked process
    boards = [part.numpy().data.cast("B").cast("q") for part in parts]
    shared, number = boards[0], 0
    texts = slice(agreement._TEXTS, agreement._ROWS)
    while True:
        number += 1
        at = agreement._ROWS + number % agreement.NOTES * agreement._FIELDS * world_size
        while shared[at] < number:
            pass
        digest, area = shared[at + world_size], shared[at + 2 * world_size]
        for rank in range(1, world_size):
            if area:
                boards[rank][texts] = shared[texts]
            shared[at + world_size + rank], shared[at + 2 * world_size + rank] = digest, area
            shared[at + rank] = number
            boards[rank][agreement._CHECKED] = number


@contextlib.contextmanager
def stubbed(world_size: int = 2, *, peers: bool = True, launcher: bool = False) -> Iterator[None]:
    """A process that is rank 0 of ``world_size``, with the stub in place of the driver.

    ``launcher``: launches go through Triton's, as far as ``stub_libcuda.py``, which is installed.
    """
    import triton

    from interlace.groups import groups
    from interlace.runtime.core.launch import KernelLaunch
    from interlace.runtime.core.memory import SymmetricBuffer
    from interlace.runtime.places.gpu import driver as cuda_driver, stream as cuda_stream
    from interlace.runtime.places.gpu.process_place import CudaPlace, Watchdog

    def allocate(self: CudaPlace, nbytes: int) -> SymmetricBuffer:
        parts = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.world_size)]
        table = torch.tensor([part.data_ptr() for part in parts])
        return SymmetricBuffer(self.rank, nbytes, table, parts)

    current, words = _Stream(), _Words()
    properties = SimpleNamespace(multi_processor_count=132, uuid="stub")
    patches: list[Any] = [
        mock.patch.object(torch.cuda, "Stream", _Stream),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.object(torch.cuda, "ExternalStream", _Stream),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: current),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(cuda_driver, "current_stream", lambda device: current.cuda_stream),
        mock.patch.object(cuda_driver, "capture_of", lambda stream: 0),
        mock.patch.object(cuda_driver, "stream_words", lambda device: words),
        mock.patch.object(cuda_driver, "alarm_stream", lambda device: current),
        mock.patch.object(cuda_driver, "pinned_tensor", lambda words: torch.tensor(words)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(Watchdog, "look_after", lambda watchdog: None),
        mock.patch.object(CudaPlace, "_allocate", allocate),
    ]
    with contextlib.ExitStack() as stack:
        # The value is also written to TRITON_INTERPRET; the scope restores both, a mock would not.
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = False
        for patch in patches:
            stack.enter_context(patch)
        cuda_stream._external.cache_clear()  # streams of another stub, with the same handles
        stack.callback(cuda_stream._external.cache_clear)  # of this driver
        if launcher:
            import stub_libcuda

            stub_libcuda.activate()
        else:
            stack.enter_context(
                mock.patch.object(KernelLaunch, "compiled", lambda launch: _Kernel())
            )
        host = _Host(world_size, peers=peers)
        stack.callback(host.end)
        place = CudaPlace(host, torch.device("cpu"), timeout=300.0)
        before = groups._default.get()
        stack.callback(groups._default.set, before)
        groups.install(place)
        yield


# -- the candidates ------------------------------------------------------------------------------


def candidates(device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls, by name. Shapes are of one token step: the host has the least time there."""
    import interlace

    x = torch.zeros(128, 512, dtype=torch.bfloat16, device=device)
    w = torch.zeros(512, 1024, dtype=torch.bfloat16, device=device)
    flat = torch.zeros(4096, device=device)
    out = torch.zeros(interlace.get_world_size() * 4096, device=device)
    fused: dict[str, Any] = {"algorithm": "fused"}
    # asynchronous ones have a Work; to assert it would be measured too
    return {
        "all_gather_matmul": lambda: interlace.all_gather_matmul(x, w, **fused),
        "matmul_reduce_scatter": lambda: interlace.matmul_reduce_scatter(x, w, **fused),
        "matmul_all_reduce": lambda: interlace.matmul_all_reduce(x, w, **fused),
        "all_gather_matmul, asynchronous": lambda: interlace.all_gather_matmul(
            x, w, async_op=True, **fused
        ).wait(),
        "all_reduce": lambda: interlace.all_reduce(flat),
        "all_reduce, asynchronous": lambda: interlace.all_reduce(flat, async_op=True).wait(),
        "all_gather": lambda: interlace.all_gather(out, flat),
        "all_gather, asynchronous": lambda: interlace.all_gather(out, flat, async_op=True).wait(),
        "reduce_scatter": lambda: interlace.reduce_scatter(flat, out),
        "broadcast": lambda: interlace.broadcast(flat, 0),
    }


def _block(call: Callable[[], object], finish: Callable[[], None]) -> float:
    finish()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measured(device: torch.device, repetitions: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, and what a call asks of the driver."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = candidates(device)
    asked: dict[str, Counter[str]] = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        driver.clear()
        before = launched()
        call()
        asked[name] = Counter(driver)
        if launched() > before:
            asked[name]["launches"] = launched() - before
    times = in_turn(calls, repetitions, 0, lambda name: _block(calls[name], finish))
    return {
        name: {"us": median(values), "least_us": min(values), **asked[name]}
        for name, values in times.items()
    }


def on_rank(repetitions: int) -> dict[str, dict[str, float]]:
    import interlace

    return measured(interlace.device(), repetitions)


def without_gpu(ranks: int, repetitions: int, *, launcher: bool) -> dict[str, dict[str, float]]:
    """With the stub; ``agreement_us`` is what agreement with the peers adds."""
    cpu = torch.device("cpu")
    with stubbed(ranks, peers=False, launcher=launcher):
        alone = measured(cpu, repetitions)
    with stubbed(ranks, launcher=launcher):
        table = measured(cpu, repetitions)
    for name, row in table.items():
        row["agreement_us"] = row["us"] - alone[name]["us"]
    return table


def main() -> None:
    global launched
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpu", action="store_true", help="on a GPU, not with the stub")
    parser.add_argument("--ranks", type=int, default=2, help="processes, or those that are played")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--no-launcher", action="store_true", help="stub: leave Triton's out")
    parser.add_argument("--json", action="store_true", help="write the result to results/")
    options = parser.parse_args()
    kind = "stub driver"
    if options.gpu:
        import interlace

        table = interlace.run(
            on_rank, options.ranks, options.repetitions, place="cuda", processes=True
        )[0]
        kind = torch.cuda.get_device_name()
    else:
        launcher = not options.no_launcher and shutil.which("gcc") is not None
        kind += ", with Triton's launcher" if launcher else ", without Triton's launcher"
        with tempfile.TemporaryDirectory() as folder:
            if launcher:
                import stub_libcuda

                count = ctypes.c_long.in_dll(stub_libcuda.install(Path(folder)), "stub_launches")

                def launched() -> int:
                    return int(count.value)

            table = without_gpu(options.ranks, options.repetitions, launcher=launcher)
    print(f"{kind}, {options.ranks} ranks")
    for name, row in table.items():
        asked = ", ".join(f"{value:g} {key}" for key, value in row.items() if "us" not in key)
        added = f"agreement {row['agreement_us']:4.1f}, " if "agreement_us" in row else ""
        mark = "" if row["us"] <= BUDGET_US else f"   over {BUDGET_US:g}"
        least = f"least {row['least_us']:.1f}, "
        print(f"{name:34} {row['us']:7.1f} us  ({least}{added}{asked}){mark}")
    if options.json:
        record = {
            **circumstances(),
            "device": kind,
            "ranks": options.ranks,
            "protocol": __doc__,
            "host_us": table,
        }
        path = new_result("host-cost", record)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
