"""Find sentences that are hard to read, and names that say nothing, in pages and in the source."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt

import house

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST_PAGE, LONGEST_PARAGRAPH, MOST_WORDS = 250, 5, 30
KINDS = {
    "headless": r"^(what|who|whom|whose|of(?! course)|that (?:which|of|a|the))\b[^?]*$",
    "genitive": r"\b(?:that|those) of\b|\bof (?:its|their|one's) own\b"
    r"|\bas of (?!now|today|\d|version|release|commit)",
    "negation": r"(?<!there )\b(?:is|are|was|were) (?-i:none|no)\b(?! longer| more than| less than)",
    "metaphor": r"\bhears?\b|\b(?:is|are|was) told\b(?! apart)|\bgoes? home\b|\bstands? behind\b"
    r"|\bgives? (?:a wait |it )?up\b|\b(?:is|are) (?:over|through|let go)\b|\blets? go\b"
    r"|\bbehind (?:it|them|that|this)\b",
    "joined": r", too\b|;.*;",
}
FRAGMENT = r"^(?:of|not|by|from|as|where|which|how|whether)\b"  # in the help of an option
PRONOUNS = "each every given how made mine others ours own said there those told what which who"
PARTICIPLES = "asked caught done found gone heard held kept known meant met seen sent shown taken"
NO_PARTICIPLES = "embed exceed feed fused need pipelined proceed seed speed succeed unfused"
SPAN = re.compile(r"(`+).+?\1", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?][)\"'*_`]*(?=\s)")
ENTRY = re.compile(r"[\w*.]+(?:, [\w*.]+)* : |\S+(?: \S+)*\s{3,}")  # in a section, in a table
COMMENT = re.compile(r"(?:^ *|  )# (?!noqa|type:|fmt:|ruff|mypy)(.*)")
SOURCE, TESTS = ("python", "runtime", "kernels"), ("tests", "benchmarks", "examples", "docs")
LINKS = ("python/interlace/kernels/", "python/interlace/runtime/")
FRONT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md")


class Text(NamedTuple):
    """A sentence, name, paragraph or page, and the kinds of its faults."""

    part: str
    file: str
    line: int
    text: str
    kinds: tuple[str, ...]


def kinds_of(sentence: str, part: str = "") -> tuple[str, ...]:
    """Return the kinds of the faults of a sentence."""
    plain = LINK.sub(r"\1", SPAN.sub("code", sentence)).strip(" *_-(")
    kinds = [kind for kind, form in KINDS.items() if re.search(form, plain, re.IGNORECASE)]
    if part == "help" and re.search(FRAGMENT, plain, re.IGNORECASE):
        kinds.append("fragment")
    if sum(any(map(str.isalnum, word)) for word in plain.split()) > MOST_WORDS:
        kinds.append("long")
    return tuple(kinds)


def sentences(part: str, file: str, line: int, text: str) -> Iterator[Text]:
    """Split a paragraph that begins at ``line``."""
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        sentence = " ".join(text[start:end].split())
        if len(re.findall("[A-Za-z]{2,}", sentence)) > 1:
            at = line + text.count("\n", 0, end - len(text[start:end].lstrip()))
            yield Text(part, file, at, sentence, kinds_of(sentence, part))
        start = end


def page_texts(file: str, text: str) -> Iterator[Text]:
    """Return the sentences of a page, and the page and its paragraphs if they are too long."""
    part = "front pages" if file in FRONT else file.partition("/")[2].partition("/")[0]
    part = part or "changelog"
    if (length := text.count("\n")) > LONGEST_PAGE:
        yield Text(part, file, 1, f"{length} lines", ("long page",))
    line, outer = 1, ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline" and outer != "heading_open":
            yield from sentences(part, file, line, token.content)
            lines = token.content.count("\n") + 1
            if lines > LONGEST_PARAGRAPH:
                yield Text(part, file, line, f"{lines} lines", ("long paragraph",))
        outer = token.type


def paragraphs(docstring: str, line: int) -> Iterator[tuple[int, str]]:
    """Split a docstring that begins at ``line``, and drop its examples, code and headings."""
    lines: list[str] = []
    code = -1  # lines after "::" that are indented by more than this are code
    for at, whole_line in enumerate([*docstring.split("\n"), ""], line):
        text = whole_line.strip()
        indentation = len(whole_line) - len(whole_line.lstrip())
        if code >= 0 and (not text or indentation > code):
            continue
        example = text.startswith(">>>")
        code = indentation if example or text.endswith("::") else -1
        if re.fullmatch(r"[-= ]+", text):  # the line under a heading
            lines = []
            continue
        if not text or example or ENTRY.match(text) or re.match(r"[-*] |\d+\. ", text):
            yield at - len(lines), "\n".join(lines)
            lines = []
        if text and not example:
            lines.append(ENTRY.sub("", text))
        if text.endswith("::"):
            yield at - len(lines) + 1, "\n".join(lines)
            lines = []


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Find the comments of a file; adjacent lines are one comment."""
    block: list[str] = []
    for line, text in enumerate([*source.split("\n"), ""], 1):
        comment = COMMENT.search(text)
        alone = text.lstrip().startswith("# ")
        if block and not alone:
            yield line - len(block), "\n".join(block)
            block = []
        if comment and alone:
            block.append(comment[1])
        elif comment:
            yield line, comment[1]


