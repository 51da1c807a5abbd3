"""``interlace bench``: time an op or your own kernel, check it, and compare it with baselines."""

import itertools
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import interlace
from interlace.benchmark import baselines, kernel, protocol
from interlace.benchmark.figures import parse_sizes
from interlace.benchmark.fused import GatherNormed
from interlace.benchmark.kernel import BASELINE, PART
from interlace.benchmark.plain import Plain
from interlace.benchmark.requests import (
    DTYPES,
    OPS,
    BenchRequest,
    BenchRow,
    SizeResult,
    load_kernel,
    measure,
)
from interlace.groups import groups
from interlace.launcher import JOB_PLACES, PLACES as OWN_PLACES
from interlace.ops.matmul.formats import FORMATS
from interlace.output.consoles import Progress, write
from interlace.output.files import TERMINAL, draw_bars, file_of, refuse_outputs, require_matplotlib
from interlace.output.machine import inspect_machine, refuse_size
from interlace.output.options import MOST, CommandOptions, option
from interlace.runtime.compat import launchers
from interlace.runtime.core.errors import RankError, rank_error, users_traceback
from interlace.runtime.core.place import MOST_SECONDS

PLACES = (*OWN_PLACES, *JOB_PLACES)  # JOB_PLACES need torchrun
GPU_PLACES = ("cuda", "nvshmem")
DEFAULT_SHAPE = "1024"
MOST_RANKS = 64

UNITS = """\
columns:
  time        microseconds per call: the median over blocks of calls; +- half the distance between quartiles
  algbw       size / time, in GB/s = 10**9 bytes/s; the size is the largest buffer of the op on a rank
  busbw       algbw times nccl-tests' factor, for W ranks: 2(W-1)/W for all_reduce; (W-1)/W for all_gather,
              reduce_scatter, all_to_all, gather and scatter; 1 for broadcast, reduce and send_recv
  TFLOP/s     2 m n k / time of one rank's matmul, in 10**12/s
  overlap     (T_matmul + T_communication - T_fused) / min(T_matmul, T_communication), times of this run
  times NAME  how many times as fast as that baseline
  result      right, or WRONG with the largest error as a multiple of the error that the dtypes allow

baselines:
  gloo      torch.distributed and torch.mm, on a CPU       nccl      the same on GPUs, one per process
  symm_mem  torch's symmetric memory, on GPUs              torch     copies, sums and torch.mm on one
                                                                     rank alone, without waits

"""


