"""The ops of ``bench``; a request, its candidates, and the measurement on one rank."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from interlace.benchmark import attention, baselines, expert_rows, fused, kernel, plain, protocol
from interlace.benchmark.figures import Spread, format_size, overlap
from interlace.benchmark.fused import ByRows, Fused
from interlace.benchmark.kernel import ALGORITHM, BASELINE, PART, BenchCandidate, Facts, Subject
from interlace.benchmark.plain import MeasuredOp, Plain
from interlace.benchmark.protocol import cache_bytes, sets_needed
from interlace.groups.groups import default_group
from interlace.ops.collectives.launch import MOST_BYTES
from interlace.runtime.core.place import Place

OPS: dict[str, type[MeasuredOp]] = {
    kind.op: kind
    for module in (plain, fused, expert_rows, attention)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, MeasuredOp) and "op" in vars(kind)
}
TUNED: dict[str, type[ByRows]] = {op: kind for op, kind in OPS.items() if issubclass(kind, ByRows)}
"""The ops that ``tune`` knows."""
FUSED: dict[str, Any] = {
    op: OPS[op] for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
}
"""The ops that ``tune`` measures if none is named."""

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}
# interpreted on a CPU, far too slow to measure unless asked for
TRITON = ("fused", "kernel", "multimem", "low_latency")
NARROW = ("float32", "float16", "bfloat16")  # all that most algorithms take
WIDE = ("auto", "unfused", "copy")


@dataclass(frozen=True)
class BenchRequest:
    """One size of one run.

    ``target``: an op or "file.py::function". ``algorithms``: names, ("all",), or () for a user's own
    kernel. ``chosen``: baselines, or None for the default ones. ``store``: a file through which ranks of
    torch.distributed meet, None under ``torchrun``. ``settings``: the op's options other than sizes.
    ``virtual``: ranks share one GPU.
    """

    target: str
    dtype: str
    algorithms: tuple[str, ...]
    chosen: tuple[str, ...] | None
    repetitions: int
    nbytes: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    settings: tuple[tuple[str, int | str], ...] = ()
    virtual: bool = False
    store: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that a user's function may take."""
        sizes = {"nbytes": self.nbytes, "m": self.m, "n": self.n, "k": self.k}
        return {**sizes, "dtype": DTYPES[self.dtype]}

    @property
    def sizes(self) -> list[int]:
        return [getattr(self, name) for name in OPS[self.target].sizes]

    @property
    def label(self) -> str:
        return _in_words(self.nbytes, (self.m, self.n, self.k))

    @property
    def title(self) -> str:
        return f"{self.target.rpartition('::')[2]} {self.label}".strip()

    @property
    def own(self) -> bool:
        return "::" in self.target


def _in_words(nbytes: int | None, extents: Iterable[int | None]) -> str:
    """Return a size, for tables.

    >>> _in_words(65536, []), _in_words(None, [1024, 512, 512]), _in_words(8, [None])
    ('64 KiB', '1024 x 512 x 512', '8 B')
    """
    shape = " x ".join(str(extent) for extent in extents if extent is not None)
    return "; ".join(([format_size(nbytes)] if nbytes else []) + ([shape] if shape else []))


Source = tuple[str | None, list[str], Callable[[], Subject]]


def source(request: BenchRequest, place: Place) -> Source:
    """Return a backend of torch.distributed, exclusions from "all" with reasons, and a subject's maker."""
    if request.own:
        return _own_kernel(request, place)
    device, chosen = place.device.type, request.chosen
    if chosen is None:
        chosen = baselines.default(place.name, device, virtual=request.virtual)
        if request.target == "barrier":
            chosen = tuple(name for name in chosen if name != "torch")
    for name in chosen:
        baselines.refuse(name, place.name, device, virtual=request.virtual)
    kind: Any = OPS[request.target]
    sizes, settings = request.sizes, dict(request.settings)
    if "symm_mem" in chosen and "format" in settings:
        raise ValueError(
            "--baseline symm_mem: torch's fused ops are measured without --format only"
        )
    op = kind(place, DTYPES[request.dtype], *sizes, **settings)
    names, left_out = list(request.algorithms), []
    if request.algorithms == ("all",):
        reasons = {name: _why_not(name, op, place) for name in kind.algorithms}
        # "auto" of a fused op equals another algorithm; "auto" of a collective may be a separate engine
        if isinstance(op, ByRows):
            reasons.pop("auto")
        names = [name for name, reason in reasons.items() if not reason]
        left_out = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    # plain collectives have their own code for one rank
    lone = baselines.Alone(op, sizes, settings) if isinstance(op, ByRows) else op
    make = functools.partial(_op, op, lone, names, chosen)
    return baselines.torch_backend(chosen), left_out, make


