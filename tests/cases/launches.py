"""Every launch site of the repository, run with a ``libcuda`` that does nothing.

Run it as ``python launches.py FOLDER [PART]`` (``benchmarks/stub_libcuda.py``). A site is a call that
launches a kernel, describes a launch, or asks the driver; :func:`sites` finds them in a text. The output is
JSON: the launches and errors of every part, and the executed sites.
"""

import ast
import builtins
import contextlib
import ctypes
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "kernels",
    "runtime",
    "python/interlace",
    "benchmarks",
    "examples",
    "docs/examples",
    "tests/gpu",
)
DRIVER = re.compile(r"cu[A-Z][A-Za-z0-9_]+")


class Site(NamedTuple):
    """A launch in the source; ``name`` is the function that contains it."""

    name: str
    first_line: int
    last_line: int


def _launches(call: ast.Call, jitted: set[str]) -> bool:
    """Recognise ``kernel[grid](...)``, ``launcher(*grid, ...)``, and launches in Triton, CuPy and core."""
    called, keywords = call.func, {each.arg for each in call.keywords}
    name = ast.unparse(called).rpartition(".")[2]
    if (
        name in ("KernelLaunch", "kernel_launch", "warmup", "_init_handles")
        or "shared_mem" in keywords
    ):
        return True
    if isinstance(called, ast.Subscript):
        kernel = ast.unparse(called.value).rpartition(".")[2]
        grid = isinstance(called.slice, ast.Tuple) or re.search("grid|extents", ast.unparse(called))
        generic = kernel.isupper() or hasattr(builtins, kernel)  # dict[int, str]()
        return not generic and bool(grid or "kernel" in kernel or kernel in jitted)
    first = call.args[0] if call.args else called
    spread = isinstance(first, ast.Starred) and len(call.args) > 2
    return spread and bool(re.search("grid|extents", ast.unparse(first)))


def sites(text: str) -> Iterator[Site]:
    """The launch sites of a file."""
    tree = ast.parse(text)
    jitted = {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in each.decorator_list)
    }

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[Site]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        asks = isinstance(node, ast.Attribute) and DRIVER.fullmatch(node.attr)
        if asks or (isinstance(node, ast.Call) and _launches(node, jitted)):
            yield Site(".".join(names), node.lineno, node.end_lineno or node.lineno)
        for child in ast.iter_child_nodes(node):
            yield from within(child, names)

    return within(tree, ())


def found() -> dict[str, list[Site]]:
    """Return the launch sites of all files of the repository."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    files = [file for file in files if file.resolve() == file]
    by_file = {str(file.relative_to(ROOT)): list(sites(file.read_text())) for file in files}
    return {file: known for file, known in by_file.items() if known}


def named(file: str, site: Site) -> str:
    return f"{file}::{site.name}"


# -- in the process with the stub -----------------------------------------------------------------


class Trace:
    """The executed lines of files with sites."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = {str(ROOT / file): set() for file in found()}
        self._known: dict[str, set[int] | None] = {}

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._known:  # the package is also found by links
            self._known[name] = self.lines.get(str(Path(name).resolve()))
        lines = self._known[name]
        if lines is None:
            return None

        def of_file(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return of_file

        return of_file(frame, event, argument)

    def passed(self) -> list[list[Any]]:
        """Return the sites with an executed line: file, name, first line."""
        return [
            [file, *site[:2]]
            for file, known in found().items()
            for site in known
            if self.lines[str(ROOT / file)] & {*range(site.first_line, site.last_line + 1)}
        ]


SMALL = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}


