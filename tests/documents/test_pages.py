"""Every block of every page runs as written and prints what the page says: see tests/pages.py."""

import pathlib
import re

import pytest
from markdown_it import MarkdownIt

import pages
from documents.prose import page_texts
from tiers import few

ALL = {str(page.relative_to(pages.ROOT)): page.read_text() for page in pages.pages()}
LINES = [
    (f"{name}:{block.line} {' '.join(line.command.split())[:40]}", name, line)
    for name, document in ALL.items()
    for block in pages.blocks(document)
    for line in block.lines
]
LONG = {
    f"docs/{folder}/{name}.md"
    for folder, names in {
        "tutorials": "first-race from-sim-to-torchrun fused-kernel start",
        "how-to/check": "peers ptx races schedules tests-and-ci",
        "how-to/compile": "aot",
        "how-to/gpu": "bench tune",
        "how-to/run": "hangs record",
        "how-to/train": "attention eight-gpus experts layers megatron norms tensor torchtitan",
        "how-to/migrate": "experts",
        "reference": "expert-rows lint",
        "explanation": "model",
    }.items()
    for name in names.split()
}
NOTEBOOKS = {name for name in ALL if (pages.ROOT / name).with_suffix(".ipynb").exists()}
RUN_HERE = [name for name in ALL if name not in NOTEBOOKS]  # test_notebooks.py runs the others
# All but the first page, and pages that are a file of the root.
DESCRIBED = [name for name, text in ALL.items() if name[:5] == "docs/" and text[:6] != "--8<--"]
DESCRIBED.remove("docs/index.md")
NOT_RUN = [
    pytest.param(line, id=f"{said} needs {line.needs}")
    for said, _, line in LINES
    if not line.run_by and not line.runs
]
RUN_ELSEWHERE = [pytest.param(name, line, id=said) for said, name, line in LINES if line.run_by]


def faults_of(document: str, folder: pathlib.Path) -> list[str]:
    """What is wrong with blocks, without running them."""
    pages.prepared(folder, document)
    found = []
    for block in pages.blocks(document):
        pages.save(block, folder)
        found += [f"line {block.line}: {fault}" for fault in pages.faults(block, folder)]
    for block in pages.inline_commands(document):
        found += [f"line {block.line}: {fault}" for fault in pages.faults(block, folder)]
    return found


def differences(document: str, folder: pathlib.Path) -> list[str]:
    """Run a page; the blocks that print something else than it says."""
    found = []
    for block, printed in pages.worked_through(document, folder):
        said = block.text if block.language == "console" else block.output
        if printed is None or said is None or block.varies:
            continue
        if (now := pages.steady(printed)) != pages.steady(said):
            found.append(f"line {block.line} prints\n{now}\ninstead of\n{pages.steady(said)}")
    return found


@pytest.mark.parametrize("name", few(RUN_HERE, *(name for name in RUN_HERE if name not in LONG)))
def test_blocks_run_and_print_what_the_page_says(name: str, tmp_path: pathlib.Path) -> None:
    found = differences(ALL[name], tmp_path)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("name", ALL)
def test_form(name: str, tmp_path: pathlib.Path) -> None:
    assert faults_of(ALL[name], tmp_path) == []
    prose = re.sub(r"^```.*?^```$", "", ALL[name], flags=re.MULTILINE | re.DOTALL).splitlines()
    assert not [line for line in prose if len(line) > 120 and line[:1] != "|"]
    long = ("long page",), ("long paragraph",)
    assert not [text for text in page_texts(name, ALL[name]) if text.kinds in long]


def beginning(document: str) -> tuple[str, int]:
    """Return the first paragraph, and how many texts come before code, a picture or a table."""
    texts: list[str] = []
    counts: list[int] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(document)
    for at, token in enumerate(tokens):
        if token.level == 0 and token.type in ("fence", "table_open"):
            counts.append(len(texts))
        elif token.level == 0 and token.type in (
            "paragraph_open",
            "bullet_list_open",
            "ordered_list_open",
        ):
            if (text := tokens[at + 1].content).startswith("!["):
                counts.append(len(texts))
            else:
                texts.append(text)
    return texts[0], (*counts, len(texts))[0]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_page_says_whom_it_is_for_and_shows_something_early(name: str) -> None:
    first, before = beginning(ALL[name])
    assert re.match(r"(For|This (page|tutorial) is for) ", first), first
    assert before < 3 or not name.startswith(("docs/tutorials/", "docs/how-to/"))


def test_the_beginning_of_a_page() -> None:
    assert beginning("# One\n\nFor all.\n\n- a\n\nMore\n\n```\nx\n```\n") == ("For all.", 3)
    assert beginning("# One\n\n![a](a.svg)\n\nFor all.\n\n| a |\n|---|\n") == ("For all.", 0)


