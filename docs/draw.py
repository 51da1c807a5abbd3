"""Draw the pictures of docs/images that follow from the code: ``python docs/draw.py [NAME ...]``.

``tests/documents/test_drawings.py`` says which are stale.
"""

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]

from drawings import chunk, faults, layer, ops, places, race  # noqa: E402

DRAWINGS: dict[str, Callable[[], str]] = {
    "layer": layer.layer,
    "places": places.places,
    "ops": ops.ops,
    "chunk": chunk.chunk,
    "race": race.race,
    "faults": faults.faults,
}


def main(names: list[str]) -> None:
    for name in names or DRAWINGS:
        (DOCS / f"images/{name}.svg").write_text(DRAWINGS[name]())
        print(f"written: docs/images/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
