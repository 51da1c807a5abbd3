"""``interlace calibrate``: measure the time of collectives between the ranks of a mesh, and save it."""

import contextlib
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.cli.commands.bench import MOST_RANKS, under_torchrun, world_size_of
from interlace.output.consoles import Progress, write
from interlace.output.files import file_to_write, tell_written
from interlace.output.options import CommandOptions, option
from interlace.runtime.compat.launchers import local_rank
from interlace.runtime.tuning import calibration

MOST_REPETITIONS = 10_000
TIMEOUT = 600.0
TRIES, PATIENCE = 3, 60.0  # times that are still noise after these tries or seconds are refused


@dataclass(frozen=True)
class CalibrateOptions(CommandOptions):
    """Measure latency and bandwidth of collectives on this machine, along each dimension of a mesh.

    It measures all_gather, reduce_scatter, all_reduce and all_to_all, with small and with large messages,
    and fits two lines to the times of each: time against bytes. It saves them in this machine's file:
    $INTERLACE_CALIBRATION, or interlace/calibration-XXXXXXXX.json in the user's cache folder.

    interlace.tensor then uses these costs for meshes of exactly this shape and backend. algorithm="auto" of
    all_gather_matmul on CPUs uses them for groups of this size. INTERLACE_CALIBRATION=off ignores the file.

    Without torchrun the ranks are processes of this host (place shm). Under torchrun its processes are the
    ranks:
      torchrun --nproc-per-node 4 -m interlace calibrate --mesh 2x2 --backend gloo
    """

    world_size: int | None = option(
        None,
        type=int,
        also="--ranks",
        metavar="RANKS",
        help="number of ranks (default: the number of ranks of --mesh, else 2)",
    )
    mesh: str | None = option(
        None, metavar="2x2", help="ranks per dimension (default: one dimension)"
    )
    backend: str | None = option(
        None,
        metavar="NAME",
        help="backend of torch.distributed, under torchrun (default interlace)",
    )
    repetitions: int = option(21, type=int, help="calls of each small size (default 21)")
    json: bool = option(False, action="store_true", help="print JSON")
    dry_run: bool = option(False, action="store_true", help="only print the cases to measure")
    cache: str | None = option(None, metavar="FILE", help="write this file instead")


def mesh_of(options: CalibrateOptions) -> tuple[int, ...]:
    """Return the ranks per dimension. Raise ValueError if they are not possible."""
    asked = options.world_size
    if under_torchrun():
        asked = world_size_of(options)
    if options.mesh is None:
        mesh: tuple[int, ...] = (2 if asked is None else asked,)
    else:
        parts = options.mesh.lower().split("x")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"--mesh must be like 4 or 2x2, got {options.mesh!r}")
        mesh = tuple(int(part) for part in parts)
        if asked is not None and math.prod(mesh) != asked:
            raise ValueError(
                f"--mesh {options.mesh} has {math.prod(mesh)} ranks, --world-size is {asked}"
            )
    most = 1 << 20 if under_torchrun() else MOST_RANKS
    if not all(mesh) or not 2 <= math.prod(mesh) <= most:
        raise ValueError(
            f"a mesh must have 2 to {MOST_RANKS} ranks, got {list(mesh)} with {math.prod(mesh)}"
        )
    return mesh


def calibrate(console: Any, options: CalibrateOptions) -> int:
    """Measure, write, print. Raise ValueError or OSError."""
    from interlace.tensor import calibration as measuring  # late: it imports torch's DTensor

    mesh = mesh_of(options)
    if not 3 <= options.repetitions <= MOST_REPETITIONS:
        raise ValueError(
            f"--repetitions must be within 3..{MOST_REPETITIONS}, got {options.repetitions}"
        )
    if options.backend is not None and not under_torchrun():
        raise ValueError("--backend needs ranks of torchrun; without torchrun it is interlace")
    request = measuring.CalibrationRequest(mesh, repetitions=options.repetitions)
    if options.dry_run:
        _plan(console, options, request)
        return 0
    if under_torchrun():
        return _as_rank(console, options, request, measuring)
    file = _file(options, "cpu")
    calibration.file_of("cpu").refuse_unwritable(file)
    with Progress("calibrate", 1, shown=not options.json) as progress:

        def attempt(number: int) -> list[Any]:
            again = f", again: {number} of {number} were noise" if number else ""
            progress.begin(0, f"mesh {'x'.join(map(str, mesh))}{again}")
            with progress.on_ranks(apart=True) as tick:
                return interlace.run(
                    measuring.on_rank, math.prod(mesh), request, tick, place="shm", timeout=TIMEOUT
                )

        found = _without_noise(
            attempt, lambda times: measuring.measured_mesh(request, times, calibration.OWN, "shm")
        )
    calibration.add(found, file)
    _print(console, options, found, file)
    return 0


