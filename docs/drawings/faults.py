"""How long until all ranks know of a fault: the table of docs/explanation/reliability.md as a picture."""

import math
import re
from pathlib import Path

from drawings.svg import Drawing

PAGE = Path(__file__).resolve().parents[1] / "explanation/reliability.md"
ROW = re.compile(
    r"^\| (.+?) \| (shm|hosts) \| \d+ \| \d+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", re.M
)
KINDS = (
    "another call",
    "a message that",
    "killed",
    "stopped",
    "no ",
    "/dev/shm",
    "a forked",
    "going on",
)
LEFT, WIDTH, TOP, LINE, LEAST, MOST = 196, 258, 52, 26, 0.3, 10_000


def x(milliseconds: float) -> float:
    low, high = math.log(LEAST), math.log(MOST)
    return LEFT + WIDTH * (math.log(max(milliseconds, LEAST)) - low) / (high - low)


def faults() -> str:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for fault, place, median, most in ROW.findall(PAGE.read_text()):
        if fault.startswith(KINDS):
            found.setdefault(fault, {})[place] = float(median), float(most)
    height = TOP + LINE * len(found)
    drawing = Drawing(height + 26, "Milliseconds from a fault to the errors of all ranks")
    for index, place in enumerate(("shm", "hosts")):
        drawing.legend(10 + 60 * index, 4, place, f"rank{index}")
    drawing.text(150, 15, "a dot: the median; the end of the line: the longest", "small faint")
    drawing.text(LEFT - 10, TOP - 8, "milliseconds:", "small faint", "end")
    for power in range(5):
        drawing.line(x(10**power), TOP, x(10**power), height)
        for end in (TOP - 8, height + 18):
            drawing.text(x(10**power), end, f"{10**power:,}", "small faint", "middle")
    for number, (fault, places) in enumerate(found.items()):
        middle = TOP + LINE * (number + 0.5)
        drawing.text(LEFT - 10, middle + 4, fault, "small", "end")
        for place, (median, most) in places.items():
            rank = ("shm", "hosts").index(place)
            y = middle + (5 * (2 * rank - 1) if len(places) > 1 else 0)
            drawing.rect(x(median), y - 1.5, x(most) - x(median), 3, f"rank{rank}")
            drawing.add(f'<circle cx="{x(median):.1f}" cy="{y:.1f}" r="4.5" class="rank{rank}"/>')
    return drawing.markup()
