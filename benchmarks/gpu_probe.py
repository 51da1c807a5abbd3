"""Probes of the driver while a kernel runs, in 15 seconds on a GPU: ``python benchmarks/gpu_probe.py``.

Which streams share a hardware queue, and what waits for the whole context: first uses of kernels and
libraries, allocations, pageable copies. And how long a poll takes, for waits are bounded in polls. One line
per question, JSON at the end. The stand-in for CUDA (tests/stand_ins/fake_queues.py) assumes the worst of
each. ``--dry-run`` asks nothing.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from circumstances import ask

CYCLES = 1.9e6  # in a millisecond, about
POOL = 32
POLLS = 200_000
SIDE = 2048  # rows and columns of the matrix that is multiplied


def _busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * CYCLES))


class Probe:
    """Streams of torch's pool, each with a cell that a kernel adds to."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.low = [torch.cuda.Stream(priority=0) for _ in range(POOL)]
        self.high = [torch.cuda.Stream(priority=-1) for _ in range(POOL)]
        self.cells = {stream: torch.zeros(32, device="cuda") for stream in self.low + self.high}
        for stream in self.cells:
            self.add(stream)
        torch.cuda.synchronize()

    def add(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            self.cells[stream].add_(1)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def shares(self, one: torch.cuda.Stream, other: torch.cuda.Stream) -> bool:
        """Return whether work after a kernel in ``one`` holds up ``other``."""
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            _busy(12)
        self.add(one)  # at the head of its queue until the kernel has ended
        event, end = self.add(other), time.perf_counter() + 0.006
        while not event.query():
            if time.perf_counter() > end:
                return True
        return False

    def beside(self, function: Callable[[], object], milliseconds: float = 300.0) -> dict[str, Any]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.low[0]):
            _busy(milliseconds)
        start = time.perf_counter()
        with torch.cuda.stream(self.low[1]):
            function()
            host = time.perf_counter() - start
            event = torch.cuda.Event()
            event.record(self.low[1])
        event.synchronize()
        done = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        figures = {"host_ms": host, "done_ms": done, "other_ended_ms": whole}
        return {name: round(seconds * 1e3, 2) for name, seconds in figures.items()} | {
            "waited_for_the_other": done > 0.8 * whole
        }


def poll(device: str) -> tuple[torch.Tensor, Any]:
    """The header of a signal that does not come, and the launch that waits for it."""
    from interlace.kernels import signal
    from interlace.kernels.arguments import Peers
    from interlace.runtime.core.launch import KernelLaunch

    header = torch.zeros(signal.HEADER_WORDS, dtype=torch.int64, device=device)
    table = torch.tensor([header.data_ptr()]).to(device)
    arguments = {"peers": Peers(table, 0, 1), "source": 0, "slot_byte": 8 * signal.CREDIT_WORDS}
    return header, KernelLaunch(signal.wait_kernel, 1, arguments, "a wait", num_warps=1)


def poll_microseconds() -> float:
    """Microseconds per poll of a wait that is given up; ``POLLS_PER_SECOND`` of places/gpu assumes 1."""
    from gpu_parts.timing import launch_now

    from interlace.kernels import signal

    header, launch = poll("cuda")
    times = []
    for _ in range(3):  # the first loads the kernel
        header.zero_()
        header[signal.SPIN_LIMIT_WORD] = POLLS
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        launch_now(launch, None)
        events[1].record()
        torch.cuda.synchronize()
        times.append(float(events[0].elapsed_time(events[1])) * 1e3 / POLLS)
    return round(min(times), 3)


def questions(probe: Probe) -> dict[str, Callable[[], object]]:
    low, high = probe.low, probe.high
    half = torch.ones(4096, device="cuda", dtype=torch.float16)
    short = torch.ones(4096, device="cuda", dtype=torch.int16)
    matrix = torch.ones(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def in_a_new_thread() -> None:
        thread = threading.Thread(target=lambda: torch.mm(matrix, matrix))
        thread.start()
        thread.join()

    def first_replay() -> dict[str, Any]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            probe.cells[low[1]].add_(1)
        return probe.beside(graph.replay)

    def one_gib() -> None:
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1 << 30))

    uses: dict[str, Callable[[], object]] = {
        "a kernel that is known": lambda: probe.cells[low[1]].add_(1),
        "the first use of a kernel of torch's": lambda: torch.atan2(half, half),
        "the first use of another": lambda: torch.fmod(short, short),
        "the first matmul, with its handle and workspace": lambda: matrix @ matrix,
        "a matmul of another shape": lambda: matrix[:96] @ matrix,
        "a matmul in a new thread": in_a_new_thread,
        "cudaMalloc of 1 GiB": one_gib,
        "pinned memory of 64 MiB": lambda: torch.empty(
            64 << 20, dtype=torch.uint8, pin_memory=True
        ),
        "a copy from pageable memory": lambda: torch.ones(1 << 20).to("cuda"),
    }
    return {
        "streams of the pool": lambda: [len({s.cuda_stream for s in each}) for each in (low, high)],
        "the 33rd stream is the first again": lambda: (
            torch.cuda.Stream(priority=0).cuda_stream in {s.cuda_stream for s in low}
        ),
        "low stream 0 shares its queue with low": lambda: [
            j for j in range(1, POOL) if probe.shares(low[0], low[j])
        ],
        "low stream 0 shares its queue with high": lambda: [
            j for j in range(POOL) if probe.shares(low[0], high[j])
        ],
        "high stream 0 shares its queue with high": lambda: [
            j for j in range(1, POOL) if probe.shares(high[0], high[j])
        ],
        **{
            f"beside a kernel: {name}": lambda use=use: probe.beside(use)  # type: ignore[misc]
            for name, use in uses.items()
        },
        "beside a kernel: the first replay of a graph": first_replay,
        "microseconds of a poll": poll_microseconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="ask nothing")
    if parser.parse_args().dry_run:
        print("a dry run: nothing is asked")
        return 0
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch sees none; --dry-run asks nothing")
        return 2
    variables = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
    ask(questions(Probe()), {name: os.environ.get(name, "") for name in variables})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