def algorithms(launched: Callable[[Any], None]) -> None:
    """Return the launches of ops in one variant each, in the names of the catalogue."""
    from dataclasses import replace

    import torch

    from interlace.ops.collectives import node_moves
    from interlace.runtime.tuning.configuration import gpu_default
    from interlace.tools.catalogue import catalogue, catalogue_attention
    from interlace.tools.catalogue.absent_group import AbsentGroup, meta

    def entry(launch: Any, *rest: Any, **more: Any) -> Any:
        launched(launch)
        return made(launch, *rest, **more)

    def between_nodes(group: Any) -> None:
        flat = meta(2048, dtype=torch.uint8)
        node_moves.all_gather(group, flat[:256], flat, [256] * 8, configuration)

    made = catalogue.entry
    catalogue.entry = catalogue_attention.entry = entry
    catalogue.gpu_default = lambda *of, **more: replace(gpu_default(*of, **more), **SMALL)
    operands = catalogue.MatmulVariant(overrides=SMALL)  # by descriptors
    configuration = operands.configuration(90)
    catalogue.all_gather_matmul(90, operands)
    catalogue.all_gather_matmul(90, replace(operands, overrides=SMALL | catalogue.ROLES))
    catalogue.grouped_matmul(90, operands)
    catalogue.counted_grouped_matmul(90, operands)
    catalogue.experts_rows(90, catalogue.MatmulVariant())
    catalogue.grouped_matmul_combine(90, operands)
    catalogue.matmul_all_to_all(90, operands)
    catalogue.all_to_all_matmul(90, operands)
    catalogue.matmul_reduce_scatter(90, operands)
    catalogue.matmul_reduce_scatter_roles(operands)
    catalogue.matmul_all_reduce(90, replace(operands, path="pointers"))
    for norm in (operands, replace(operands, norm="layer", quantize="fp8", gather="both")):
        catalogue.matmul_reduce_scatter_norm(90, norm)
        catalogue.reduce_norm(90, norm)
    catalogue.matmul_all_reduce_norm(90, operands)
    catalogue.low_latency_norm(90, replace(operands, norm="layer"))
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        catalogue.collective(90, op, "bf16", configuration)
    for part in (
        catalogue.by_the_switch(90, "bf16", configuration),
        catalogue.low_latency(90),
        catalogue.signals(90),
        catalogue.between_nodes(90),
        catalogue_attention.attention_kernels(90, catalogue_attention.HeadsVariant(head_dim=64)),
        catalogue_attention.decoding(90),
    ):
        list(part)
    for launch in catalogue.launched(between_nodes, group=AbsentGroup(8, put="stores")):
        launched(launch)


def prepared(launch: Any) -> None:
    """Prepare ``launch`` as a stream does, also by a launcher of an unknown kind."""
    import torch

    from interlace.runtime.compat import triton_launcher
    from interlace.runtime.places.gpu import launch as cuda

    cache = cuda.LaunchCache(torch.device("cpu"), lambda compiled: None)
    cache.prepare(launch, 7, 0).run(7)
    known, triton_launcher._launcher_class = triton_launcher._launcher_class, lambda: None
    cuda.LaunchCache(torch.device("cpu"), lambda compiled: None).prepare(launch, 7, 0).run(7)
    triton_launcher._launcher_class = known


