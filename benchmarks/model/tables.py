"""The tables that ``predict.py`` prints and the two pages about the model show.

Everything predicted is called so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_parts.overlap import SLOW_SHAPES, VIRTUAL_SHAPES

from interlace.output.files import require_matplotlib
from model.choose import ROWS, SHAPES, order_times, recommended, sensitivities
from model.fit import FITS, compare_measured
from model.predict import algorithms, default_configuration, predict
from model.published import NOT_MODELLED, TOLERANCE, Compared
from model.simulation.kernels import Shape, Span
from model.simulation.machines import PARAMETERS, ModelMachine

Progress = Callable[[str], None]
NODES = (2, 4, 8, 16, 32, 64, 128)
GATHER_ROWS, SCATTER_ROWS = 512, 256  # per rank, for several nodes
LATE_SUMS_UP_TO = 16  # nodes: beyond, slower still and slow to simulate


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def text(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        rule = "-" * min(108, sum(widths) + 2 * len(widths))
        return "\n".join([self.title, rule, *body, *([self.note] if self.note else []), ""])

    def markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return table + (f"\n{self.note}\n" if self.note else "")


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _dims(shape: Shape) -> tuple[str, ...]:
    return str(shape.m), str(shape.n), str(shape.k)


def parameters(machine: ModelMachine) -> Table:
    rows = [(name, f"{getattr(machine, name):,.4g}", machine.sources[name]) for name in PARAMETERS]
    return Table(
        "parameters",
        f"Parameters of {machine.name}: {machine.title}",
        ("", "value", "source"),
        rows,
    )


def published(found: Sequence[Compared]) -> Table:
    rows = []
    for each in found:
        case = each.published
        nodes = f", {case.shape.nodes} nodes" if case.shape.nodes > 1 else ""
        op = "AG" if case.shape.op == "all_gather_matmul" else "RS"
        about = case.machine + nodes, f"{case.algorithm}, {op}", *_dims(case.shape)
        error = f"{each.error:+.0%}" + ("" if each.within else " *")
        figures = f"{case.speedup:.2f}", f"{each.predicted:.2f}", error
        rows.append((*about, *figures, "held out" if case.held_out else "fitted"))
    return Table(
        "published",
        "Speedup over NCCL + cuBLAS, published and by the model",
        ("machine", "whose", "M", "N", "K", "published", "model", "error", ""),
        rows,
        "N and K are the sizes on one rank. * more than 15 % off.",
    )


def summary(found: Sequence[Compared]) -> Table:
    groups: dict[tuple[str, str, str], list[Compared]] = {}
    for each in found:
        shape = each.published.shape
        rows = "M <= 2048" if shape.m <= 2048 else "M >= 4096"
        place = each.published.machine + (f", {shape.nodes} nodes" if shape.nodes > 1 else "")
        groups.setdefault((place, shape.op, rows), []).append(each)
    lines = []
    for (place, op, rows), members in groups.items():
        errors = sorted(member.error for member in members)
        within = sum(member.within for member in members)
        figures = f"{within} of {len(members)}", f"{errors[0]:+.0%} to {errors[-1]:+.0%}"
        lines.append((place, op, rows, *figures))
    total = sum(each.within for each in found)
    held = [each for each in found if each.published.held_out]
    free = sum(each.within for each in held)
    note = (
        f"{total} of {len(found)} are within 15 %, and {free} of the {len(held)} that are held out."
    )
    return Table(
        "summary",
        "Published speedups that the model gives to within 15 %",
        ("machine", "op", "rows", "within", "errors"),
        lines,
        note,
    )


def outside(found: Sequence[Compared]) -> Table:
    groups: dict[tuple[str, str], list[Compared]] = {}
    for each in found:
        if not each.within:
            groups.setdefault((each.published.source, each.why), []).append(each)
    rows = []
    for (source, why), members in groups.items():
        names = ", ".join(dict.fromkeys(member.published.algorithm for member in members))
        ms = ", ".join(dict.fromkeys(str(member.published.shape.m) for member in members))
        errors = ", ".join(f"{member.error:+.0%}" for member in members)
        rows.append((source, names, ms, errors, why))
    return Table("outside", "More than 15 % off", ("source", "whose", "M", "errors", "why"), rows)


def not_modelled() -> Table:
    return Table("not-modelled", "Not modelled", ("figure", "published", "why"), [*NOT_MODELLED])


def one_node(machine: ModelMachine, progress: Progress) -> Table:
    rows = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        names = ["unfused", "fused", "fused by SMs", "pipelined", "symm_mem"]
        n, k = SHAPES[1] if op == "all_gather_matmul" else (SHAPES[1][1], SHAPES[1][0])
        for m in ROWS:
            shape = Shape(op, m, n, k)
            progress(f"{machine.name}: {shape}")
            known = [name for name in names if name in algorithms(op)]
            found = {name: predict(machine, shape, name) for name in known}
            times = [_us(found[name].microseconds) if name in found else "-" for name in names]
            fused, gain = found["fused"], found["unfused"].microseconds
            alone = _us(fused.matmul_us), _us(fused.collective_us)
            ratios = f"{gain / fused.microseconds:.2f}", f"{fused.overlap:.2f}"
            rows.append((op, *_dims(shape), *alone, *times, *ratios))
    return Table(
        "one-node",
        f"Predicted microseconds on {machine.name}, 8 ranks",
        ("op", "M", "N", "K", "cuBLAS", "NCCL", "unfused", "fused", "by 32 SMs", "pipelined",
         "torch symm_mem", "fused over unfused", "overlap"),
        rows,
        "fused: interlace's kernel with its default chunks, sending by copy engine.",
    )  # fmt: skip


def recommendation(machine: ModelMachine, progress: Progress) -> Table:
    progress(f"{machine.name}: chunks")
    rows = []
    for each in recommended(machine):
        chunk = str(each.chunks), str(each.chunk_rows), f"{each.chunk_bytes / 1e6:.1f}"
        sender = "copy engine" if not each.copiers else f"{each.copiers} programs"
        times = map(_us, (each.microseconds, each.default_us, each.unfused_us))
        rows.append((*_dims(each.shape), *chunk, sender, each.order, *times, each.take))
    return Table(
        "recommended",
        f"Recommended for all_gather_matmul on {machine.name}, 8 ranks; predicted microseconds",
        ("M", "N", "K", "chunks", "rows", "MB", "sent by", "order", "so", "default chunks",
         "unfused", "take"),
        rows,
        "chunks: of a shard. default chunks: gpu_default's, by copy engine. measure: speedup below 1.15.",
    )  # fmt: skip


def orders_of(machine: ModelMachine, progress: Progress) -> Table:
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
        times = order_times(machine, shape)
        first = next(iter(times.values()))
        rows += [(str(shape), order, _us(us), f"{us / first:.2f}") for order, us in times.items()]
    return Table(
        "orders",
        f"Orders of the fused algorithm on {machine.name}, predicted",
        ("op and shape", "order", "us", "relative to the first"),
        rows,
    )


def several_nodes(machine: ModelMachine, progress: Progress, most: int = NODES[-1]) -> Table:
    rows, orders = [], ("node_order", "by holder")
    for nodes in NODES:
        if nodes > most:
            break
        world_size = machine.gpus_per_node * nodes
        progress(f"{machine.name}: {nodes} nodes")

        def time_of(shape: Shape, algorithm: str = "fused", **options: Any) -> float:
            return predict(machine, shape, algorithm, **options).microseconds

        gather = Shape("all_gather_matmul", GATHER_ROWS * world_size, 3584, 8192, world_size, nodes)
        scatter = Shape(
            "matmul_reduce_scatter", SCATTER_ROWS * world_size, 8192, 3584, world_size, nodes
        )
        whole = replace(default_configuration(gather), chunks=1)
        cells = [str(nodes), str(world_size)]
        unfused = time_of(gather, "unfused")
        times = [time_of(gather, configuration=whole, order=order) for order in orders]
        cells += [_us(unfused), *map(_us, times), f"{unfused / min(times):.2f}"]
        unfused, summing, late = time_of(scatter, "unfused"), time_of(scatter), "-"
        if nodes <= LATE_SUMS_UP_TO:
            late = _us(time_of(scatter, order="all sum at the end"))
        rows.append((*cells, _us(unfused), _us(summing), late, f"{unfused / summing:.2f}"))
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
    rows = []
    for shape in (
        Shape("all_gather_matmul", 8192, 3584, 8192),
        Shape("all_gather_matmul", 8192, 1792, 4096),
        Shape("matmul_reduce_scatter", 8192, 8192, 3584),
    ):
        progress(f"{machine.name}: sensitivity, {shape}")
        case = f"{shape.op}, N = {shape.n}, K = {shape.k}"
        for parameter, changes in sensitivities(machine, shape):
            if max(map(abs, changes)) >= 0.02:
                rows.append((case, parameter, *(f"{change:+.0%}" for change in changes)))
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
        times = [_us(found[name].microseconds) for name in names]
        about = shape.op, str(shape.world_size), *_dims(shape)
        rows.append((*about, *times, f"{found['fused'].overlap:.2f}"))
    return Table(
        "one-gpu",
        f"Predicted microseconds on {machine.name}: {machine.title}",
        ("op", "W", "M", "N", "K", *names, "overlap"),
        rows,
    )


def measured(machine: ModelMachine) -> Table | None:
    """Return result files against predictions; None if there are none."""
    rows = [
        (case, name, _us(measured), _us(ours), f"{ours / measured - 1:+.0%}")
        for case, name, measured, ours in compare_measured(machine)
    ]
    if not rows:
        return None
    return Table(
        "measured",
        f"Measured and predicted microseconds, {machine.name}",
        ("case", "candidate", "measured", "predicted", "error"),
        rows,
    )


def refitted(progress: Progress) -> Table:
    rows = []
    for fit in FITS:
        progress(f"fit: {fit.machine} {fit.parameter}")
        values = f"{fit.stored():.4g}", f"{fit.best():.4g}"
        rows.append((fit.machine, fit.parameter, *values, fit.to))
    return Table("fits", "Fits", ("machine", "parameter", "stored", "now", "to"), rows)


CHUNKS = (1, 2, 4, 8)
TABLES = {
    "rows": "one-node",
    "chunks": "recommended",
    "timeline": "orders",
}  # that a plot is beside


def draw_all(
    machine: ModelMachine,
    found: Sequence[Compared],
    nodes: Table | None,
    folder: Path,
    progress: Progress,
    only: Sequence[str] | None = None,
) -> list[Path]:
    """Every plot into ``folder``, or those that belong to ``only`` these tables; the files."""
    figure_of = require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    plots: list[tuple[str, Callable[[Any], None], tuple[float, float]]] = [
        ("published", lambda axes: _published(axes, found), (5.2, 5.0)),
        ("rows", lambda axes: _rows(axes, machine), (6.4, 4.2)),
        ("chunks", lambda axes: _chunks(axes, machine), (8.0, 4.2)),
        ("timeline", lambda axes: _timeline(axes, machine), (8.4, 4.2)),
    ]
    if nodes is not None:
        plots.append(("nodes", lambda axes: _nodes(axes, nodes), (6.4, 4.2)))
    for name, draw, size in plots:
        if only is not None and TABLES.get(name, name) not in only:
            continue
        progress(f"plot: {name}")
        figure = figure_of(figsize=size, layout="constrained")
        draw(figure.subplots())
        path = folder / f"model-{name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        drawn.append(path)
    return drawn


def _published(axes: Any, found: Sequence[Compared]) -> None:
    low, high = 0.2, 2.0
    ends = [low, high]
    axes.plot(ends, ends, color="0.4", linewidth=1)
    lower, upper = ([end * (1 + sign * TOLERANCE) for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, lower, upper, color="0.9", label="within 15 %")
    groups = dict.fromkeys((each.published.machine, each.published.shape.nodes) for each in found)
    for (machine, nodes), marker in zip(groups, "osD^v", strict=False):
        for held_out, face in ((True, None), (False, "none")):
            points = [
                (each.published.speedup, each.predicted)
                for each in found
                if (each.published.machine, each.published.shape.nodes) == (machine, nodes)
                and each.published.held_out == held_out
            ]
            if points:
                label = f"{machine}, {nodes} nodes" if nodes > 1 else machine
                axes.plot(
                    *zip(*points, strict=True),
                    marker,
                    markersize=5,
                    markerfacecolor=face,
                    color=f"C{list(groups).index((machine, nodes))}",
                    label=label if held_out else f"{label}, fitted",
                )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = [0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlabel="published speedup over NCCL + cuBLAS", ylabel="speedup by the model")
    axes.legend(fontsize=8)


def _relative(axes: Any, sizes: Sequence[int]) -> None:
    axes.axhline(1.0, color="0.4", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])


def _rows(axes: Any, machine: ModelMachine) -> None:
    n, k = SHAPES[1]
    for name, style in (
        ("unfused", "-"), ("symm_mem", "-"), ("pipelined", "-"), ("fused by SMs", "-"), ("fused", "-"),
    ):  # fmt: skip
        ratios = []
        for m in ROWS:
            found = predict(machine, Shape("all_gather_matmul", m, n, k), name)
            ratios.append(found.microseconds / found.matmul_us)
        label = "torch symm_mem" if name == "symm_mem" else name
        axes.plot(ROWS, ratios, style, marker="o", markersize=4, label=label)
    _relative(axes, ROWS)
    axes.set(
        xlabel="rows M", ylabel="predicted time / cuBLAS alone", ylim=(0.9, 3.5),
        title=f"all_gather_matmul, N = {n}, K = {k}, 8 ranks, {machine.name}",
    )  # fmt: skip
    axes.legend(fontsize=8)


def _chunks(axes: Any, machine: ModelMachine) -> None:
    for n, k in SHAPES:
        for m, style in ((2048, ":"), (4096, "--"), (16384, "-")):
            shape = Shape("all_gather_matmul", m, n, k)
            unfused = predict(machine, shape, "unfused").microseconds
            points = []
            for chunks in CHUNKS:
                tried = replace(default_configuration(shape), chunks=chunks)
                points.append(predict(machine, shape, "fused", tried).microseconds / unfused)
            line = {"color": f"C{SHAPES.index((n, k))}", "label": f"N = {n}, K = {k}, M = {m}"}
            axes.plot(CHUNKS, points, style, marker="o", markersize=4, **line)
    _relative(axes, CHUNKS)
    axes.set(
        xlabel="chunks of a shard", ylabel="predicted time / unfused",
        title=f"all_gather_matmul, 8 ranks, {machine.name}",
    )  # fmt: skip
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _nodes(axes: Any, nodes: Table) -> None:
    counts = [int(row[0]) for row in nodes.rows]

    def column(index: int) -> list[float]:
        return [float(row[index].replace(",", "")) for row in nodes.rows]

    for label, unfused, fused in (
        ("all_gather_matmul, order of node_order", 2, 3),
        ("all_gather_matmul, by holder", 2, 4),
        ("matmul_reduce_scatter, 16 programs sum", 6, 7),
    ):
        ratios = [a / b for a, b in zip(column(unfused), column(fused), strict=True)]
        axes.plot(counts, ratios, marker="o", markersize=4, label=label)
    _relative(axes, counts)
    axes.set(xlabel="nodes of 8", ylabel="predicted speedup over NCCL + cuBLAS")
    axes.legend(fontsize=8)


def _timeline(axes: Any, machine: ModelMachine) -> None:
    """Which rank's rows the programs of one rank multiply, where the link is nearly the limit."""
    shape = Shape("all_gather_matmul", 8192, 1792, 4096)
    log: list[Span] = []
    predict(machine, shape, "fused", replace(default_configuration(shape), chunks=1), log=log)
    shown = 0
    for span in log:
        if span.kind == "copy":
            axes.barh(-4, span.end - span.begin, 6, span.begin, color=f"C{span.peer}")
        elif span.kind == "tile":
            axes.barh(span.program, span.end - span.begin, 1, span.begin, color=f"C{span.peer}")
            shown = max(shown, span.program)
        elif span.kind == "wait" and span.end > span.begin:
            axes.barh(span.program, span.end - span.begin, 1, span.begin, color="0.9")
    for rank in range(shape.world_size):
        axes.barh(0, 0, color=f"C{rank}", label=f"rank {rank}")
    axes.barh(0, 0, color="0.9", label="waiting")
    axes.set(
        ylim=(-9, shown + 1), xlabel="predicted microseconds", ylabel="program of rank 0",
        title=f"Whose rows are multiplied (below: to whom the copy engine sends), {machine.name}",
    )  # fmt: skip
    axes.legend(fontsize=7, ncols=3, loc="lower right")
