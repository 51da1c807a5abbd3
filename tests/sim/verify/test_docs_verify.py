"""The pages about checks name what there is, and their tables are whole. tests/pages.py runs their blocks.

After a change of the rules: ``cd tests && python -m sim.verify.test_docs_verify`` writes their table anew;
``tests/mutant_table.py`` writes that of mutants.
"""

import pathlib
import re

import pytest

import mutant_table
from interlace import verify
from mutants.protocol_mutants import CASES

ROOT = pathlib.Path(__file__).parents[3]
START = ROOT / "docs/tutorials/first-race.md"
LINT, SUITE = ROOT / "docs/reference/lint.md", ROOT / "docs/explanation/checks.md"
PAGES = [START, LINT, SUITE, *sorted((ROOT / "docs/how-to/check").glob("*.md"))]
LABORATORY = ROOT / "python/interlace_verify"
FOLDERS = sorted(each.parent for each in LABORATORY.glob("*/__init__.py"))
FOLDERS += [ROOT / "python/interlace_pytest", ROOT / "runtime/compiler/lint"]
RULES_BEGIN, RULES_END = "<!-- rules -->\n", "<!-- end of rules -->"


def rules_table() -> str:
    lines = ["| rule | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {rule} | {text} |" for rule, text in verify.RULES.items()), ""])


def mutant_rows() -> dict[str, list[str]]:
    """The cells of the checks, by mutant."""
    rows = re.findall(r"^\| ([^|]+) \| [\w/]+\.py \| (.*) \|$", SUITE.read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def test_names_and_rules_are_those_of_the_module() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"\bverify\.(?!md\b)(\w+)", text)):
        assert hasattr(verify, name), name
    assert RULES_BEGIN + rules_table() + RULES_END in LINT.read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_folder_of_checks_names_its_page(folder: pathlib.Path) -> None:
    pages = re.findall(r"docs/[\w/-]+\.md", (folder / "__init__.py").read_text())
    assert len(pages) == 1 and ROOT / pages[0] in PAGES


def test_every_mutant_has_a_row_and_a_check() -> None:
    rows, page = mutant_rows(), SUITE.read_text()
    table = page.partition(mutant_table.BEGIN)[2].partition(mutant_table.END)[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [line[1] for line in lines[2:]] == [case.mutant.file for case in CASES]
    assert table == f"\n{mutant_table.table(lines[2:])}\n"
    assert list(rows) == [case.mutant.name for case in CASES]
    for name, cells in rows.items():
        assert len(cells) == 4 and set(cells) - {"-", "does not run"}, name
    columns = ("races", "schedules", "late stores", "lint")
    for case in CASES:
        assert rows[case.mutant.name][columns.index(case.check)] != "-", case.mutant.name
    for text in (page, START.read_text()):
        assert f"{len(CASES)} kernels with one fault each" in " ".join(text.split())


if __name__ == "__main__":
    document = LINT.read_text()
    before, _, rest = document.partition(RULES_BEGIN)
    after = rest.partition(RULES_END)[2]
    LINT.write_text(before + RULES_BEGIN + rules_table() + RULES_END + after)
