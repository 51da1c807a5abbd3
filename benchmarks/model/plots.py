"""Plots of the model, by matplotlib, which is optional."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlace.output.files import require_matplotlib
from model.choose import ROWS, SHAPES
from model.predict import default_configuration, predict
from model.published import TOLERANCE, Compared
from model.simulation.kernels import Shape, Span
from model.simulation.machines import ModelMachine
from model.tables import Table

Progress = Callable[[str], None]
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
    axes.set_xticks(sizes, [str(each) for each in sizes])


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
            how = {"color": f"C{SHAPES.index((n, k))}", "label": f"N = {n}, K = {k}, M = {m}"}
            axes.plot(CHUNKS, points, style, marker="o", markersize=4, **how)
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
