"""The life of a chunk, from a recording of the simulator: rank 0 sends it, rank 1 multiplies it.

``interlace.all_gather_matmul`` runs on two simulated ranks with one chunk each, and what happened to that
of rank 0 is drawn: its steps are those of the schedule of seed 0.
"""

import torch

import interlace
from drawings.svg import Drawing
from interlace.runtime.places.sim.scheduler import recording as trace
from interlace.runtime.places.sim.scheduler.recording import TICKS, RecordedSpan, merge
from interlace.runtime.tuning import configuration

LEFT, WIDTH, TOP, LANE = 126, 344, 34, 52
LANES = ("rank 0, program 0", "memory of rank 1", "rank 1, program 1", "rank 1, stream")


def _gather() -> None:
    interlace.barrier()
    with configuration.override(
        block_m=16, block_n=16, block_k=32, copy_rows=16, chunks=1, programs=2
    ):
        interlace.all_gather_matmul(torch.ones(16, 32), torch.ones(32, 16), algorithm="fused")


def chunk() -> str:
    with trace.recording() as recorder:
        interlace.run(_gather, 2, place="sim", seed=0)
    recording = merge([recorder.recording()])

    def first(rank: int, kind: str, peer: int | None = None, label: str = "") -> RecordedSpan:
        return next(
            s
            for s in recording.spans
            if (s.rank, s.kind, s.label) == (rank, kind, label) and peer in (s.peer, None)
        )

    def before(then: RecordedSpan, rank: int, kind: str) -> RecordedSpan:
        """What the program did last of that kind before ``then``."""
        same = [s for s in recording.spans if (s.rank, s.lane, s.kind) == (rank, then.lane, kind)]
        return max((s for s in same if s.end <= then.start), key=lambda s: s.end)

    copy, used = first(0, "copy", 1), first(1, "tile", 0)
    credit, own, waited = before(copy, 0, "wait"), before(used, 1, "tile"), before(used, 1, "wait")
    published = next(s.time for s in recording.signals if s.source == 0)
    finish = first(1, "item", label="finish")
    begin, end = own.start - 2 * TICKS, finish.end + 2 * TICKS

    def x(time: int) -> float:
        return LEFT + WIDTH * (time - begin) / (end - begin)

    drawing = Drawing(TOP + 4 * LANE + 208, "The life of a chunk, from its store to its last use")
    for lane, name in enumerate(LANES):
        drawing.text(LEFT - 8, TOP + LANE * lane + 22, name, "small", "end")
        drawing.line(LEFT, TOP + LANE * lane + 17, LEFT + WIDTH, TOP + LANE * lane + 17)
    bars = (
        (0, credit, "wait box", ""), (0, copy, "rank0", ""),
        (2, own, "rank1", "own rows"), (2, waited, "wait box", "polls"), (2, used, "rank0", ""),
        (3, finish, "plain", ""),
    )  # fmt: skip
    for lane, span, kind, name in bars:
        left, right = x(span.start), x(span.end)
        drawing.rect(left, TOP + LANE * lane + 4, right - left, 26, kind)
        if name:
            style = "small on" if kind == "rank1" else "small"
            drawing.text((left + right) / 2, TOP + LANE * lane + 22, name, style, "middle")
    left, right = x(copy.start), x(finish.end)
    drawing.rect(left, TOP + LANE + 4, right - left, 26, "rank0 there")
    drawing.text((left + right) / 2, TOP + LANE + 22, "the chunk is here", "small on", "middle")

    def arrow(time: int, lane: int, to: int) -> None:
        down = to > lane
        drawing.arrow(
            x(time), TOP + LANE * lane + (30 if down else 4), x(time), TOP + LANE * to + (4 if down else 30)
        )  # fmt: skip

    arrow(copy.start, 0, 1)
    arrow(published, 0, 2)
    arrow(used.end, 1, 2)
    arrow(finish.end, 3, 0)
    marks = (
        (credit.start, 0), (copy.start, 0), (published, 0), (waited.start, 2), (used.start, 2),
        (finish.start, 3),
    )  # fmt: skip
    for number, (time, lane) in enumerate(marks, 1):
        centre = x(time) + (20 if number == 5 else 9), TOP + LANE * lane - 6
        drawing.add(f'<circle cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="8" class="solid"/>')
        drawing.text(centre[0], centre[1] + 4, str(number), "small on", "middle")

    def steps(span: RecordedSpan) -> str:
        return f"steps {span.start // TICKS} to {span.end // TICKS}"

    lines = (
        f"{steps(credit)}: rank 0 waits until rank 1 has finished the op before this one",
        f"{steps(copy)}: tl.store, {copy.nbytes:,} bytes, into the memory of rank 1",
        f"step {published // TICKS}: publish: a barrier, then an atomic with release: data first",
        f"{steps(waited)}: wait: an atomic with acquire, until the slot has the epoch",
        f"{steps(used)}: loads that depend on the wait, and the matmul",
        f"{steps(finish)}: finish: the credit for the next op; from now on the memory may be written again",
    )
    y = TOP + 4 * LANE + 22
    for number, text in enumerate(lines, 1):
        drawing.add(f'<circle cx="20" cy="{y - 4}" r="8" class="solid"/>')
        drawing.text(20, y, str(number), "small on", "middle")
        y += 7 + drawing.paragraph(36, y, text, columns=72)
    return drawing.markup()