def parts(folder: Path) -> dict[str, Callable[[], int]]:
    """Return the parts by name; each of them returns the least number of its launches."""

    def of_algorithms() -> int:
        launches: list[Any] = []
        algorithms(launches.append)
        for launch in launches:
            prepared(launch)
        return 2 * len(launches)

    def of_streams() -> int:
        """Run ops of the public API, with and without plans; they are pipelined, so that streams signal."""
        import torch

        import interlace
        from interlace.groups.groups import default_group

        x, w = torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
        for _ in range(4):
            interlace.all_gather_matmul(x, w, algorithm="pipelined")
            interlace.all_reduce(torch.zeros(64), algorithm="low_latency")
            interlace.all_reduce(torch.zeros(64), algorithm="kernel")
        assert default_group().plans.hits
        return 4

    def of_benchmarks() -> int:
        import gpu_facts
        import gpu_probe
        import torch
        from gpu_parts import overlap, shapes

        from stand_ins import cupy_stand_in

        gpu_facts.Facts(cupy_stand_in)
        cupy_stand_in.launches.clear()  # which others count
        shapes.dtype_here = overlap.dtype_here = lambda: torch.bfloat16  # by descriptors
        gpu_probe.poll_microseconds()
        for values in None, {"block_n": 64, "num_stages": 2, "warp_roles": True}:
            shapes._alone(256, 64, 64, 1, values)
        for how in ("copy engine", "programs"):
            overlap._over_pcie(how, 2, 256, 64, 64, 1)
        return 20

    def of_examples() -> int:
        import bench_kernel
        import one_shot_all_reduce as example
        import torch

        handle = SimpleNamespace(buffer_ptrs_dev=1 << 40, signal_pad_ptrs_dev=1 << 41)
        memory = SimpleNamespace(empty=torch.empty, rendezvous=lambda tensor: handle)
        example.symmetric_memory = bench_kernel.symmetric_memory = memory
        with contextlib.suppress(AssertionError):  # nothing was computed
            example.three_rounds()
        kernel = bench_kernel.one_shot(4096)
        kernel.run(*kernel.inputs(0))
        return 2

    def of_bundles() -> int:
        """Launch by a stand-in for CuPy, which counts its launches."""
        from interlace import aot
        from interlace.tools.bundle import BundleTarget, KernelOptions, build_bundles
        from stand_ins import cupy_stand_in

        sys.modules["cupy"] = cupy_stand_in
        small = KernelOptions(overrides={"block_elements": 1024})
        build_bundles([BundleTarget("all_reduce", small, [90], folder / "b")])
        peers = {"peers_ptr": 1 << 40, "rank": 0, "world_size": 2}
        aot.load(folder / "b", 90).launch("finish_kernel", 1, peers)
        return 1 - len(cupy_stand_in.launches)

    def of_driver() -> int:
        from interlace.runtime.places.gpu.driver import Driver

        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        driver.write(1, 64, 1)
        driver.leave_captures_alone()
        return driver.new_stream(-1) + driver.capture(1) + driver.has_words(0) - 1

    return {
        "algorithms": of_algorithms,
        "streams": of_streams,
        "benchmarks": of_benchmarks,
        "examples": of_examples,
        "bundles": of_bundles,
        "driver": of_driver,
    }


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` for device "cuda" without a GPU."""

    def made(*given: Any, **named: Any) -> Any:
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return function(
            *("cpu" if isinstance(each, str) and each == "cuda" else each for each in given),
            **named,
        )

    return made


@contextlib.contextmanager
def graph_of(graph: object) -> Iterator[None]:
    yield


def main(folder: Path, chosen: str) -> None:
    """Run the parts, or the one that is ``chosen``."""
    sys.path[:0] = [str(ROOT / each) for each in ("tests", "benchmarks", "docs/examples")]
    import stub_libcuda

    count = ctypes.c_long.in_dll(stub_libcuda.install(folder), "stub_launches")
    import host_cost
    import torch
    import triton

    class Event(host_cost._Event):
        def elapsed_time(self, end: object) -> float:
            return 1.0

    if chosen == "without allocator":
        chosen, triton.set_allocator = "benchmarks", lambda allocator: None
    trace, report = Trace(), {}
    with host_cost.stubbed(2, peers=False, launcher=True):
        torch.cuda.Event = Event
        torch.cuda.Stream.wait_stream = lambda stream, other: None
        torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        torch.cuda.graph, torch.cuda.synchronize = graph_of, lambda device=None: None
        torch.cuda.is_available = lambda: True
        torch.empty, torch.zeros = on_cpu(torch.empty), on_cpu(torch.zeros)
        torch.Tensor.to = on_cpu(torch.Tensor.to)
        for name, part in parts(folder).items():
            if chosen in ("", name):
                before, problem, wanted = count.value, "", 0
                sys.settrace(trace)
                try:
                    wanted = part()
                except Exception:
                    problem = traceback.format_exc()
                sys.settrace(None)
                report[name] = [count.value - before, wanted, problem]
    print(json.dumps({"parts": report, "passed": trace.passed()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]))
