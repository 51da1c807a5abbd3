"""Draw the pictures of docs/images that follow from the code: ``python docs/draw.py [NAME ...]``.

``tests/documents/test_drawings.py`` says which drawings are stale. ``make pictures`` makes all pictures.
"""

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]

from drawings import chunk, faults, layer, ops, places, race, race_page, timeline  # noqa: E402

DRAWINGS: dict[str, Callable[[], str]] = {
    "layer": layer.layer,
    "places": places.places,
    "ops": ops.ops,
    "chunk": chunk.chunk,
    "race": race.race,
    "faults": faults.faults,
    "timeline": timeline.timeline,
}
SCREENSHOTS: dict[str, Callable[[], bytes]] = {"race_page": race_page.race_page}


def main(names: list[str]) -> None:
    for name in names or [*DRAWINGS, *SCREENSHOTS]:
        if name in DRAWINGS:
            path, content = DOCS / f"images/{name}.svg", DRAWINGS[name]().encode()
        else:
            path, content = DOCS / f"images/{name}.png", SCREENSHOTS[name]()
        path.write_bytes(content)
        print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
