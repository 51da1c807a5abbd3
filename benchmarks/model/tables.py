"""The tables that ``predict.py`` prints and the two pages about the model show.

Everything predicted is called so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from model.calibration import compare_measured
from model.choose import (
    ROWS,
    SHAPES,
    Recommendation,
    order_effects,
    recommended,
    sensitivities,
)
from model.fit import FITS
from model.predict import default_configuration, predict
from model.published import NOT_MODELLED, Compared
from model.simulation.kernels import Shape
from model.simulation.machines import PARAMETERS, ModelMachine

Progress = Callable[[str], None]
NODES = (2, 4, 8, 16, 32, 64, 128)
GATHER_ROWS, SCATTER_ROWS = 512, 256  # per rank, for several nodes
LATE_SUMS_UP_TO = 16  # nodes: beyond, slower still and slow to simulate
VIRTUAL_SHAPES = (
    (4096, 3584, 8192),
    (8192, 3584, 8192),
    (8192, 6656, 16384),
)  # as gpu_parts/overlap.py
SLOW_SHAPES = ((8192, 4608, 8192), (8192, 7168, 8192), (8192, 14336, 8192))


@dataclass(frozen=True)
class Table:
    """Head and cells."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def text(self) -> str:
        """For a terminal."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        rule = "-" * min(108, sum(widths) + 2 * len(widths))
        return "\n".join([self.title, rule, *body, *([self.note] if self.note else []), ""])

    def markdown(self) -> str:
        """For a page."""
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return table + (f"\n{self.note}\n" if self.note else "")


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _dims(shape: Shape) -> tuple[str, ...]:
    return str(shape.m), str(shape.n), str(shape.k)


def parameters(machine: ModelMachine) -> Table:
    """Every parameter with its source."""
    rows = [(name, f"{getattr(machine, name):,.4g}", machine.sources[name]) for name in PARAMETERS]
    return Table(
        "parameters",
        f"Parameters of {machine.name}: {machine.title}",
        ("", "value", "source"),
        rows,
    )


def published(found: Sequence[Compared]) -> Table:
    """Published speedups and the model's."""
    rows = []
    for each in found:
        case = each.published
        nodes = f", {case.shape.nodes} nodes" if case.shape.nodes > 1 else ""
        op = "AG" if case.shape.op == "all_gather_matmul" else "RS"
        rows.append(
            (
                case.machine + nodes,
                f"{case.algorithm}, {op}",
                *_dims(case.shape),
                f"{case.speedup:.2f}",
                f"{each.predicted:.2f}",
                f"{each.error:+.0%}" + ("" if each.within else " *"),
                "held out" if case.held_out else "fitted",
            )
        )
    return Table(
        "published",
        "Speedup over NCCL + cuBLAS, published and by the model",
        ("machine", "whose", "M", "N", "K", "published", "model", "error", ""),
        rows,
        "N and K are the sizes on one rank. * more than 15 % off.",
    )


def summary(found: Sequence[Compared]) -> Table:
    """How many are within 15 %, by machine and op."""
    groups: dict[tuple[str, str, str], list[Compared]] = {}
    for each in found:
        shape = each.published.shape
        rows = "M <= 2048" if shape.m <= 2048 else "M >= 4096"
        place = each.published.machine + (f", {shape.nodes} nodes" if shape.nodes > 1 else "")
        groups.setdefault((place, shape.op, rows), []).append(each)
    lines = []
    for (place, op, rows), members in groups.items():
        errors = sorted(each.error for each in members)
        within = sum(each.within for each in members)
        lines.append(
            (
                place,
                op,
                rows,
                f"{within} of {len(members)}",
                f"{errors[0]:+.0%} to {errors[-1]:+.0%}",
            )
        )
    total = sum(each.within for each in found)
    held = [each for each in found if each.published.held_out]
    free = sum(each.within for each in held)
    note = f"In all {total} of {len(found)}; of the {len(held)} that are held out {free}."
    return Table(
        "summary",
        "Published speedups that the model gives to within 15 %",
        ("machine", "op", "rows", "within", "errors"),
        lines,
        note,
    )