def docstrings(tree: ast.Module, nodes: list[ast.AST]) -> Iterator[tuple[str, int, str]]:
    """Find the docstrings of a file, with the part that each belongs to."""
    listed = pathlib.Path(__file__).with_name("public_names.txt").read_text().split()
    names = {name.rpartition(".")[2] for name in listed}
    public = [node for node in tree.body if getattr(node, "name", "") in names]
    methods = [child for node in public if isinstance(node, ast.ClassDef) for child in node.body]
    public += [method for method in methods if getattr(method, "name", "_")[0] != "_"]
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            part = "public docstrings" if node in public else "internal docstrings"
            if "CommandOptions" in map(ast.unparse, getattr(node, "bases", ())):
                part = "help"  # the description of a command
            if docstring := ast.get_docstring(node, clean=False):
                yield part, node.body[0].lineno, docstring


def strings(node: ast.AST, part: str = "messages") -> Iterator[tuple[str, int, str]]:
    """Find the strings below ``node`` except docstrings: messages and the help of options."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            values = [getattr(piece, "value", "") for piece in child.values]
            text = "".join(value if isinstance(value, str) else "x" for value in values)
            yield part, child.lineno, text
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield part, child.lineno, child.value
        elif isinstance(child, ast.keyword) and child.arg == "help":
            yield from strings(child, "help")
        elif not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from strings(child, part)


def names(nodes: list[ast.AST]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Find the names that a file defines: pronouns are faults, and participles as names of functions."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            word = node.name.strip("_")
            participle = re.fullmatch("[a-z]+ed", word) or word in PARTICIPLES.split()
            fault = word in PRONOUNS.split() or (participle and word not in NO_PARTICIPLES.split())
            yield node.lineno, node.name, ("participle",) if fault else ()
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, ("participle",) if node.arg in PRONOUNS.split() else ()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, ("participle",) if node.id in PRONOUNS.split() else ()


def source_texts(file: str, source: str) -> Iterator[Text]:
    """Return the sentences of a Python file, and the names that it defines."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    tests = "" if file.startswith(SOURCE) else "tests"
    for part, line, docstring in docstrings(tree, nodes):
        for at, paragraph in paragraphs(docstring, line):
            yield from sentences(tests or part, file, at, paragraph)
    for line, comment in comments(source):
        yield from sentences(tests or "comments", file, line, comment)
    for part, line, text in [] if tests else strings(tree):
        if text.count("\n") < 3 and len(re.findall("[A-Za-z]{2,}", text)) > 3:
            yield from sentences(part, file, line, text)
    for line, name, kinds in names(nodes):
        yield Text("names of tests" if tests else "names", file, line, name, kinds)


@functools.cache
def texts_of_pages() -> list[Text]:
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
    pages += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))]
    return [text for page in pages for text in page_texts(page, (ROOT / page).read_text())]


@functools.cache
@house.without_collection()
def texts_of_files(folders: tuple[str, ...]) -> list[Text]:
    found = list[Text]()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            found += [] if file.startswith(LINKS) else source_texts(file, path.read_text())
    return found


def texts() -> list[Text]:
    """Read all pages and Python files."""
    return [*texts_of_pages(), *texts_of_files(SOURCE), *texts_of_files(TESTS)]