def _without_noise(
    attempt: Callable[[int], list[Any]],
    fitted: Callable[[list[Any]], calibration.MeasuredMesh],
    agreed: Callable[[bool], bool] = bool,
) -> calibration.MeasuredMesh:
    """Return a fit of the times of all attempts so far; each attempt makes the medians' noise less.

    Raise NoisyTimesError if too many attempts were noise. ``agreed`` makes one decision for all ranks.
    """
    from interlace.tensor.calibration import NoisyTimesError

    times: list[Any] = []  # by rank
    begun = time.monotonic()
    for number in itertools.count():
        more = attempt(number)
        times = times or [{} for _ in more]
        times = [
            {key: before.get(key, []) + now[key] for key in now}
            for before, now in zip(times, more, strict=True)
        ]
        with contextlib.suppress(NoisyTimesError):
            return fitted(times)
        enough = number + 1 >= TRIES and time.monotonic() - begun >= PATIENCE
        if agreed(enough):
            break
    return fitted(times)


def _as_rank(console: Any, options: CalibrateOptions, request: Any, measuring: Any) -> int:
    """Calibrate as one rank of a job. The first rank of each host writes the file of that host."""
    backend = options.backend or calibration.OWN
    local = local_rank() or 0
    kind = "cuda" if "nccl" in backend else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group(backend)
    try:

        def of_all(value: Any) -> list[Any]:
            values: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values

        found = _without_noise(  # fits the times of all ranks, so that all see the same noise
            lambda number: of_all(measuring.on_rank(request, lambda done, total: None)),
            lambda times: measuring.measured_mesh(request, times, backend, "torchrun"),
            lambda enough: bool(of_all(enough)[0]),
        )
        try:
            if local == 0:
                file = _file(options, kind)
                calibration.add(found, file, kind)
                if dist.get_rank() == 0:
                    _print(console, options, found, file)
        except (OSError, ValueError):
            dist.barrier()
            raise
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _file(options: CalibrateOptions, device_type: str) -> pathlib.Path:
    return file_to_write(options.cache, calibration.path(device_type), calibration.VARIABLE)


def _plan(console: Any, options: CalibrateOptions, request: Any) -> None:
    file, backend = _file(options, "cpu"), options.backend or calibration.OWN
    cases = request.cases
    calls = sum(request.calls(size) for _, _, size in cases)
    if options.json:
        plan = {"file": str(file), "backend": backend, **asdict(request)}
        print(json.dumps({**plan, "cases": len(cases), "calls": calls}, indent=1))
        return
    for line in (
        f"mesh {'x'.join(map(str, request.mesh))}, backend {backend}",
        f"would measure {len(cases)} cases, {calls} calls:",
        f"  ops    {', '.join(calibration.OPS)}",
        f"  small  {', '.join(map(str, request.small))} bytes",
        f"  large  {', '.join(map(str, request.large))} bytes",
        f"would write {file}",
    ):
        write(console, line)


def _print(
    console: Any, options: CalibrateOptions, found: calibration.MeasuredMesh, file: pathlib.Path
) -> None:
    if options.json:
        print(json.dumps({"file": str(file), **asdict(found)}, indent=1))
        return
    write(console, f"mesh {'x'.join(map(str, found.mesh))}, backend {found.backend}, {found.date}")
    head = (
        f"{'dim':>3} {'op':<14} {'messages':<8} {'from bytes':>10} {'latency us':>11} {'GB/s':>8}"
    )
    write(console, head)
    for link in [link for link in found.links if link.ranks > 1]:
        for name, each in zip(("small", "large"), link.protocols, strict=False):
            line = f"{link.dim:>3} {link.op:<14} {name:<8} {each.from_bytes:>10} "
            write(console, f"{line}{each.latency_us:>11.1f} {each.gb_per_s:>8.3f}")
    write(console, "GB/s are 10**9 bytes of the whole tensor per second", "dim")
    tell_written(console, file, calibration.path(), calibration.VARIABLE)
