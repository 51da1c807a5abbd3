"""Facts that decide designs, in some 5 seconds on a GPU: ``python benchmarks/gpu_facts.py``.

=========================  =========================================================================
spinning kernels           on how many SMs they are, and whether a CTA with as much shared memory as a
                           matmul's begins beside them
copies on one GPU          whether they go on while all SMs are full, all but one, all but four
a word of a stream         whether ``cuStreamWriteValue64`` passes while all SMs are full
streams at once            how many kernels of one warp, each in a stream of its own, run together
=========================  =========================================================================

docs/how-to/gpu/first-run.md says what each answer changes. One line per question, JSON at the end; nothing
waits for more than ``LIMIT_NS``. Kernels are CUDA C through CuPy, so a fault of interlace or of Triton
cannot be in the way. ``--dry-run`` names the questions and asks none.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from circumstances import ask

CODE = r"""
__device__ long long now() { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ int sm() { unsigned n; asm volatile("mov.u32 %0, %%smid;" : "=r"(n)); return n; }

extern "C" __global__ void fat(int *sms, long long *begun, long long limit) {
    extern __shared__ char stages[];
    if (threadIdx.x == 0) {
        long long first = now();
        stages[0] = 1; sms[blockIdx.x] = sm(); begun[blockIdx.x] = first;
        while (now() - first < limit);
    }
    __syncthreads();
}
extern "C" __global__ void spin(int *sms, long long *begun, long long limit) {
    __shared__ volatile long long word;       /* as much as a kernel that waits for a signal has */
    if (threadIdx.x == 0) {
        long long first = now();
        word = first; *sms = sm(); *begun = first;
        while (now() - first < limit);
    }
}
"""
SHARED = 213_344  # bytes of the largest tile that ships: for warps with roles
LIMIT_NS = 300_000_000
LATE_NS = 5_000_000
COPIED = 64 << 20  # bytes
STREAMS = 24
PATIENCE = 0.25  # seconds, less than LIMIT_NS


class Facts:
    """Kernels that occupy SMs, and what is asked meanwhile. ``cupy``: the module."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        module = cupy.RawModule(code=CODE)
        self.fat, self.spin = module.get_function("fat"), module.get_function("spin")
        self.fat.max_dynamic_shared_size_bytes = SHARED
        self.count = torch.cuda.get_device_properties(0).multi_processor_count
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.high = torch.cuda.Stream(priority=-1)
        self.sms = torch.zeros(2, 256, dtype=torch.int32, device="cuda")
        self.begun = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
        self.copied = torch.zeros(2, COPIED, dtype=torch.uint8, device="cuda")
        self.word = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.copied[0].copy_(self.copied[1])  # the first use waits for the whole context
        self.fill(1, 1)
        self.wait_by_spinning(0, 1)
        torch.cuda.synchronize()

    def launch(self, stream: Any, kernel: Any, grid: int, row: int, first: int, limit: int) -> None:
        """``row`` of the results, from ``first`` on; the fat kernel has threads and shared memory."""
        results = (each[row, first:].data_ptr() for each in (self.sms, self.begun))
        arguments = *map(self.cupy.uint64, results), self.cupy.int64(limit)
        threads, shared = (1024, SHARED) if kernel is self.fat else (32, 0)
        with self.cupy.cuda.ExternalStream(stream.cuda_stream):
            kernel((grid,), (threads,), arguments, shared_mem=shared)

    def fill(self, ctas: int, limit: int = LIMIT_NS) -> None:
        self.launch(self.streams[-1], self.fat, ctas, 0, 0, limit)

    def wait_by_spinning(self, number: int, limit: int = LIMIT_NS) -> None:
        self.launch(self.streams[number], self.spin, 1, 1, number, limit)

    def beside(self, enqueue: Callable[[], object], ctas: int) -> float | None:
        """Seconds until what is enqueued is done beside so many CTAs; None if it waits for them."""
        torch.cuda.synchronize()
        self.fill(ctas)
        time.sleep(0.02)  # nobody says that all CTAs have begun
        event, begin = torch.cuda.Event(), time.perf_counter()
        with torch.cuda.stream(self.high):
            enqueue()
            event.record()
        while not event.query():
            if time.perf_counter() - begin > PATIENCE:
                torch.cuda.synchronize()
                return None
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return took

    def spinning(self, kernels: int) -> dict[str, int] | str:
        """So many kernels of one warp, then a CTA for every SM: how many of these begin late.

        A kernel that is held back as a whole has no late CTAs: its first one is compared with the spinners.
        """
        torch.cuda.synchronize()
        for number in range(kernels):
            self.wait_by_spinning(number)
        time.sleep(0.02)
        self.fill(self.count, LIMIT_NS // 8)
        torch.cuda.synchronize()
        begun, spinning = self.begun[0, : self.count], self.begun[1, :kernels]
        first = int(begun.min())
        waited = first - int(spinning.min())
        beside = int(((spinning <= first) & (first - spinning < LIMIT_NS)).sum())
        if beside < kernels or waited > LIMIT_NS // 2:  # it is launched 20 ms after them
            return f"the kernel waited {waited / 1e6:.0f} ms; {beside} were spinning when it began"
        late = int((begun - first > LATE_NS).sum())
        return {"their SMs": len({*self.sms[1, :kernels].tolist()}), "CTAs that begin late": late}

    def copy(self, free: int) -> str:
        took = self.beside(
            lambda: self.copied[0].copy_(self.copied[1], non_blocking=True), self.count - free
        )
        if took is None:
            return "waits for the kernel: it needs SMs"
        return f"goes on: {took * 1e3:.2f} ms, {COPIED / took / 1e9:.0f} GB/s"

    def stream_word(self) -> str:
        from interlace.runtime.places.gpu import driver

        words, handle = driver.stream_words(0), self.high.cuda_stream
        if words is None:
            return "the driver has none"
        took = self.beside(lambda: words.write(handle, self.word.data_ptr(), 7), self.count)
        return f"{'waits' if took is None else 'passes'}, and is {int(self.word)} in the end (7)"

    def at_once(self) -> dict[str, int]:
        """How many of the kernels had begun before the first one ended."""
        torch.cuda.synchronize()
        for number in range(STREAMS):
            self.wait_by_spinning(number, LIMIT_NS // 4)
        torch.cuda.synchronize()
        begun = self.begun[1, :STREAMS]
        together = int((begun - begun.min() < LIMIT_NS // 4).sum())
        return {"streams": STREAMS, "together": together}


QUESTIONS: dict[str, Callable[[Facts], object]] = {
    **{
        f"{count} spinning kernels of one warp": lambda facts, count=count: facts.spinning(count)
        for count in (1, 2, 4, 8)
    },
    **{
        f"a copy on this GPU while {what}": lambda facts, free=free: facts.copy(free)
        for what, free in (("all SMs are full", 0), ("all but one are", 1), ("all but four are", 4))
    },
    "a word of a stream while all SMs are full": Facts.stream_word,
    "kernels of one warp at once": Facts.at_once,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="name the questions, ask none")
    if parser.parse_args(arguments).dry_run:
        print("\n".join(QUESTIONS))
        return 0
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch sees none; --dry-run names the questions")
        return 2
    import cupy

    facts = Facts(cupy)
    ask({name: partial(answer, facts) for name, answer in QUESTIONS.items()}, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