@dataclass(frozen=True)
class BenchOptions(CommandOptions):
    """Time an op of interlace, or your own kernel, against baselines, and check every result.

    OP is one of these, or path/to/file.py::function, which returns an interlace.benchmark.Kernel or a
    callable to time:

    - all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send_recv,
      barrier
    - all_gather_matmul, matmul_all_to_all, all_to_all_matmul
    - matmul_reduce_scatter, matmul_all_reduce; both also as ..._norm, with residual and RMSNorm
    - all_reduce_norm, reduce_scatter_norm
    - all_to_all_grouped_matmul, all_gather_grouped_matmul, grouped_matmul_combine, dispatch, combine
    - context_parallel_attention (also as ..._backward), distributed_decode

    Under torchrun its processes are the ranks:  torchrun --nproc-per-node 8 -m interlace bench all_reduce
    """

    epilog = UNITS
    statuses = ((1, "a result is wrong"),)

    target: str = option(
        positional=True,
        metavar="OP|FILE.py::FUNCTION",
        help="the op or function to time, see above; "
        f"{GatherNormed.op} is reduce_scatter_norm with an all-gather of the normed rows",
    )
    sizes: str | None = option(
        None,
        metavar="1K:1G:x4",
        help="sizes of collectives in bytes: a list of sizes and of ranges first:last:xFACTOR or "
        f"first:last:+STEP; K, M, G are 2**10, 2**20, 2**30 (default {Plain.defaults['nbytes']})",
    )
    m: str | None = option(
        None, metavar="ROWS", help="all rows of a fused op; a list or range like --sizes"
    )
    n: str | None = option(
        None, metavar="COLUMNS", help="columns of a rank's weight of a fused op; heads of attention"
    )
    k: str | None = option(
        None,
        metavar="INNER",
        help="contracted dimension of a rank of a fused op; head size of attention",
    )
    batch: int | None = option(None, type=int, help="sequences of attention (default 1)")
    key_heads: int | None = option(
        None, type=int, help="heads of keys of attention, a divisor of N (default N)"
    )
    mask: str | None = option(
        None, choices=("causal", "full"), help="mask of attention over a sequence (default causal)"
    )
    dtype: str | None = option(
        None, choices=DTYPES, help="dtype (default bfloat16 on a GPU, float32 on a CPU)"
    )
    format: str | None = option(
        None,
        choices=tuple(FORMATS),
        help="block-scaled format of operands of fused matmuls and dispatch; --dtype is the output dtype",
    )
    world_size: int | None = option(
        None, type=int, also="--ranks", help="number of ranks (default 2; torchrun sets its own)"
    )
    place: str | None = option(
        None,
        choices=PLACES,
        help="sim (simulated ranks; times of the simulator), shm (processes on this host) or cuda (virtual "
        "ranks on one GPU). Default: cuda if there is a GPU, otherwise shm. With torchrun, the place that "
        "its ranks must use",
    )
    algorithm: str | None = option(
        None,
        metavar="NAME,...|all",
        help="auto (default). Fused ops also have fused, pipelined, unfused. Attention has a method and an "
        "algorithm, as 'ring fused'. all_reduce, all_gather and reduce_scatter have kernel, copy. all "
        "means every algorithm, except Triton kernels where they would be interpreted",
    )
    baseline: str | None = option(
        None,
        metavar="NAME,...|none",
        help="torch, nccl, gloo, symm_mem, or a baseline of your Kernel (default: gloo on a CPU, nccl on "
        "GPUs, torch for virtual ranks, none in sim)",
    )
    repetitions: int = option(15, type=int, help="blocks per candidate and size (default 15)")
    timeout: float = option(600.0, type=float, help="seconds for one size (default 600)")
    json: str | None = option(None, metavar="FILE", help="write all measurements to this file")
    plot: str | None = option(
        None, metavar="FILE", help="write a plot, PNG or SVG (needs matplotlib); - draws it here"
    )

    def interprets(self) -> bool:
        return place_of(self) not in GPU_PLACES


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun or another launcher started.

    Set torchrun's variables if another launcher did. Raise what :func:`interlace.launched` raises.
    """
    if "RANK" not in os.environ and launchers.variables(os.environ).get("WORLD_SIZE", "1") == "1":
        return False  # a shell of srun --pty is not a rank
    return launchers.launched()


def place_of(options: BenchOptions) -> str:
    return options.place or ("cuda" if torch.cuda.is_available() else "shm")


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def requests_of(options: BenchOptions) -> list[BenchRequest]:
    """Return a request per size. Raise ValueError if options do not fit together."""
    target = options.target
    if "::" not in target and target not in OPS:
        known = ", ".join(OPS)
        raise ValueError(f"OP must be one of {known}, or path/to/file.py::function, got {target}")
    if not 1 <= options.repetitions <= MOST:
        raise ValueError(f"--repetitions must be within 1..{MOST}, got {options.repetitions}")
    if not 0 < options.timeout <= MOST_SECONDS:
        raise ValueError(
            f"--timeout must be positive and at most {MOST_SECONDS:g} s, got {options.timeout}"
        )
    on_gpu = place_of(options) in GPU_PLACES
    request = BenchRequest(
        target,
        options.dtype or ("bfloat16" if on_gpu else "float32"),
        _algorithms(options),
        () if options.baseline == "none" else _names(options.baseline),
        options.repetitions,
        virtual=on_gpu and not under_torchrun(),
    )
    _check_place(options, request)
    world_size = world_size_of(options)
    settings = _settings(options)
    requests = [replace(request, settings=settings, **size) for size in _shapes(options)]
    for each in requests:
        if each.own:
            kernel.arguments_for(load_kernel(target), target, each.arguments)
        else:
            kind, sizes, how = OPS[target], each.sizes, dict(settings)
            kind.refuse(world_size, sizes, each.dtype, **how)
            if not under_torchrun():
                text = "--sizes " * (each.nbytes is not None) + " x ".join(map(str, sizes))
                nbytes = kind.memory(DTYPES[each.dtype], *sizes, **how)
                refuse_size(text, nbytes, world_size, place_of(options))
    return requests


def _check_place(options: BenchOptions, request: BenchRequest) -> None:
    """Check that the place is there and has the baselines, as far as is known before ranks have met."""
    place, has_gpu = place_of(options), torch.cuda.is_available()
    if place not in OWN_PLACES and not under_torchrun():
        raise ValueError(f"--place {place} needs ranks of torchrun: start bench with torchrun")
    if place in GPU_PLACES and not has_gpu:
        raise ValueError(f"--place {place} needs a CUDA device, torch sees none; use shm or sim")
    for name in () if request.own else request.chosen or ():
        if under_torchrun():
            device = "cuda" if has_gpu and name != "gloo" else "cpu"
        else:
            device = "cuda" if request.virtual else "cpu"
        baselines.refuse(name, place, device, virtual=request.virtual)


def world_size_of(options: Any) -> int:
    asked = options.world_size
    if under_torchrun():
        actual = int(os.environ["WORLD_SIZE"])
        if asked is not None and asked != actual:
            raise ValueError(f"--world-size {asked}: torchrun has started {actual} ranks")
        return actual
    if asked is not None and not 1 <= asked <= MOST_RANKS:
        raise ValueError(f"--world-size must be within 1..{MOST_RANKS}, got {asked}")
    return asked or 2


def _algorithms(options: BenchOptions) -> tuple[str, ...]:
    if "::" in options.target:
        if options.algorithm is not None:
            raise ValueError(f"--algorithm {options.algorithm}: your own kernel has no algorithms")
        return ()
    known = OPS[options.target].algorithms
    names = _names(options.algorithm) or ("auto",)
    for name in names:
        if name not in known and names != ("all",):
            raise ValueError(
                f"--algorithm {name}: {options.target} has {', '.join(known)}, and all"
            )
    return names


def _settings(options: BenchOptions) -> tuple[tuple[str, int | str], ...]:
    """Return the options besides sizes, in the form that the op's class takes."""
    kind = OPS.get(options.target)
    known = kind.settings if kind is not None else ()
    found: list[tuple[str, int | str]] = []
    for name in ("batch", "key_heads", "mask", "format"):
        value = getattr(options, name)
        if value is None:
            continue
        option = f"--{name.replace('_', '-')} {value}"
        if name not in known:
            raise ValueError(f"{option}: {options.target} has no such setting")
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise ValueError(f"{option} must be within 1..{MOST}")
        found.append((name, value))
    return tuple(found)


