"""The page of errors: every text on it is one that the code can print, and leads to something to do."""

import ast
import re

import house
import pages

ROW = re.compile(r"^\| `(.+?)` \| (.+) \| (.+) \|$", re.MULTILINE)


def said(node: ast.AST) -> str | None:
    """A string as the code says it, with ``...`` for what is put in; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(said(each) or "..." for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (said(node.left) or "...") + (said(node.right) or "...")
    return None


def texts() -> set[str]:
    """Every string of the package but docstrings."""
    found = set()
    for file in house.sources().values():
        tree = ast.parse((house.ROOT / file).read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        nodes = (node for node in ast.walk(tree) if id(node) not in alone)
        found |= {text for node in nodes if (text := said(node))}
    return found


def unsaid(errors: list[str], every: set[str]) -> list[str]:
    """Errors that nothing prints; ``...`` at an end of one stands for whatever is there."""
    wanted = {error: error.removeprefix("...").removesuffix("...").strip() for error in errors}
    return [error for error, part in wanted.items() if not any(part in text for text in every)]


def test_every_error_on_the_page_can_be_printed() -> None:
    page = (pages.ROOT / "docs/how-to/run/troubleshooting.md").read_text()
    rows = ROW.findall(page.partition("\n## Messages of torch\n")[0])
    errors = [error for error, _, _ in rows]
    every = texts()
    assert len(errors) == len(set(errors)) > 35
    assert unsaid(errors, every) == []
    assert all(len(re.sub(r"\W|\.\.\.", "", error)) > 7 for error in errors)
    assert unsaid(["a rank fell over in ...", "died while this rank was on ..."], every)


def test_what_code_says_is_put_together() -> None:
    tree = ast.parse("f'rank {a} of {b}: ' + name + ' has ' 'gone'", mode="eval")
    assert said(tree.body) == "rank ... of ...: ... has gone"
