"""The ops of ``bench``, and candidates of a request: those of an op, or of a kernel of the user's own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlace.benchmark import attention, baselines, expert_rows, fused, kernel, norms, plain
from interlace.benchmark.alone import Alone
from interlace.benchmark.fused import ByRows, Fused
from interlace.benchmark.kernel import ALGORITHM, BASELINE, PART, BenchCandidate, Subject
from interlace.benchmark.plain import MeasuredOp, Plain
from interlace.groups.groups import default_group
from interlace.ops.collectives.low_latency import MOST_BYTES
from interlace.runtime.core.place import Place

_PLAIN: tuple[type[Plain], ...] = (
    plain.AllReduce, plain.AllGather, plain.ReduceScatter, plain.AllToAll, plain.Broadcast,
    plain.Reduce, plain.Gather, plain.Scatter, plain.SendRecv, plain.Barrier,
)  # fmt: skip
_FUSED: tuple[type[Fused], ...] = (
    fused.AllGatherMatmul,
    fused.MatmulReduceScatter,
    fused.MatmulAllReduce,
)
_BY_ROWS: tuple[type[ByRows], ...] = (
    norms.MatmulReduceScatterNorm, norms.MatmulAllReduceNorm,
    norms.AllReduceNorm, norms.ReduceScatterNorm, norms.GatherNormed,
    expert_rows.AllGatherGroupedRows, expert_rows.AllToAllGroupedRows,
    expert_rows.GroupedMatmulCombineRows, expert_rows.DispatchRows, expert_rows.CombineRows,
    fused.MatmulAllToAll, fused.AllToAllMatmul,
    attention.AttentionRows, attention.AttentionBackwardRows, attention.DecodeRows,
)  # fmt: skip
FUSED: dict[str, type[Fused]] = {kind.op: kind for kind in _FUSED}
"""Those that ``tune`` measures if none is named."""
TUNED: dict[str, type[ByRows]] = {kind.op: kind for kind in (*_FUSED, *_BY_ROWS)}
"""Those that it knows."""
_ALL: tuple[type[MeasuredOp], ...] = (*_PLAIN, *_FUSED, *_BY_ROWS)
OPS: dict[str, type[MeasuredOp]] = {kind.op: kind for kind in _ALL}

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}
# interpreted on a CPU, far too slow to measure unless asked for
TRITON = ("fused", "kernel", "multimem", "low_latency")
NARROW = ("float32", "float16", "bfloat16")  # all that most algorithms take
WIDE = ("auto", "unfused", "copy")


@dataclass(frozen=True)
class BenchRequest:
    """One size of one run.

    ``target``: an op or "file.py::function". ``algorithms``: names, ("all",), or () for a kernel of one's
    own. ``chosen``: baselines, or None for the default ones. ``store``: a file through which ranks of
    torch.distributed meet, None under ``torchrun``. ``settings``: what an op has besides sizes.
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
        """The arguments that a function of the user's own may take."""
        sizes = {"nbytes": self.nbytes, "m": self.m, "n": self.n, "k": self.k}
        return {**sizes, "dtype": DTYPES[self.dtype]}

    @property
    def own(self) -> bool:
        """Whether it is about a kernel of the user's own."""
        return "::" in self.target


@dataclass
class Source:
    """``make()`` gives the subject, once torch.distributed has ``backend``; ``left_out`` of "all", why."""

    backend: str | None
    left_out: list[str]
    make: Callable[[], Subject]


def source(request: BenchRequest, place: Place) -> Source:
    """The source of ``request``'s subjects on the calling rank. Collective for a kernel of one's own."""
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
    sizes = [getattr(request, size) for size in kind.sizes]
    settings = dict(request.settings)
    op = kind(place, DTYPES[request.dtype], *sizes, **settings)
    names, left_out = list(request.algorithms), []
    if request.algorithms == ("all",):
        reasons = {name: _why_not(name, op, place) for name in kind.algorithms}
        # of a fused op "auto" is one of the others; of a collective it may be an engine of its own
        if isinstance(op, ByRows):
            reasons.pop("auto")
        names = [name for name, reason in reasons.items() if not reason]
        left_out = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    # of plain collectives the op itself knows the way on one rank
    lone = Alone(op, sizes, settings) if isinstance(op, ByRows) else op
    make = functools.partial(_op, op, lone, names, chosen)
    return Source(baselines.torch_backend(chosen), left_out, make)


def _why_not(name: str, op: MeasuredOp, place: Place) -> str:
    """Why "all" does not stand for the algorithm, empty if it does. The same on all ranks."""
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
    """interlace's algorithms, then the baselines, then the parts of a fused op."""
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
        elif isinstance(op, ByRows):
            run = op.symmetric(baselines.group_name())
            found.append(BenchCandidate(name, BASELINE, run, op.inputs, loose))
        elif isinstance(op, Plain):
            found.append(baselines.symmetric_collective(op))
    subject = Subject(op.op, op.shape, op.nbytes, op.bus_factor, op.flops, candidates=found)
    if isinstance(op, Fused):
        subject.matmul, subject.communication = "torch.mm alone", f"{op.collective.op} alone"
        communicate, inputs = op.collective.ours("auto"), op.collective.timed_inputs
        found.append(BenchCandidate(subject.matmul, PART, torch.mm, op.matmul_inputs))
        found.append(BenchCandidate(subject.communication, PART, communicate, inputs))
    return subject


@functools.cache
def loaded(target: str) -> Callable[..., Any]:
    """The function that a kernel of one's own is named by. Raises ValueError or OSError."""
    from interlace.tools.user_files import load_function

    return load_function(target)


def _own_kernel(request: BenchRequest, place: Place) -> Source:
    target, maker = request.target, loaded(request.target)
    arguments = kernel.arguments_for(maker, target, request.arguments)
    found = maker(**arguments)
    if not isinstance(found, kernel.Kernel):  # a callable to time, or the function itself is that
        whole = kernel.Kernel(lambda: maker(**arguments), check=lambda result, number: None)
        found = kernel.Kernel(found) if callable(found) else whole
    names = _own_baselines(request, found, place)
    function = target.rpartition("::")[2]
    sizes = {"m": request.m, "n": request.n, "k": request.k}
    every = {"bytes": found.nbytes or request.nbytes, **sizes}
    shape = {name: size for name, size in every.items() if size}
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
    return Source(baselines.torch_backend(names), [], lambda: subject)


def _own_baselines(request: BenchRequest, found: kernel.Kernel, place: Place) -> list[str]:
    """The baselines that were asked for, or all that this place has."""
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