def outside(found: Sequence[Compared]) -> Table:
    """Where the model is off, and why."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for each in found:
        if not each.within:
            groups.setdefault((each.published.source, each.why), []).append(each)
    rows = []
    for (source, why), members in groups.items():
        names = ", ".join(dict.fromkeys(each.published.algorithm for each in members))
        ms = ", ".join(dict.fromkeys(str(each.published.shape.m) for each in members))
        errors = ", ".join(f"{each.error:+.0%}" for each in members)
        rows.append((source, names, ms, errors, why))
    return Table("outside", "More than 15 % off", ("source", "whose", "M", "errors", "why"), rows)


def not_modelled() -> Table:
    """Published figures without a counterpart."""
    return Table("not-modelled", "Not modelled", ("figure", "published", "why"), [*NOT_MODELLED])


def one_node(machine: ModelMachine, progress: Progress) -> Table:
    """Both fused ops on 8 ranks, by rows."""
    rows = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        names = ["unfused", "fused", "pipelined", "symm_mem"]
        n, k = SHAPES[1] if op == "all_gather_matmul" else (SHAPES[1][1], SHAPES[1][0])
        for m in ROWS:
            shape = Shape(op, m, n, k)
            progress(f"{machine.name}: {shape}")
            found = {name: predict(machine, shape, name) for name in names}
            fused = found["fused"]
            by_sms = "-"
            if op == "all_gather_matmul":
                by_sms = _us(predict(machine, shape, "fused by SMs").microseconds)
            rows.append(
                (
                    op,
                    *_dims(shape),
                    _us(fused.matmul_us),
                    _us(fused.collective_us),
                    *[_us(found[name].microseconds) for name in ("unfused", "fused")],
                    by_sms,
                    *[_us(found[name].microseconds) for name in ("pipelined", "symm_mem")],
                    f"{found['unfused'].microseconds / fused.microseconds:.2f}",
                    f"{fused.overlap:.2f}",
                )
            )
    return Table(
        "one-node",
        f"Predicted microseconds on {machine.name}, 8 ranks",
        ("op", "M", "N", "K", "cuBLAS", "NCCL", "unfused", "fused", "by 32 SMs", "pipelined",
         "torch symm_mem", "fused over unfused", "overlap"),
        rows,
        "fused: interlace's kernel with its default chunks, sending by copy engine.",
    )  # fmt: skip


def recommendation(machine: ModelMachine, progress: Progress) -> tuple[Table, list[Recommendation]]:
    """Chunks and who sends them."""
    progress(f"{machine.name}: chunks")
    found = recommended(machine)
    rows = [
        (
            *_dims(each.shape),
            str(each.chunks),
            str(each.chunk_rows),
            f"{each.chunk_bytes / 1e6:.1f}",
            "copy engine" if not each.copiers else f"{each.copiers} programs",
            each.order,
            _us(each.microseconds),
            _us(each.default_us),
            _us(each.unfused_us),
            each.take,
        )
        for each in found
    ]
    table = Table(
        "recommended",
        f"Recommended for all_gather_matmul on {machine.name}, 8 ranks; predicted microseconds",
        ("M", "N", "K", "chunks", "rows", "MB", "sent by", "order", "so", "default chunks",
         "unfused", "take"),
        rows,
        "chunks: of a shard. default chunks: gpu_default's, by copy engine. measure: speedup below 1.15.",
    )  # fmt: skip
    return table, found


def orders_of(machine: ModelMachine, progress: Progress) -> Table:
    """Return the costs of orders."""
    shapes = (
        Shape("all_gather_matmul", 8192, 1792, 4096),
        Shape("all_gather_matmul", 8192, 3584, 8192),
        Shape("matmul_reduce_scatter", 8192, 8192, 3584),
        Shape("all_gather_matmul", 512 * 128, 3584, 8192, 128, 16),
        Shape("matmul_reduce_scatter", 256 * 128, 8192, 3584, 128, 16),
    )
    rows = []
    for shape in shapes:
        progress(f"{machine.name}: orders, {shape}")
        for each in order_effects(machine, shape):
            rows.append((str(shape), each.order, _us(each.microseconds), f"{each.relative:.2f}"))
    return Table(
        "orders",
        f"Orders of the fused algorithm on {machine.name}, predicted",
        ("op and shape", "order", "us", "relative to the first"),
        rows,
    )


def several_nodes(machine: ModelMachine, progress: Progress, most: int = NODES[-1]) -> Table:
    """2 to 128 nodes of 8, every rank with equally many rows."""
    rows = []
    for nodes in NODES:
        if nodes > most:
            break
        world_size = machine.gpus_per_node * nodes
        progress(f"{machine.name}: {nodes} nodes")
        gather = Shape("all_gather_matmul", GATHER_ROWS * world_size, 3584, 8192, world_size, nodes)
        scatter = Shape(
            "matmul_reduce_scatter", SCATTER_ROWS * world_size, 8192, 3584, world_size, nodes
        )
        whole = replace(default_configuration(gather), chunks=1)
        cells = [str(nodes), str(world_size)]
        unfused = predict(machine, gather, "unfused").microseconds
        times = [
            predict(machine, gather, "fused", whole, order=order).microseconds
            for order in ("node_order", "by holder")
        ]
        cells += [_us(unfused), *[_us(each) for each in times], f"{unfused / min(times):.2f}"]
        unfused = predict(machine, scatter, "unfused").microseconds
        summing = predict(machine, scatter, "fused").microseconds
        late = "-"
        if nodes <= LATE_SUMS_UP_TO:
            late = _us(predict(machine, scatter, "fused", order="all sum at the end").microseconds)
        cells += [_us(unfused), _us(summing), late, f"{unfused / summing:.2f}"]
        rows.append(tuple(cells))
    return Table(
        "nodes",
        f"Predicted microseconds on nodes of {machine.name}",
        ("nodes", "ranks", "AG unfused", "AG node_order", "AG by holder", "speedup", "RS unfused",
         "RS 16 programs sum", "RS sums at the end", "speedup"),
        rows,
        f"AG: {GATHER_ROWS} rows per rank, N = 3584, K = 8192, whole shards. "
        f"RS: {SCATTER_ROWS} rows per rank, N = 8192, K = 3584.",
    )  # fmt: skip


def sensitivity(machine: ModelMachine, progress: Progress) -> Table:
    """Return the effects of assumed and fitted parameters."""
    rows = []
    for shape in (
        Shape("all_gather_matmul", 8192, 3584, 8192),
        Shape("all_gather_matmul", 8192, 1792, 4096),
        Shape("matmul_reduce_scatter", 8192, 8192, 3584),
    ):
        progress(f"{machine.name}: sensitivity, {shape}")
        for each in sensitivities(machine, shape):
            if each.largest >= 0.02:
                case = f"{shape.op}, N = {shape.n}, K = {shape.k}"
                rows.append(
                    (case, each.parameter, f"{each.half - 1:+.0%}", f"{each.twice - 1:+.0%}")
                )
    return Table(
        "sensitivity",
        f"Predicted time of fused at M = 8192 if a parameter that nobody has published were wrong "
        f"({machine.name})",
        ("op and shape", "parameter", "half of it", "twice of it"),
        rows,
        "Parameters that change less than 2 % are left out.",
    )


def one_gpu(machine: ModelMachine, progress: Progress) -> Table:
    """Virtual ranks, or a slow link: what ``gpu.py`` measures."""
    rows = []
    names: tuple[str, ...] = ("unfused", "fused", "pipelined", "symm_mem")
    cases = [
        case
        for world_size in (2, 4, 8)
        for m, n, k in VIRTUAL_SHAPES
        for case in (
            Shape("all_gather_matmul", m, n, k, world_size),
            Shape("matmul_reduce_scatter", m, k, n, world_size),
        )
    ]
    if not machine.virtual_ranks:
        cases = [Shape("all_gather_matmul", *shape, w) for w in (2, 4) for shape in SLOW_SHAPES]
        names = ("unfused", "fused")
    for shape in cases:
        progress(f"{machine.name}: {shape}")
        found = {name: predict(machine, shape, name) for name in names}
        rows.append(
            (
                shape.op,
                str(shape.world_size),
                *_dims(shape),
                *[_us(found[name].microseconds) for name in names],
                f"{found['fused'].overlap:.2f}",
            )
        )
    return Table(
        "one-gpu",
        f"Predicted microseconds on {machine.name}: {machine.title}",
        ("op", "W", "M", "N", "K", *names, "overlap"),
        rows,
    )


def measured(machine: ModelMachine) -> Table | None:
    """Result files against predictions; None where there is none."""
    found = compare_measured(machine)
    if not found:
        return None
    rows = [
        (
            each.case,
            each.candidate,
            _us(each.measured_us),
            _us(each.predicted_us),
            f"{each.error:+.0%}",
        )
        for each in found
    ]
    return Table(
        "measured",
        f"Measured and predicted microseconds, {machine.name}",
        ("case", "candidate", "measured", "predicted", "error"),
        rows,
    )


def refitted(progress: Progress) -> Table:
    """The fitted parameters, again."""
    rows = []
    for fit in FITS:
        progress(f"fit: {fit.machine} {fit.parameter}")
        rows.append(
            (fit.machine, fit.parameter, f"{fit.stored():.4g}", f"{fit.best():.4g}", fit.to)
        )
    return Table("fits", "Fits", ("machine", "parameter", "stored", "now", "to"), rows)
