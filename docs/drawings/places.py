"""The architecture: one source in three layers, and the places of its page below them."""

import re
from pathlib import Path

from drawings.svg import Drawing

PAGE = Path(__file__).resolve().parents[1] / "explanation/places.md"
LEFT, WIDTH, FLOOR, PLACE = 8, 464, 100, 98


def rows() -> list[list[str]]:
    """The table of places of its page: place, ranks are, kernels run, for, works today."""
    table = PAGE.read_text().partition("| place |")[2].partition("\n\n")[0]
    return [
        [re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split(" | ")]
        for line in table.splitlines()[2:]
    ]


def places() -> str:
    every = rows()
    bottom = 10 + 3 * FLOOR
    drawing = Drawing(
        bottom + PLACE * len(every), "Three layers of one source, and the places in which it runs"
    )
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
        top = 10 + FLOOR * number
        drawing.rect(LEFT, top, WIDTH, FLOOR - 16, "box", 6)
        drawing.text(LEFT + 12, top + 20, folder, "bold")
        drawing.text(LEFT + 12, top + 38, where, "small faint")
        for index, room in enumerate(rooms, 1):  # the first two rooms are on the right
            row, column = divmod(index, 3)
            left = LEFT + 10 + 150 * column
            drawing.rect(left, top + 10 + 36 * row, 144, 28, "room", 4)
            drawing.text(left + 72, top + 28 + 36 * row, room, "small on", "middle")
        drawing.arrow(LEFT + 232, top + FLOOR - 16, LEFT + 232, top + FLOOR)
    for number, (place, ranks, kernels, _, works) in enumerate(every):
        top = bottom + PLACE * number
        today = works == "yes"
        drawing.rect(LEFT, top, WIDTH, PLACE - 8, "box" if today else "box later", 6)
        name, _, rest = place.partition(",")
        drawing.text(LEFT + 12, top + 20, name, "bold")
        drawing.paragraph(LEFT + 12, top + 36, rest.strip(), "small faint", 14)
        drawing.text(
            LEFT + WIDTH - 10, top + 20, "runs" if today else "not yet run", "small bold", "end"
        )
        line = top + 20
        for title, text in (("ranks are ", ranks), ("kernels run ", kernels)):
            line += drawing.paragraph(LEFT + 104, line, title + text, "small", 44)
    return drawing.markup()
