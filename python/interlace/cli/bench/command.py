"""``interlace bench``: time an op or a kernel of one's own, check it, and compare it with others.

``interlace/benchmark/`` measures. This file runs one size after another, on ranks of its own or on those of
``torchrun``, of which rank 0 prints; ``options.py`` reads the options, ``report.py`` prints.
"""

import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import interlace
from interlace.benchmark.runs.measure import measure
from interlace.benchmark.runs.results import SizeResult
from interlace.benchmark.subjects import baselines
from interlace.benchmark.subjects.requests import BenchRequest
from interlace.benchmark.timing.sizes import format_size
from interlace.cli.bench import options as given
from interlace.cli.bench import report
from interlace.cli.bench.options import BenchOptions, under_torchrun
from interlace.cli.output import bars
from interlace.cli.output.consoles import write
from interlace.cli.output.files import refuse_outputs
from interlace.cli.output.progress import Progress
from interlace.groups import groups
from interlace.runtime.core.errors import RankError, rank_error, users_traceback


def bench(console: Any, options: BenchOptions) -> int:
    """Measure, print, write; 1 if any result is wrong, else 0. Wrong options raise before that."""
    requests = given.requests_of(options)
    if _prints():
        source = options.target.partition("::")[0] if requests[0].own else None
        outputs = {"--json": options.json, "--plot": bars.file_of(options.plot)}
        refuse_outputs(outputs, {"the target": source})
    if not under_torchrun():
        results = _in_own_ranks(options, requests)
    else:
        results = _as_rank(options, requests)
        if not _prints():  # rank 0 has the same; a status of 1 here would end it too early
            failed = [each.failed for each in results if each.failed]
            print("".join(f"{text}\n" for text in failed), end="", file=sys.stderr)
            return 1 if failed else 0
    report.render(console, options, results)
    try:
        if options.json is not None:
            report.write_json(pathlib.Path(options.json), options, results)
            write(console, f"JSON: {options.json}")
    finally:  # one may fail, and the other not
        if options.plot == bars.TERMINAL:
            bars.draw(console, options.plot, report.times(results))
        elif options.plot is not None:
            report.write_plot(pathlib.Path(options.plot), results)
            write(console, f"Plot: {options.plot}")
    return 0 if all(each.right for each in results) else 1


def _prints() -> bool:
    """Whether this process is the one that prints and writes."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def _in_own_ranks(options: BenchOptions, requests: list[BenchRequest]) -> list[SizeResult]:
    place: Any = given.place_of(options)
    world_size, results = given.world_size_of(options), []
    with Progress("bench", len(requests)) as progress:
        for number, request in enumerate(requests):
            progress.begin(number, _text(request))
            ticks = progress.on_ranks(apart=place == "shm")
            with ticks as tick, _wrong(request) as said:
                found = interlace.run(
                    measure,
                    world_size,
                    replace(request, store=f"{progress.folder}/store-{number}"),
                    tick,
                    place=place,
                    timeout=options.timeout,
                )
            results.append(SizeResult(None, said[0]) if said else SizeResult(found[0]))
    return results


def _as_rank(options: BenchOptions, requests: list[BenchRequest]) -> list[SizeResult]:
    """This process is a rank of a job, on one host or on several."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = requests[0].chosen
    if chosen is None:  # which it will be is known when the place is, and that comes after
        chosen = baselines.default(
            "", "cuda" if torch.cuda.is_available() else "cpu", virtual=False
        )
    results = []
    # torch first: interlace then takes the store from it, and no port is served twice
    with baselines.joined(baselines.torch_backend(chosen), None, rank, world_size):
        try:
            found = groups.default_group().place.name
            if options.place not in (None, found):
                raise ValueError(f"--place {options.place}: torchrun's ranks are in place {found}")
            with Progress("bench", len(requests), shown=rank == 0) as progress:
                for number, request in enumerate(requests):
                    progress.begin(number, _text(request))
                    with _wrong(request, rank) as said:
                        results.append(SizeResult(measure(request, progress.at)))
                    if said:  # the other ranks may be anywhere in it
                        return [*results, SizeResult(None, f"rank {rank}: {said[0]}")]
        finally:
            interlace.shutdown()
    return results


@contextmanager
def _wrong(request: BenchRequest, rank: int | None = None) -> Iterator[list[str]]:
    """The text of an AssertionError of the user's own function, by which it says that it was wrong.

    What else that raises is a RankError with its traceback; ``rank``, if this process is one.
    """
    said: list[str] = []
    try:
        yield said
    except Exception as error:
        if not request.own:
            raise
        if isinstance(error, AssertionError):
            said.append(str(error).splitlines()[0] if str(error) else "AssertionError")
            return
        if rank is not None:
            raise rank_error(rank, error, users_traceback(error)) from error
        if isinstance(error, RankError) and not error.details:
            error.details = users_traceback(error.original)
        raise


def _text(request: BenchRequest) -> str:
    shape = [str(value) for value in (request.m, request.n, request.k) if value is not None]
    size = [] if request.nbytes is None else [format_size(request.nbytes)]
    return " ".join([request.target.rpartition("::")[2], *size, " x ".join(shape)]).strip()