def _shapes(options: BenchOptions) -> list[dict[str, Any]]:
    texts = {"m": options.m, "n": options.n, "k": options.k, "nbytes": options.sizes}
    kind = OPS.get(options.target)  # None for the user's own kernel
    lists = {}
    for name, text in texts.items():
        option = "--sizes" if name == "nbytes" else f"--{name}"
        if kind is not None and name in kind.sizes and text is None:
            text = kind.defaults.get(name, DEFAULT_SHAPE)
        elif kind is not None and name not in kind.sizes and text is not None:
            raise ValueError(f"{option}: {options.target} {kind.without}")
        if text is not None:
            lists[name] = parse_sizes(text, option)
    return [dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())]


CACHED = "in cache"  # marks inputs that could not be rotated past the cache


def render(console: Any, options: BenchOptions, results: Sequence[SizeResult]) -> None:
    console.print(_title(results))
    headers, lines = table(results)
    _print_table(console, headers, lines)
    for note in notes(results):
        write(console, note, "dim")
    for result in results:
        for message in filter(None, [result.failed, *(row.said for row in result.rows)]):
            write(console, f"{result.label}: {message}", "red")
    wrong = sorted({row.name for r in results for row in r.rows if row.right is False})
    failed = any(result.failed for result in results)
    if wrong or failed:
        names = ", ".join(wrong) if wrong else options.target.rpartition("::")[2]
        write(console, f"WRONG results: {names}.", "red")
    elif any(row.right is None and row.role != PART for r in results for row in r.rows):
        console.print("Not checked: there is no reference to compare with.")
    else:
        console.print("[green]All results are right.[/green]")


