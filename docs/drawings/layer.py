"""A layer unfused and fused on one axis of time, from the simulation of ``benchmarks/model``.

The layer is a sequence-parallel MLP on 8 H100: 8192 tokens of 8192 features, hidden size 28672, bf16. What
one of the GPUs does is drawn: its link, and every eighth of its programs.
"""

from itertools import groupby

from model.predict import predict
from model.simulation.kernels import Shape, Span
from model.simulation.machines import machine_named

from drawings.svg import ANIMATED, Drawing

TOKENS, FEATURES, HIDDEN, RANKS = 8192, 8192, 28672, 8
SHOWN = 8  # every so many programs
LEFT, WIDTH, ROW = 36, 434, 5


def layer() -> str:
    machine = machine_named("h100x8")
    ops = (
        Shape("all_gather_matmul", TOKENS, HIDDEN // RANKS, FEATURES),
        Shape("matmul_reduce_scatter", TOKENS, FEATURES, HIDDEN // RANKS),
    )
    logs: list[list[Span]] = [[], []]
    alone = [predict(machine, op, "unfused") for op in ops]
    fused = [predict(machine, op, "fused", log=log) for op, log in zip(ops, logs, strict=True)]
    whole = sum(each.microseconds for each in alone)
    scale = WIDTH / whole
    drawing = Drawing(424, "A layer unfused and fused, on one axis of time", ANIMATED)
    drawing.text(LEFT, 19, "rows of ranks 0 to 7:", "small faint")
    for rank in range(RANKS):
        drawing.rect(LEFT + 126 + 14 * rank, 8, 12, 12, f"rank{rank}", 2)
    drawing.legend(LEFT + 252, 8, "waiting", "wait")
    drawing.legend(LEFT + 326, 8, "sum over ranks", "sum")

    drawing.text(LEFT, 48, "Unfused: communication, then computation", "bold")
    drawing.text(LEFT, 188, "Fused: communication inside computation", "bold")
    for top, height in ((58, 60), (198, 17 * ROW)):
        drawing.text(LEFT - 8, top + 13, "link", "small faint", "end")
        drawing.text(LEFT - 8, top + 22 + height / 2 + 4, "SMs", "small faint", "end")
        drawing.rect(LEFT, top, WIDTH, 18, "wait")
        drawing.rect(LEFT, top + 22, WIDTH, height, "wait")

    drawing.add('<defs><g id="work">')
    at = float(LEFT)
    for number, each in enumerate(alone):
        parts = [("link", each.collective_us), ("SMs", each.matmul_us)]
        for lane, microseconds in reversed(parts) if number else parts:
            width = scale * microseconds
            top, height = (58, 18) if lane == "link" else (80, 60)
            drawing.rect(at, top, width - 1, height, "plain" if lane == "link" else "solid")
            name = "matmul" if lane == "SMs" else ("all-gather", "reduce-scatter")[number]
            kind = "small on" if lane == "SMs" else "small"
            drawing.text(at + width / 2, top + height / 2 + 4, name, kind, "middle")
            at += width
        at = LEFT + scale * sum(e.microseconds for e in alone[: number + 1])
    at = float(LEFT)
    for number, (each, log) in enumerate(zip(fused, logs, strict=True)):
        for span in _link(log, gathers=not number):
            _bar(drawing, span, at, scale, 198, 18)
        for program in sorted({s.program for s in log if s.program % SHOWN == 0}):
            for span in _merged([s for s in log if s.program == program]):
                _bar(drawing, span, at, scale, 220 + program // SHOWN * ROW, ROW)
        at += scale * each.microseconds
    drawing.add('</g></defs><use href="#work" opacity="0.25"/><use href="#work" class="played"/>')

    for top, each in ((80 + 60, alone), (220 + 17 * ROW, fused)):
        at = float(LEFT)
        for prediction in each:
            end = at + scale * prediction.microseconds
            drawing.line(end, top - 3, end, top + 9)
            lines = [f"{prediction.microseconds:,.0f} us"]
            if each is fused:
                lines.insert(0, prediction.shape.op)
            for number, line in enumerate(lines):
                drawing.text((at + end) / 2, top + 14 + 16 * number, line, "small faint", "middle")
            at = end
    gained = whole / sum(each.microseconds for each in fused)
    for number, line in enumerate((f"{gained:.2f}", "times", "as fast")):
        drawing.text(at + 6, 248 + 18 * number, line, "bold")
    drawing.paragraph(
        LEFT,
        366,
        f"One of 8 H100; {TOKENS} tokens, {FEATURES} features, hidden size {HIDDEN}, bf16. A chunk is "
        "multiplied as soon as it arrives. A tile leaves as soon as it is finished. The model of "
        "benchmarks/predict.py predicts these times; nothing is measured.",
        "small faint",
        columns=66,
    )
    return drawing.markup()


def _bar(drawing: Drawing, span: Span, at: float, scale: float, top: float, height: float) -> None:
    kind = {"wait": "wait", "sum": "sum"}.get(span.kind, f"rank{span.peer}")
    begin, end = at + scale * span.begin, at + scale * span.end
    drawing.rect(begin, top, end - begin - 0.3, height - 0.6, kind)


def _link(log: list[Span], *, gathers: bool) -> list[Span]:
    """What is on the link: chunks that come, or tiles of a rank's rows that go.

    All ranks do the same at the same time: what this one sends n ranks on comes from n ranks before it.
    """
    if gathers:
        copies = [span for span in log if span.kind == "copy"]
        return [_of(span, -span.peer % RANKS, span.end) for span in copies]
    stores = sorted((s for s in log if s.kind == "store"), key=lambda s: s.begin)
    return _merged([_of(span, span.peer, span.end) for span in stores])


def _merged(spans: list[Span]) -> list[Span]:
    """Spans that follow each other, of one kind and one rank's rows, as one; of tiles and stores, too."""
    found = []
    for _, group in groupby(spans, lambda s: (s.kind.replace("store", "tile"), s.peer)):
        several = list(group)
        found.append(_of(several[0], several[0].peer, max(s.end for s in several)))
    return [span for span in found if span.end - span.begin > 1]


def _of(span: Span, peer: int, end: float) -> Span:
    return Span(span.begin, end, span.rank, span.program, span.kind, peer, span.index)
