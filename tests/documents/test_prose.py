"""Counts sentences that are hard to read, in pages and in the source; no part may get more of them.

python tests/documents/test_prose.py [FILE OR FOLDER ...]    every finding as file:line: kind: sentence
python tests/documents/test_prose.py --write                 lower the numbers of MOST to what is found
"""

import collections
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for the command

from documents.prose import (
    ROOT,
    SOURCE,
    TESTS,
    Text,
    kinds_of,
    page_texts,
    source_texts,
    texts,
    texts_of_files,
    texts_of_pages,
)
from tiers import thorough

# The most findings of each part. Where there are fewer, --write lowers the number.
MOST = {
    "tutorials": 0,
    "how-to": 0,
    "reference": 2,
    "explanation": 1,
    "front pages": 0,
    "changelog": 0,
    "public docstrings": 2,
    "internal docstrings": 137,
    "comments": 5,
    "help": 0,
    "messages": 4,
    "names": 1006,
    "tests": 140,
    "names of tests": 2180,
}


def counts_of(found: list[Text]) -> collections.Counter[str]:
    """Return the number of findings of each part."""
    return collections.Counter(text.part for text in found for _ in text.kinds)


def check(found: list[Text]) -> None:
    more = {part: count for part, count in counts_of(found).items() if count > MOST[part]}
    assert more == {}, "more than in the table: python tests/documents/test_prose.py lists them"


def test_no_page_gets_harder_to_read() -> None:
    check(texts_of_pages())


def test_no_source_gets_harder_to_read() -> None:
    check(texts_of_files(SOURCE))


@thorough
def test_no_test_gets_harder_to_read() -> None:
    check(texts_of_files(TESTS))


@pytest.mark.parametrize(
    ("sentence", "kinds"),
    [
        ("What is missing is an error.", ["headless"]),
        ("What is an error?", []),
        ("Of two ranks one waits.", ["headless"]),
        ("Of course both wait.", []),
        ("The shape is that of the `input`.", ["genitive"]),
        ("A pair that is no pair is refused.", ["negation"]),
        ("There is no pair, and if it is None the rank is no longer late.", []),
        ("The rank hears that the group is over.", ["metaphor"]),
        ("The rank waits; it ends; it is late.", ["joined"]),
        ("One " + "word " * 30, ["long"]),
        ("[One link](a.md) `of all those words` " + "word " * 27, []),
    ],
)
def test_kinds(sentence: str, kinds: list[str]) -> None:
    assert list(kinds_of(sentence)) == kinds
    assert kinds_of("where it is", "help") == ("fragment",)


def test_faults_of_a_page_and_of_a_file_are_found_where_they_are() -> None:
    """The second file of an example has its findings."""
    examples = pathlib.Path(__file__).parent
    for name, read in (("prose_example.md", page_texts), ("prose_example.txt", source_texts)):
        file = "docs/how-to/run/a.md" if name.endswith("md") else "python/interlace/a.py"
        found = read(file, (examples / name).read_text())
        lines = [f"{text.line} {text.part}: {' '.join(text.kinds) or '-'}" for text in found]
        assert lines == (examples / f"{name}.findings").read_text().splitlines()
    long_page = next(page_texts("docs/how-to/run/a.md", "a\n\n" * 200))
    assert long_page.kinds == ("long page",)


def lower() -> None:
    """Write the counts that are lower than the table into it."""
    file = pathlib.Path(__file__)
    source, counts = file.read_text(), counts_of(texts())
    for part, most in MOST.items():
        fewest = min(most, counts[part])
        source = source.replace(f'    "{part}": {most},\n', f'    "{part}": {fewest},\n')
    file.write_text(source)


def main(paths: list[str]) -> None:
    folders = [pathlib.Path(path).resolve() for path in paths] or [ROOT]
    chosen = [
        text for text in texts() if any((ROOT / text.file).is_relative_to(one) for one in folders)
    ]
    for text in chosen:
        for kind in text.kinds:
            print(f"{text.file}:{text.line}: {kind}: {text.text}")
    for part in MOST:
        of_part = [text for text in chosen if text.part == part]
        counts = collections.Counter(kind for text in of_part for kind in text.kinds)
        if of_part:
            share = sum(bool(text.kinds) for text in of_part) / len(of_part)
            kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
            print(f"{part}: {share:.1%} of {len(of_part)}, {counts.total()} findings: {kinds}")


if __name__ == "__main__":
    lower() if sys.argv[1:] == ["--write"] else main(sys.argv[1:])
