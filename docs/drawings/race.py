"""A race as ``interlace.verify.races`` reports it: the recipe of docs/examples without its last meeting."""

import importlib.util
import sys
import tempfile
from pathlib import Path

from drawings.svg import Drawing
from interlace import verify

RECIPE = Path(__file__).resolve().parents[1] / "examples/one_shot_all_reduce.py"
MEETING = "    meet(pads_ptr, rank, WORLD_SIZE)\n"
LEFT, TOP, LANE = 50, 44, 98


def finding() -> verify.Finding:
    """What the check finds in docs/tutorials/first-race.md's ``wrong.py``."""
    before, _, after = RECIPE.read_text().rpartition(MEETING)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wrong.py"
        file.write_text(before + after)
        spec = importlib.util.spec_from_file_location("wrong", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules["wrong"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        findings = verify.races(module.three_rounds, 2, seeds=[0]).findings
    return next(each for each in findings if each.kind == "read-write")


def race() -> str:
    found = finding()
    drawing = Drawing(320, "Two accesses that nothing orders")
    launches = ((LEFT, 282, "launch 1"), (LEFT + 296, 118, "launch 2"))
    reader, writer = (
        (each.rank, each.lines[0].partition(" ")[0]) for each in (found.first, found.second)
    )
    steps = {
        reader[0]: ((0, 44, "store"), (54, 44, "meet"), (108, 62, "load own"), (232, 50, "load")),
        writer[0]: (
            (0, 44, "store"), (54, 44, "meet"), (108, 50, "load"), (164, 62, "load own"),
            (306, 50, "store"),
        ),
    }  # fmt: skip
    for left, width, name in launches:
        drawing.text(
            left, TOP - 10, name if left == LEFT else f"{name} of rank {writer[0]}", "small faint"
        )
        drawing.line(left, TOP - 4, left + width, TOP - 4)
    for rank, each in steps.items():
        top = TOP + 8 + LANE * rank
        drawing.text(LEFT - 10, top + 20, f"rank {rank}", "small", "end")
        for number, (left, width, name) in enumerate(each):
            kind = (
                "clash" if number == len(each) - 1 else "plain" if name == "meet" else f"rank{rank}"
            )
            drawing.rect(LEFT + left, top, width, 30, kind, 3)
            style = "small" if name == "meet" else "small on"
            drawing.text(LEFT + left + width / 2, top + 20, name, style, "middle")
    between = TOP + 8 + 30, TOP + 8 + LANE
    for left in (68, 84):  # each meeting orders both ways
        start, end = between if left == 68 else reversed(between)
        drawing.arrow(LEFT + left, start, LEFT + left, end)
    rows = {rank: TOP + 8 + LANE * rank for rank in steps}
    high, low = (
        (rows[reader[0]] + 30, rows[writer[0]])
        if reader[0] < writer[0]
        else (rows[reader[0]], rows[writer[0]] + 30)
    )
    drawing.add(f'<path d="M{LEFT + 257} {high} L{LEFT + 331} {low}" class="missing"/>')
    drawing.text(LEFT + 302, (high + low) / 2, "nothing orders these", "small bad")
    drawing.text(LEFT + 288, rows[reader[0]] + 20, f"loads at {reader[1]}", "small bad")
    drawing.text(LEFT + 258, rows[writer[0]] + 46, f"stores at {writer[1]}", "small bad")
    top = TOP + 2 * LANE + 8
    top += drawing.paragraph(LEFT, top, f"{found.kind}: {verify.KINDS[found.kind]}", columns=66)
    at = f"on {found.memory}, byte {found.offset}, {found.count} elements; seed {found.seed}"
    drawing.paragraph(LEFT, top, at, columns=66)
    return drawing.markup()
