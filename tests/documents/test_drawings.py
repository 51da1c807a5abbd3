"""The pictures of docs/images that follow from the code: none is stale, and all have dark colours."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pages
from tiers import thorough

DOCS = pages.ROOT / "docs"
NAMES = ("layer", "places", "ops", "chunk", "race", "faults", "timeline")


@pytest.fixture(scope="module")
def draw() -> Any:
    sys.path.insert(0, str(DOCS))
    return importlib.import_module("draw")


def test_every_drawing_is_tried(draw: Any) -> None:
    assert tuple(draw.DRAWINGS) == NAMES


@pytest.mark.parametrize("file", sorted(DOCS.glob("images/*.svg")), ids=lambda file: file.stem)
def test_a_phone_shows_the_words_of_a_drawing(file: Path) -> None:
    """360 pixels of width are enough for letters of 9 pixels."""
    picture = file.read_text()
    width = ElementTree.fromstring(picture).get("viewBox", "").split()[2]
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([\d.]+)px", picture)]
    assert 360 * min(sizes) / float(width) >= 9


@thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_says_what_the_code_does(draw: Any, name: str) -> None:
    kept = (DOCS / f"images/{name}.svg").read_text()
    svg = importlib.import_module("drawings.svg")
    assert svg.alike(kept, draw.DRAWINGS[name]()), f"python docs/draw.py {name}"
    assert "prefers-color-scheme: dark" in kept
    assert ElementTree.fromstring(kept).tag.endswith("svg")
    shown = [p for p in pages.pages() if f"images/{name}.svg)" in p.read_text()]
    assert shown


def test_what_matters_makes_a_drawing_stale(draw: Any) -> None:
    alike = importlib.import_module("drawings.svg").alike
    kept = (DOCS / "images/layer.svg").read_text()
    assert alike(kept, kept.replace('x="64.0"', 'x="65.2"'))
    for changed in (kept.replace("772 us", "790 us"), kept.replace('x="64.0"', 'x="70"')):
        assert changed != kept and not alike(kept, changed)
    assert not alike(kept, kept.replace("all_gather_matmul", "all_gather"))
    assert not alike(kept, kept.replace("</g>", '<rect class="wait"/></g>'))
