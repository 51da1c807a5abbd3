"""A matmul with its all-gather on two ranks, as ``benchmarks/timeline.py`` has measured it."""

import json
from pathlib import Path

from drawings.svg import Drawing

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
NAMES = {
    "gloo": "gloo's all-gather, then torch.mm",
    "unfused": "interlace, unfused",
    "pipelined": "interlace, pipelined",
}
LEFT, WIDTH, TOP, ROW, GROUP = 54, 416, 76, 24, 92


def timeline() -> str:
    file = sorted(RESULTS.glob("timeline-*.json"))[-1]
    measured = json.loads(file.read_text())
    shape, ways = measured["shape"], measured["ways"]
    scale = WIDTH / max(way["microseconds"] for way in ways.values())
    drawing = Drawing(TOP + GROUP * len(ways) + 72, "A matmul with its all-gather, as measured")
    legend = {
        "plain": "gather or copy", "solid": "matmul of all rows", "rank0": "of rows of rank 0",
        "rank1": "of rows of rank 1", "wait": "anything else",
    }  # fmt: skip
    for number, (kind, name) in enumerate(legend.items()):
        row, column = divmod(number, 3)
        drawing.legend(LEFT + 142 * column, 8 + 20 * row, name, kind)
    for top, (name, way) in zip(range(TOP, 1000, GROUP), ways.items(), strict=False):
        drawing.text(LEFT, top - 6, f"{NAMES[name]}: {way['microseconds'] / 1e3:.2f} ms", "bold")
        for rank, steps in enumerate(way["steps"]):
            row = top + 4 + (ROW + 4) * rank
            drawing.text(LEFT - 8, row + 16, f"rank {rank}", "small faint", "end")
            drawing.rect(LEFT, row, scale * way["microseconds"], ROW, "wait")
            matmuls = [step for step in steps if step[0] == "matmul"]
            for step in steps:
                kind, begin, end = step
                if kind == "matmul" and len(matmuls) > 1:  # the rank's own rows come first
                    kind = f"rank{(rank + matmuls.index(step)) % shape['ranks']}"
                style = {"matmul": "solid", "copy": "plain", "gather": "plain"}.get(kind, kind)
                drawing.rect(LEFT + scale * begin, row, scale * (end - begin) - 0.5, ROW, style)
    drawing.paragraph(
        LEFT,
        TOP + GROUP * len(ways) + 12,
        f"{shape['m']} x {shape['k']} times {shape['k']} x {shape['n']}, {shape['dtype']}, "
        f"on {measured['cores']} cores of an {measured['cpu']}, {measured['date']}. "
        f"torch.profiler recorded this, which costs time itself: {measured['protocol']}.",
        "small faint",
        columns=70,
    )
    return drawing.markup()