def _why_not(name: str, op: MeasuredOp, place: Place) -> str:
    """Return why "all" excludes the algorithm, or "" if it does not. The same on all ranks."""
    if name.split()[-1] in TRITON and place.interpreted and not place.simulated:
        return "interpreted on a CPU"
    small = name == "low_latency"
    moves = small and isinstance(op, Plain) and not op.reduces
    dtype = str(op.dtype).removeprefix("torch.")
    if dtype not in NARROW and name not in WIDE and not moves:
        return f"not for {dtype}"
    if small and op.message_bytes > MOST_BYTES:
        return f"for at most {MOST_BYTES >> 10} KiB a rank"
    if name == "multimem" and not place.interpreted and not default_group().arena.multicast():
        return "no multicast address"
    return ""


def _op(op: MeasuredOp, lone: Any, names: list[str], chosen: tuple[str, ...]) -> Subject:
    """Return interlace's algorithms, then the baselines, then the parts of a fused op."""
    timed = op.timed_inputs
    check: Any = op.check if op.nbytes else None
    loose: Any = functools.partial(op.check, rounds_often=True) if op.nbytes else None
    found = [
        BenchCandidate(name, ALGORITHM, op.ours(name), op.inputs, check, timed) for name in names
    ]
    for name in chosen:
        if name == "torch":
            if op.op == "barrier":
                raise ValueError("--baseline torch: a rank alone has no barrier")
            found.append(BenchCandidate(name, BASELINE, lone.alone, lone.alone_inputs, loose))
        elif name != "symm_mem":
            found.append(BenchCandidate(name, BASELINE, op.theirs, op.inputs, loose, timed))
        elif isinstance(op, Plain):
            found.append(baselines.symmetric_collective(op))
        else:
            run = baselines.symmetric_product(op.op)
            found.append(BenchCandidate(name, BASELINE, run, op.inputs, loose))
    subject = Subject(op.op, op.shape, op.nbytes, op.bus_factor, op.flops, candidates=found)
    if isinstance(op, Fused):
        product = "torch.mm alone" if op.format is None else "product alone"
        subject.matmul, subject.communication = product, f"{op.collective.op} alone"
        communicate, inputs = op.collective.ours("auto"), op.collective.timed_inputs
        found.append(BenchCandidate(subject.matmul, PART, op.product, op.matmul_inputs))
        found.append(BenchCandidate(subject.communication, PART, communicate, inputs))
    return subject


@functools.cache
def load_kernel(target: str) -> Callable[..., Any]:
    """Return the function that names a user's own kernel. Raises ValueError or OSError."""
    from interlace.tools.user_files import load_function

    return load_function(target)


def _own_kernel(request: BenchRequest, place: Place) -> Source:
    target, maker = request.target, load_kernel(request.target)
    arguments = kernel.arguments_for(maker, target, request.arguments)
    found = maker(**arguments)
    if not isinstance(found, kernel.Kernel):  # a callable to time, or the function itself is one
        whole = kernel.Kernel(lambda: maker(**arguments), check=lambda result, number: None)
        found = kernel.Kernel(found) if callable(found) else whole
    names = _own_baselines(request, found, place)
    function = target.rpartition("::")[2]
    sizes = {"m": request.m, "n": request.n, "k": request.k}
    numbers = {"bytes": found.nbytes or request.nbytes, **sizes}
    shape = {name: size for name, size in numbers.items() if size}
    subject = Subject(function, shape, found.nbytes, found.bus_factor, found.flops)

    def add(name: str, role: str, run: Callable[..., Any], check: Any) -> str:
        subject.candidates.append(
            BenchCandidate(name, role, run, found.inputs, check, copied=False)
        )
        return name

    add(function, ALGORITHM, found.run, found.check)
    for name in names:
        add(name, BASELINE, found.baselines[name], found.check)
    if found.matmul is not None and found.communication is not None:
        subject.matmul = add("matmul alone", PART, found.matmul, None)
        subject.communication = add("communication alone", PART, found.communication, None)
    return baselines.torch_backend(names), [], lambda: subject