@pytest.mark.parametrize("line", NOT_RUN)
def test_what_is_not_run_needs_more_than_time(line: pages.Line) -> None:
    """One test for each line that is not run, so that a run lists them; their form: above."""
    assert line.needs in pages.NEEDS


@pytest.mark.parametrize(("name", "line"), RUN_ELSEWHERE)
def test_what_is_run_elsewhere_is(name: str, line: pages.Line) -> None:
    assert pages.not_there(line, name) == ""


@pytest.mark.parametrize(
    ("place", "command", "fault"),
    [
        (".ci/run", "make clean", "PLACE has no 'make clean'"),
        ("tests/repository/test_action.py", "make", "PLACE has no 'make'"),
        ("tests/repository/test_action.py", "x = 1\ny = 2", "PLACE has no 'README.md'"),
        ("docs/tutorials/start.md", "pip install .", "PLACE does not run 'pip install .'"),
        ("docs/how-to/train/layers.md", "ls", "PLACE does not run 'ls'"),
        ("docs/none.md", "ls", "there is no PLACE"),
    ],
)
def test_what_is_not_run_elsewhere_is_seen(place: str, command: str, fault: str) -> None:
    found = pages.not_there(pages.Line(command, run_by=place), "README.md")
    assert found == fault.replace("PLACE", place)


def test_lines_and_their_marks(tmp_path: pathlib.Path) -> None:
    page = """
<!-- tests add: --a -->
<!-- tests add: --b; in: two -->
<!-- needs: hosts; in: three -->
<!-- run by: .ci/run; in: false -->

```bash
echo one   # "two" stands here
print three
false \\
  --long
echo five '#'
```

```text
one --b
five # --a
```
"""
    (block,) = pages.blocks(page)
    assert [(line.tested, line.needs, line.run_by) for line in block.lines] == [
        ("echo one --b", "", ""),
        ("print three --a", "hosts", ""),
        ("false    --long --a", "", ".ci/run"),
        ("echo five '#' --a", "", ""),
    ]
    assert [line.runs for line in block.lines] == [True, False, False, True]
    assert differences(page, tmp_path) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python -m interlace doctor", ["-m", "interlace", "doctor"]),
        ("python benchmarks/predict.py --fit", ["benchmarks/predict.py", "--fit"]),
        ("python -m interlace doctor | cat", None),
        ("python job.py", None),
        ("python -m interlacer", None),
        ("torchrun -m interlace doctor", None),
    ],
)
def test_what_runs_in_a_fork(line: str, words: list[str] | None) -> None:
    assert pages.page_lines.own_command(line) == words


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("```python\nx = = 1\n```", "invalid syntax"),
        ("<!-- needs: luck -->\n\n```bash\nls\n```", "unknown need 'luck'"),
        ("<!-- needs: gpu -->\n```bash\npython -m interlace bench --sizzes 4\n```", "do not parse"),
        ("<!-- tests add: --quack -->\n```bash\npython -m interlace verify\n```", "do not parse"),
        ("<!-- tests add: -l; in: rm -->\n```bash\nls\n```", "no line has 'rm'"),
        ("<!-- tests add: -l -->\n```bash\nls | cat\n```", "cannot be added behind"),
        ("<!-- tests add: -l -->\n```python\nx = 1\n```", "for lines of bash"),
        ("```bash\ncd docs\nls\n```", "lasts for this line only"),
        ("```bash\npython -m interlace verify docs/none.py::f\n```", "there is no docs/none.py"),
        ("```bash\ntorchrun --nproc-per-node 2 none.py\n```", "there is no none.py"),
        ("```bash\nmake everything\n```", "no ['everything']"),
        ("```bash\npython benchmarks/predict.py --nodez 4\n```", "no ['--nodez']"),
        ("```bash\nls && frobnicate\n```", "what is frobnicate?"),
        ("As `python -m interlace doctor --now` says.", "do not parse"),
        ("As `make\ntoast` says.", "no ['toast']"),
        ("```json\n{1}\n```", "Expecting"),
        ("```cpp\nint i;\n```", "language 'cpp'"),
    ],
)
def test_bad_form_is_seen(block: str, fault: str, tmp_path: pathlib.Path) -> None:
    (found,) = faults_of(block, tmp_path)
    assert fault in found


def test_what_a_page_does_is_seen(tmp_path: pathlib.Path) -> None:
    """Files that are saved, patched and continued; outputs that are right, wrong and of the moment."""
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    page = pathlib.Path(__file__).with_name("example_page.md").read_text()
    assert differences(page, tmp_path / "right") == []
    (found,) = differences(page.replace("3\n$", "4\n$"), tmp_path / "wrong")
    assert found.startswith("line 34 prints") and "4" in found


@pytest.mark.parametrize(
    ("block", "said"),
    [("```python\n1 / 0\n```\n", "ZeroDivisionError"), ("```bash\nexit 3\n```\n", "status 3")],
)
def test_what_fails_is_seen(block: str, said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError, match=said):
        differences(block, tmp_path)
