"""The architecture: one source in three layers, and the places of its page below them."""

import re
from pathlib import Path

from drawings.svg import Drawing, wrapped

PAGE = Path(__file__).resolve().parents[1] / "explanation/places.md"
LEFT, WIDTH, GAP = 10, 940, 8


def rows() -> list[list[str]]:
    """The table of places of its page: place, ranks are, kernels run, for, works today."""
    table = PAGE.read_text().partition("| place |")[2].partition("\n\n")[0]
    return [
        [re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split(" | ")]
        for line in table.splitlines()[2:]
    ]


def places() -> str:
    drawing = Drawing(960, 500, "Three layers of one source, and the places in which it runs")
    floors = (
        ("python/interlace", "what you import", (
            "fused ops, collectives", "nn, tensor", "torch backend", "torch.compile", "verify, bench, tune",
        )),
        ("runtime", "on the host", (
            "symmetric memory", "streams, launch", "Work", "watchdog, records", "tuning, compiler",
        )),
        ("kernels", "on the device", (
            "wait", "multiply a tile", "push a chunk", "publish", "sum in rank order",
        )),
    )  # fmt: skip
    for number, (folder, where, rooms) in enumerate(floors):
        top = 10 + 72 * number
        drawing.rect(LEFT, top, WIDTH, 56, "box", 6)
        drawing.text(LEFT + 14, top + 25, folder, "bold")
        drawing.text(LEFT + 14, top + 43, where, "small faint")
        for index, room in enumerate(rooms):
            left = LEFT + 160 + 156 * index
            drawing.rect(left, top + 13, 144, 30, "room", 4)
            drawing.text(left + 72, top + 32, room, "small on", "middle")
        if number:
            drawing.arrow(LEFT + 70, top - 16, LEFT + 70, top)
    every = rows()
    width = (WIDTH - GAP * (len(every) - 1)) / len(every)
    for index, (place, ranks, kernels, _, works) in enumerate(every):
        left = LEFT + (width + GAP) * index
        middle = left + width / 2
        drawing.arrow(middle, 210, middle, 234)
        name, _, rest = place.partition(",")
        today = works == "yes"
        drawing.rect(left, 234, width, 256, "box" if today else "box later", 6)
        drawing.text(left + 10, 256, name, "bold")
        if rest:
            for line, top in zip(wrapped(rest.strip(), 17), (273, 288), strict=False):
                drawing.text(left + 10, top, line, "small faint")
        top = 311
        for head, text in (("ranks are", ranks), ("kernels run", kernels)):
            drawing.text(left + 10, top, head, "small faint")
            for line in wrapped(text, 15):
                top += 15
                drawing.text(left + 10, top, line, "small")
            top += 22
        drawing.text(left + 10, 480, "runs" if today else "not yet run", "small bold")
    return drawing.markup()