def _title(results: Sequence[SizeResult]) -> str:
    sizes = next((result.sizes for result in results if result.sizes is not None), None)
    if sizes is None:
        return "interlace bench"
    ranks = f"{sizes.world_size} rank{'s' if sizes.world_size != 1 else ''}"
    dtype = f"{sizes.format} to {sizes.dtype}" if sizes.format else sizes.dtype
    return f"[bold]{sizes.op}[/bold], {dtype}, {ranks}, place {sizes.place} ({sizes.device})"


def table(results: Sequence[SizeResult]) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells; leave out columns that have no figure in any row."""
    names = list(dict.fromkeys(n for result in results for row in result.rows for n in row.speedup))
    columns: list[tuple[str, Any]] = [
        ("time\nus", lambda row: _number(row.microseconds.median)),
        ("+-", lambda row: f"{row.microseconds.relative:.0%}"),
        ("algbw\nGB/s", lambda row: _number(row.algbw)),
        ("busbw\nGB/s", lambda row: _number(row.busbw)),
        ("TFLOP\n/s", lambda row: _number(row.tflops)),
        ("overlap", lambda row: "" if row.overlap is None else f"{row.overlap:.0%}"),
        *[
            (f"times\n{name}", lambda row, name=name: _number(row.speedup.get(name)))
            for name in names
        ],
        ("result", _verdict),
    ]
    lines = []
    for result in results:
        if result.failed:
            cells = ["" for _ in columns[:-1]]
            lines.append([result.label, "", *cells, "WRONG"])
        for index, row in enumerate(result.rows):
            label = result.label if index == 0 else ""
            lines.append([label, row.name, *[cell(row) for _, cell in columns]])
    headings = dict.fromkeys(result.heading for result in results if result.sizes is not None)
    headers = [", ".join(headings) or "size", "candidate", *[name for name, _ in columns]]
    kept = [i for i in range(len(headers)) if i < 2 or any(line[i] for line in lines)]
    return [headers[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _number(value: float | None) -> str:
    """Return three digits, without an exponent.

    >>> _number(0.12345), _number(12.345), _number(12345.6), _number(None)
    ('0.123', '12.3', '12,346', '')
    """
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def _verdict(row: BenchRow) -> str:
    if row.right is None:
        return "" if row.role == PART else "not checked"
    if row.right:
        return "right"
    finite = row.error is not None and math.isfinite(row.error)
    return f"WRONG ({row.error:.3g} x allowed)" if finite else "WRONG"


def _print_table(console: Any, headers: list[str], lines: list[list[str]]) -> None:
    """Print cells in columns; names of candidates, in the second column, are aligned on the left."""
    names = [["", *header.split("\n")][-2:] for header in headers]
    heads = [[name[i] for name in names] for i in range(2)]
    widths = [max(len(line[i]) for line in [*heads, *lines]) for i in range(len(headers))]
    rule = ["-" * (sum(widths) + 2 * len(widths) - 2)]
    for line in [*heads, rule, *lines]:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=False)]
        cells[1:2] = [cell.ljust(widths[1]) for cell in line[1:2]]
        text = "  ".join(cells).rstrip()
        write(console, text, "bold red" if line[-1].startswith("WRONG") else "")
    console.print()


def notes(results: Sequence[SizeResult]) -> list[str]:
    found = []
    for result in results:
        sizes = result.sizes
        if sizes is None:
            continue
        if sizes.place == "sim":
            found.append("Times are simulator times: they say nothing about any machine.")
        if sizes.left_out:
            found.append(f"Left out of all: {', '.join(sizes.left_out)}.")
        found += [
            f"{result.label}: {row.name} took longer than its matmul and its communication one after the "
            "other. The sizes are too small to gain, or another program was running."
            for row in result.rows
            if row.overlap is not None and row.overlap < 0
        ]
        small = any(0 < row.rotated_bytes < sizes.cache_bytes for row in result.rows)
        if small and sizes.place != "sim":
            found.append(
                f"{result.label}: inputs may be {CACHED}: all sets together are smaller than the last "
                f"cache, {sizes.cache_bytes >> 20} MiB."
            )
    return list(dict.fromkeys(found))


def write_json(path: pathlib.Path, options: BenchOptions, results: Sequence[SizeResult]) -> None:
    """Write everything: options, machine, protocol, all blocks of all rows."""
    document = {
        "interlace": interlace.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": asdict(options),
        "machine": inspect_machine(),
        "protocol": {
            "block": f"calls that fill {protocol.BLOCK_SECONDS} s, at most {protocol.MOST_CALLS}",
            "order": "candidates alternate block by block",
            "time": "slowest rank, from a barrier before the block to the end of its device's work",
            "statistic": "median over blocks",
        },
        "units": {
            "microseconds": "per call",
            "algbw, busbw": "10**9 bytes/s, nccl-tests' definitions",
            "tflops": "10**12/s, one rank",
        },
        "results": [result.to_dict() for result in results],
        "right": all(result.right for result in results),
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def times(results: Sequence[SizeResult]) -> list[tuple[str, list[tuple[str, float]]]]:
    measured = [result for result in results if result.rows]
    return [(r.label, [(row.name, row.microseconds.median) for row in r.rows]) for r in measured]


def write_plot(path: pathlib.Path, results: Sequence[SizeResult]) -> None:
    """Draw a line per candidate over the sizes: bus bandwidth, or time without one; shade the quartiles."""
    figure = require_matplotlib()(figsize=(8, 5))
    axes = figure.subplots()
    measured = [result for result in results if result.sizes is not None]
    names = list(dict.fromkeys(row.name for result in measured for row in result.rows))
    rated = all(row.busbw is not None for r in measured for row in r.rows if row.role != PART)
    for name in names:
        points = [(i, row) for i, r in enumerate(measured) for row in r.rows if row.name == name]
        role = points[0][1].role
        if rated and role == PART:
            continue
        drawn = []
        for i, row in points:
            spread = row.microseconds
            carried = (row.busbw or 0.0) * spread.median
            values = spread.median, spread.low, spread.high
            drawn.append((i, *(carried / value if rated else value for value in values)))
        x, middle, low, high = zip(*drawn, strict=True)
        style = {BASELINE: "--", PART: ":"}.get(role, "-")
        line = axes.plot(x, middle, style, marker="o", label=name)
        axes.fill_between(x, low, high, color=line[0].get_color(), alpha=0.2)
    axes.set_xticks(range(len(measured)), [r.label for r in measured], rotation=30, ha="right")
    axes.set_ylabel("bus bandwidth, GB/s" if rated else "time of a call, us")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.set_title(_title(results).replace("[bold]", "").replace("[/bold]", ""), fontsize=10)
    if names:
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def bench(console: Any, options: BenchOptions) -> int:
    """Measure, print, write; return 1 if any result is wrong, otherwise 0. Check the options first."""
    requests = requests_of(options)
    if _prints():
        source = options.target.partition("::")[0] if requests[0].own else None
        outputs = {"--json": options.json, "--plot": file_of(options.plot)}
        refuse_outputs(outputs, {"the target": source})
    if not under_torchrun():
        results = _in_own_ranks(options, requests)
    else:
        results = _as_rank(options, requests)
        if not _prints():  # rank 0 prints the same; a status of 1 here would end it too early
            failed = [result.failed for result in results if result.failed]
            print("".join(f"{text}\n" for text in failed), end="", file=sys.stderr)
            return 1 if failed else 0
    render(console, options, results)
    try:
        if options.json is not None:
            write_json(pathlib.Path(options.json), options, results)
            write(console, f"JSON: {options.json}")
    finally:  # one may fail without the other
        if options.plot == TERMINAL:
            draw_bars(console, options.plot, times(results))
        elif options.plot is not None:
            write_plot(pathlib.Path(options.plot), results)
            write(console, f"Plot: {options.plot}")
    return 0 if all(result.right for result in results) else 1


def _prints() -> bool:
    return not under_torchrun() or os.environ["RANK"] == "0"


def _in_own_ranks(options: BenchOptions, requests: list[BenchRequest]) -> list[SizeResult]:
    place: Any = place_of(options)
    world_size, results = world_size_of(options), []
    with Progress("bench", len(requests)) as progress:
        for number, request in enumerate(requests):
            progress.begin(number, request.title)
            ticks = progress.on_ranks(apart=place == "shm")
            with ticks as tick, _wrong(request) as problems:
                found = interlace.run(
                    measure,
                    world_size,
                    replace(request, store=f"{progress.folder}/store-{number}"),
                    tick,
                    place=place,
                    timeout=options.timeout,
                )
            if problems:
                results.append(SizeResult(None, problems[0], request.label))
            else:
                results.append(SizeResult(found[0]))
    return results


def _as_rank(options: BenchOptions, requests: list[BenchRequest]) -> list[SizeResult]:
    """Measure as a rank of a job, on one host or on several."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = requests[0].chosen
    if chosen is None:  # it depends on the place, which is known only later
        chosen = baselines.default(
            "", "cuda" if torch.cuda.is_available() else "cpu", virtual=False
        )
    results = []
    # torch first: interlace then takes the store from torch, and no port is served twice
    with baselines.join_default_group(baselines.torch_backend(chosen), None, rank, world_size):
        try:
            found = groups.default_group().place.name
            if options.place not in (None, found):
                raise ValueError(f"--place {options.place}: torchrun's ranks are in place {found}")
            with Progress("bench", len(requests), shown=rank == 0) as progress:
                for number, request in enumerate(requests):
                    progress.begin(number, request.title)
                    with _wrong(request, rank) as problems:
                        results.append(SizeResult(measure(request, progress.at)))
                    if problems:  # the other ranks may be anywhere in the block
                        why = f"rank {rank}: {problems[0]}"
                        return [*results, SizeResult(None, why, request.label)]
        finally:
            interlace.shutdown()
    return results


@contextmanager
def _wrong(request: BenchRequest, rank: int | None = None) -> Iterator[list[str]]:
    """Yield a list that gets the text of an AssertionError of the user's function, which means "wrong"."""
    problems: list[str] = []
    try:
        yield problems
    except Exception as error:
        if not request.own:
            raise
        if isinstance(error, AssertionError):
            problems.append(str(error).splitlines()[0] if str(error) else "AssertionError")
            return
        if rank is not None:
            raise rank_error(rank, error, users_traceback(error)) from error
        if isinstance(error, RankError) and not error.details:
            error.details = users_traceback(error.original)
        raise
