"""An SVG under construction. Its colours follow ``prefers-color-scheme``: one file for light and dark."""

import re
from html import escape

# A phone shows a picture 360 pixels wide: text of 12 units then has 9 pixels.
WIDTH = 480
LEADING = 17
ZOOM = 1.25  # where the page has room
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#d4ac2b", "#9d755d")
STYLE = """
svg {
  --ink: #1f2430; --faint: #667085; --line: #aab3c2; --fill: #eef2f8;
  --accent: #4051b5; --deep: #4051b5; --bad: #c62828;
}
@media (prefers-color-scheme: dark) {
svg {
  --ink: #e4e7ee; --faint: #98a2b3; --line: #586174; --fill: #2b303c;
  --accent: #8fa0ff; --deep: #4b5cc0; --bad: #ff6b6b;
}
}
text { font: 14px system-ui, sans-serif; fill: var(--ink) }
.small { font-size: 12px } .bold { font-weight: 600 } .faint { fill: var(--faint) }
.bad { fill: var(--bad) }
.mono { font-family: ui-monospace, monospace; font-size: 12.5px }
.room { fill: var(--deep) } .solid { fill: var(--deep) } .later { stroke-dasharray: 4 }
.there { opacity: 0.75 } .clash { fill: var(--bad) }
.missing { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 5 }
.box { fill: var(--fill); stroke: var(--line) } .plain { fill: var(--line) }
.wait { fill: var(--fill) } .sum { fill: var(--faint) }
.rule { stroke: var(--line); fill: none } .arrow { stroke: var(--accent); fill: none; stroke-width: 1.6 }
.head { fill: var(--accent) } .on { fill: #fff }
"""
ANIMATED = """
@media (prefers-reduced-motion: no-preference) { .played { animation: play 5s linear } }
@keyframes play { from { clip-path: inset(0 100% 0 0) } to { clip-path: inset(0) } }
"""
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


class Drawing:
    """``WIDTH`` x ``height`` units."""

    def __init__(self, height: int, title: str, style: str = "") -> None:
        colours = " ".join(f".rank{n} {{ fill: {colour} }}" for n, colour in enumerate(RANKS))
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{ZOOM * WIDTH:.0f}" height="{ZOOM * height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{colours}\n{style}</style>",
        ]

    def markup(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])

    def add(self, markup: str) -> None:
        self._parts.append(markup)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, round: float = 0
    ) -> None:
        corners = f' rx="{round}"' if round else ""
        size = f'width="{max(width, 0.4):.1f}" height="{height:.1f}"'
        self.add(f'<rect x="{x:.1f}" y="{y:.1f}" {size}{corners} class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        where = f'x="{x:.1f}" y="{y:.1f}"' + (
            "" if anchor == "start" else f' text-anchor="{anchor}"'
        )
        self.add(f'<text {where} class="{kind}">{escape(text)}</text>')

    def paragraph(
        self, x: float, y: float, text: str, kind: str = "small", columns: int = 74
    ) -> int:
        """Write ``text`` in lines of at most ``columns`` characters; return the height."""
        lines = wrapped(text, columns)
        for number, line in enumerate(lines):
            self.text(x, y + LEADING * number, line, kind)
        return LEADING * len(lines)

    def legend(self, x: float, y: float, entry: str, kind: str) -> None:
        """A square in the colour of ``kind``, and what it means."""
        self.rect(x, y, 12, 12, kind, 2)
        self.text(x + 18, y + 11, entry, "small faint")

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.add(f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" class="rule"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Down or up, with its head at the end."""
        back = 7 if to_y > y else -7
        self.add(f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y - back:.1f}" class="arrow"/>')
        self.add(f'<path d="M{to_x:.1f} {to_y:.1f} l-4 {-back} h8 z" class="head"/>')


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` characters, but for longer words."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def alike(one: str, other: str, tolerance: float = 3.0) -> bool:
    """Whether two drawings say the same: numbers may differ by that many units, or one per cent."""
    values = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (one, other)]
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and all(
        abs(a - b) <= max(tolerance, abs(a) / 100) for a, b in zip(*values, strict=True)
    )
