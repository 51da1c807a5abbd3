"""Compile the kernels of ``gpu_call.sh`` before the GPU is there: ``make gpu-cache``.

Every case of the steps, and each op of the tests, is run on rank 0 with a driver that does nothing
(``stub_libcuda.py``), through the JIT and the launcher of the installed Triton. That must be the release on
the machine with the GPU, with the same Python. The files in Triton's cache are packed; ``gpu_call.sh``
unpacks them. Groups of files in the cache name each other by absolute paths. So unpack it at the same path:
in ``CACHE``, or in TRITON_CACHE_DIR. Left out: facts, which is CUDA C.

One line per kernel that was compiled, none for what the cache has already. Exit code 1 if a case has not
launched a kernel that it should run. ``--dry-run`` finds out only that, and compiles nothing.
"""

import argparse
import contextlib
import functools
import itertools
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("TRITON_CACHE_DIR") or "/tmp/interlace-triton")


class CacheJob(NamedTuple):
    """One call to make on rank 0 of ``world_size``; ``kernels`` are those that it should launch."""

    title: str
    world_size: int
    kernels: frozenset[str]
    call: Callable[[], object]


class Listener:
    """A listener for every kernel that Triton loads; it counts the compiled ones."""

    compiled = 0

    def __call__(self, *, metadata: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self.compiled += 1
            shared = metadata["shared"]
            print(f"compiled {metadata['name']}, {shared} B of shared memory", flush=True)


def checks() -> Iterator[CacheJob]:
    from interlace.cli.commands.check import RowsCase, cases

    def called(case: Any) -> None:
        with case.circumstances():
            if isinstance(case, RowsCase):  # without the reference, which takes long
                op = case.subject()
                op.ours(case.algorithm)(*op.inputs(0))
            else:
                case.on_rank(0)

    for case in cases("cuda"):
        if not case.by_switch:
            kernels = frozenset(case.kernels)
            yield CacheJob(case.title, case.world_size, kernels, functools.partial(called, case))


def matmuls() -> Iterator[CacheJob]:
    import torch
    from gpu_parts import shapes, timing

    def launched(m: int, n: int, k: int, values: dict[str, Any] | None) -> None:
        lone = shapes.lone_rank(shapes.WORLD_SIZE, m, n, k, torch.bfloat16, values)
        weight = torch.empty(n, k, dtype=torch.bfloat16).t()
        output = torch.empty(m, n, dtype=torch.bfloat16)
        for waits in (True, False):
            timing.launch_now(lone.consumer(weight, output, waits=waits), None)

    wanted = frozenset({"all_gather_matmul_kernel"})
    for name, *size in shapes.every_size():
        title = f"matmul, {name}, {size}"
        yield CacheJob(title, 1, wanted, functools.partial(launched, *size, None))
    for name, (what, values) in itertools.product(shapes.VARIED, shapes.VARIANTS.items()):
        kernels = (
            frozenset({"all_gather_matmul_roles_kernel"}) if values.get("warp_roles") else wanted
        )
        size = [shapes.VARIED_ROWS, *shapes.LAYERS[name]]
        title = f"variants, {name}, {what}"
        yield CacheJob(title, 1, kernels, functools.partial(launched, *size, values))


def slow_links() -> Iterator[CacheJob]:
    import torch
    from gpu_parts import timing
    from gpu_parts.lone_rank import LoneRank
    from gpu_parts.overlap import COPIERS, SLOW_SHAPES, SLOW_WORLDS

    def launched(world_size: int, m: int, n: int, k: int) -> None:
        lone = LoneRank(world_size, m, n, k, torch.bfloat16)
        host = torch.empty(m, k, dtype=torch.bfloat16)
        weight = torch.empty(n, k, dtype=torch.bfloat16).t()
        output = torch.empty(m, n, dtype=torch.bfloat16)
        flags = [flag for _, _, flag in lone.copy_engine(host)]
        products = [lone.consumer(weight, output, copiers=each) for each in (0, COPIERS)]
        bare = lone.consumer(weight, output, waits=False)
        for launch in (*flags, *products, bare, lone.copiers(host, COPIERS), lone.finish()):
            timing.launch_now(launch, None)

    kernels = "publish_kernel", "all_gather_kernel", "all_gather_matmul_kernel", "finish_kernel"
    for world_size, size in itertools.product(SLOW_WORLDS, SLOW_SHAPES):
        call = functools.partial(launched, world_size, *size)
        yield CacheJob(f"slow-link, W={world_size}, {size}", 1, frozenset(kernels), call)


def small() -> Iterator[CacheJob]:
    import torch
    from gpu_parts import shapes

    import interlace

    def called(world_size: int, m: int, n: int, k: int) -> None:
        shard = torch.empty(m // world_size, k, dtype=torch.bfloat16)
        weight = torch.empty(n, k, dtype=torch.bfloat16).t()
        with mock.patch.object(torch, "mm", lambda *operands, **how: None):
            for algorithm in ("auto", "unfused"):
                interlace.all_gather_matmul(shard, weight, algorithm=algorithm)

    for size in shapes.every_small_size():
        yield CacheJob(f"small, {size}", size[0], frozenset(), functools.partial(called, *size))


def others() -> Iterator[CacheJob]:
    import gpu_probe
    import host_cost
    import torch
    from gpu_parts import host, timing

    def host_costs() -> None:
        for call in host_cost.candidates(torch.device("cpu")).values():
            call()

    def probe() -> None:
        timing.launch_now(gpu_probe.poll("cpu")[1], None)

    def sanitizer() -> None:
        host.products(torch.device("cpu"))

    gather, scatter = "all_gather_matmul_kernel", "matmul_reduce_scatter_kernel"
    yield CacheJob("host-cost", 1, frozenset((gather, scatter)), host_costs)
    yield CacheJob("probe", 1, frozenset(("wait_kernel",)), probe)
    yield CacheJob("sanitizer", 2, frozenset((gather, scatter)), sanitizer)


def ops() -> Iterator[CacheJob]:
    from gpu_parts.host import requests

    from interlace.benchmark.requests import DTYPES, OPS
    from interlace.groups.groups import default_group

    def called(request: Any) -> None:
        kind: Any = OPS[request.target]
        sizes = [getattr(request, size) for size in kind.sizes]
        op = kind(default_group().place, DTYPES[request.dtype], *sizes)
        for algorithm in request.algorithms:
            op.ours(algorithm)(*op.inputs(0))

    for request in requests(False, 1):
        title = f"ops, {request.target}"
        yield CacheJob(title, 1, frozenset(), functools.partial(called, request))


def tests() -> Iterator[CacheJob]:
    """Ops and warps with roles of tests/gpu, with float32 and on two ranks."""
    from cases import device_ranks as ranks, linear_cases

    x, weight = ranks.input_of(0, 0), ranks.weight()
    for name, op in ranks.OPS.items():
        call = functools.partial(op, x, weight)
        yield CacheJob(f"tests, {name}", 2, frozenset(), call)
    for warp_roles, transposed in itertools.product((False, True), repeat=2):
        by_roles = functools.partial(linear_cases.products, warp_roles, transposed, {})
        kernels = ("matmul_reduce_scatter_roles_kernel",) if warp_roles else ()
        yield CacheJob(f"tests, roles {warp_roles} {transposed}", 2, frozenset(kernels), by_roles)


STEPS = checks, matmuls, slow_links, ops, tests, small, others


@contextlib.contextmanager
def stubbed(world_size: int, *, dry_run: bool) -> Iterator[None]:
    """Rank 0 of so many, whose GPU does nothing."""
    import host_cost
    import torch
    from gpu_parts import timing

    from interlace.runtime.places.gpu.plans import Plans

    class Event(host_cost._Event):
        def elapsed_time(self, end: object) -> float:
            return 1.0

    with contextlib.ExitStack() as stack:
        stack.enter_context(host_cost.stubbed(world_size, peers=False, launcher=not dry_run))
        if dry_run:
            stack.enter_context(mock.patch.object(timing, "launch_now", lambda *launch: None))
        for name, value in (
            ("Event", Event),
            ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
            ("synchronize", lambda device=None: None),
            ("is_available", lambda: True),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # a plan of an earlier job would launch what that one did
        stack.enter_context(mock.patch.object(Plans, "again", lambda *call, **how: None))
        wait = mock.patch.object(
            torch.cuda.Stream, "wait_stream", lambda *streams: None, create=True
        )
        stack.enter_context(wait)
        yield


def run(jobs: list[CacheJob], *, dry_run: bool) -> int:
    """Run them, and return how many have not launched what they should."""
    from interlace.runtime.core.launch import KernelLaunch

    launched: set[str] = set()
    stock, wrong = KernelLaunch.__init__, 0

    def init(launch: Any, kernel: Any, *rest: Any, **more: Any) -> None:
        stock(launch, kernel, *rest, **more)
        launched.add(launch.name)

    with mock.patch.object(KernelLaunch, "__init__", init):
        for world_size, group in itertools.groupby(jobs, key=attrgetter("world_size")):
            with stubbed(world_size, dry_run=dry_run):
                for title, _, kernels, call in group:
                    launched.clear()
                    problem = ""
                    try:
                        call()
                    except Exception as error:  # results are nonsense here, which some host sees
                        problem = f": {type(error).__name__}: {str(error)[:200]}"
                    if missing := kernels - launched:
                        wrong += 1
                        print(f"!! {title} has not launched {', '.join(sorted(missing))}{problem}")
    return wrong


def pack(cache: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz") as archive:
        for entry in sorted(cache.iterdir()):
            archive.add(entry, entry.name)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, to be unpacked in {cache}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-cache.tgz")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title has it")
    parser.add_argument("--dry-run", action="store_true", help="compile nothing, and pack nothing")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
    import stub_libcuda

    os.environ |= {"TRITON_INTERPRET": "0", "INTERLACE_TUNE_CACHE": "off"}
    with tempfile.TemporaryDirectory() as folder:
        if not options.dry_run:
            stub_libcuda.install(Path(folder))
            CACHE.mkdir(parents=True, exist_ok=True)
            os.environ["TRITON_CACHE_DIR"] = str(CACHE)
        import triton

        listener = triton.knobs.compilation.listener = Listener()
        begin = time.perf_counter()
        every = [job for jobs in STEPS for job in jobs()]
        chosen = [job for job in every if options.only in job.title]
        if not chosen:
            raise SystemExit(f"--only {options.only}: no case has it in its title")
        wrong = run(sorted(chosen, key=attrgetter("world_size")), dry_run=options.dry_run)
    count, took = listener.compiled, time.perf_counter() - begin
    print(
        f"{len(chosen)} cases, {count} kernels compiled, triton {triton.__version__}, {took:.0f} s"
    )
    if not options.dry_run:
        pack(CACHE, options.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