def _own_baselines(request: BenchRequest, found: kernel.Kernel, place: Place) -> list[str]:
    names = []
    for name in found.baselines if request.chosen is None else request.chosen:
        if name not in found.baselines:
            known = ", ".join(found.baselines) or "no baselines"
            raise ValueError(f"--baseline {name}: {request.target} has {known}")
        try:
            if name in ("gloo", "nccl"):
                baselines.refuse(name, place.name, place.device.type, virtual=request.virtual)
            names.append(name)
        except ValueError:
            if request.chosen is not None:
                raise
    return names


@dataclass
class BenchRow:
    """One candidate at one size. Figures without a meaning are None.

    ``microseconds``: per call, of ``calls`` in a block. ``error``: the largest of all ranks, as a multiple
    of the allowed one; None if nothing was checked. ``said``: the message of a failed check. ``algbw``,
    ``busbw``: 10**9 bytes/s. ``tflops``: of one rank. ``speedup``: by baseline, how many times as fast.
    """

    name: str
    role: str
    calls: int
    microseconds: Spread
    blocks: list[float]
    error: float | None
    said: str
    rotated_bytes: int
    algbw: float | None = None
    busbw: float | None = None
    tflops: float | None = None
    overlap: float | None = None
    speedup: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool | None:
        return None if self.error is None else self.error <= 1

    def to_dict(self) -> dict[str, Any]:
        """Return data for JSON, which has no infinity."""
        finite = self.error is not None and math.isfinite(self.error)
        error = self.error if finite else None
        return {**asdict(self), "error": error, "right": self.right}


@dataclass(kw_only=True)
class MeasuredSize(Facts):
    """All results of one size; ``cache_bytes``: of the cache that inputs are rotated past."""

    place: str
    device: str
    world_size: int
    dtype: str
    format: str
    cache_bytes: int
    left_out: list[str]
    rows: list[BenchRow]

    def compare(self) -> None:
        medians = {row.name: row.microseconds.median for row in self.rows}
        compared = [row.name for row in self.rows if row.role == BASELINE]
        for row in self.rows:
            time = row.microseconds.median
            if self.nbytes and row.name != self.matmul:
                row.algbw = self.nbytes / time / 1e3
                row.busbw = None if self.bus_factor is None else row.algbw * self.bus_factor
            if self.flops and row.name != self.communication:
                row.tflops = self.flops / time / 1e6
            if self.matmul and self.communication and self.world_size > 1 and row.role == ALGORITHM:
                parts = medians[self.matmul], medians[self.communication]
                row.overlap = overlap(*parts, time)
            if row.role != PART:
                row.speedup = {name: medians[name] / time for name in compared if name != row.name}


@dataclass
class SizeResult:
    """One size: the results; or, with ``failed``, how its run failed. ``request``: its label then."""

    sizes: MeasuredSize | None
    failed: str = ""
    request: str = ""

    @property
    def rows(self) -> list[BenchRow]:
        return [] if self.sizes is None else self.sizes.rows

    @property
    def right(self) -> bool:
        return not self.failed and all(row.right is not False for row in self.rows)

    @property
    def heading(self) -> str:
        """The parts of :attr:`label`, as a column's heading: "size", "m x n x k"."""
        names = [] if self.sizes is None else [name for name in self.sizes.shape if name != "bytes"]
        return " x ".join(names) or "size"

    @property
    def label(self) -> str:
        """The shape, for tables: "64 KiB", "1024 x 512 x 512"."""
        if self.sizes is None:
            return self.request or "-"
        shape = dict(self.sizes.shape)
        return _in_words(shape.pop("bytes", None), shape.values()) or "-"

    def to_dict(self) -> dict[str, Any]:
        facts = {} if self.sizes is None else asdict(self.sizes)
        return {**facts, "failed": self.failed, "rows": [row.to_dict() for row in self.rows]}


Tick = Callable[[int, int], None]


def rank_0(tick: Tick) -> Tick:
    return tick if default_group().rank == 0 else lambda done, total: None


def measure(request: BenchRequest, tick: Tick) -> MeasuredSize:
    """Measure one size. Collective; the same on every rank. ``tick(done, total)`` is for progress."""
    place = default_group().place
    backend, left_out, make = source(request, place)
    with baselines.join_default_group(backend, request.store, place.rank, place.world_size):
        subject = make()
        rows = _measure(subject, request, place, rank_0(tick))
    sizes = MeasuredSize(
        **{each.name: getattr(subject, each.name) for each in fields(Facts)},
        place=place.name,
        device=place.device.type,
        world_size=place.world_size,
        dtype=request.dtype,
        format=str(dict(request.settings).get("format", "")),
        cache_bytes=cache_bytes(place.device),
        left_out=left_out,
        rows=rows,
    )
    sizes.compare()
    return sizes


def _measure(subject: Subject, request: BenchRequest, place: Place, tick: Tick) -> list[BenchRow]:
    candidates = subject.candidates
    total = len(candidates) * (request.repetitions + 2)
    done = itertools.count()

    def step() -> None:
        tick(next(done), total)

    step()
    errors: dict[str, tuple[float | None, str]] = {}

    def check_all(number: int) -> None:
        for candidate in candidates:
            error, message = errors.get(candidate.name, (None, ""))
            now, now_said = _check_once(candidate, number, virtual=request.virtual)
            if now is not None:
                errors[candidate.name] = (max(now, error or 0.0), message or now_said)
            step()

    check_all(0)
    rotations: dict[Any, protocol.Rotation] = {}
    rotated_bytes, functions = {}, {}
    for candidate in candidates:
        make = candidate.timed_inputs or candidate.inputs
        if make not in rotations:
            first = make(0)
            count, set_bytes = sets_of(first, place)
            count = min(count, candidate.most_sets)
            further = protocol.copies_of(first, count) if candidate.copied else None
            sets = further or [first, *map(make, range(1, count))]
            rotations[make], rotated_bytes[make] = protocol.Rotation(sets), count * set_bytes
        functions[candidate.name] = rotations[make].calling(candidate.run)
    timings = protocol.alternate(functions, request.repetitions, virtual=request.virtual, tick=step)
    functions.clear()  # they hold the inputs
    rotations.clear()
    check_all(1)
    return [
        BenchRow(
            candidate.name,
            candidate.role,
            timings[candidate.name].calls,
            Spread.of(timings[candidate.name].microseconds),
            timings[candidate.name].microseconds,
            *errors.get(candidate.name, (None, "")),
            rotated_bytes[candidate.timed_inputs or candidate.inputs],
        )
        for candidate in candidates
    ]


def sets_of(first: tuple[Any, ...], place: Place) -> tuple[int, int]:
    """Return the number of sets of inputs that get past the cache, and the bytes of one. Collective."""
    # the largest: the number must be equal on every rank, because making inputs may be collective
    set_bytes = int(protocol.slowest(protocol.total_bytes(first)))
    count = 1 if place.simulated else sets_needed(set_bytes, cache_bytes(place.device))
    return count, set_bytes


def _check_once(each: BenchCandidate, number: int, *, virtual: bool) -> tuple[float | None, str]:
    """Run once, and compare on all ranks: (largest error, message of the check). Collective."""
    result = each.run(*each.inputs(number))
    protocol.finish(virtual=virtual)
    if each.check is None:
        return None, ""
    verdict = kernel.verdict(each.check, result, number)
    verdicts = protocol.everyones(verdict)
    worst = max(range(len(verdicts)), key=lambda rank: verdicts[rank][0])
    error, message = verdicts[worst]
    return error, f"rank {worst}: {message}" if message else ""
