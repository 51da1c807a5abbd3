"""The house in figures: which folder may import which, how large it is, and how tangled.

    python tests/house.py            the figures
    python tests/house.py --graph    the graph of docs/explanation/house.md
    python tests/house.py --draw     docs/images/house.svg
    python tests/house.py --trips    how many files a call enters; with --files, which

``FOLDERS`` is the plan: a line per folder, lowest first, with the folders that its files may import.
``tests/repository/test_layout.py`` holds the code against it.
"""

import ast
import contextlib
import functools
import gc
import pathlib
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("kernels", "runtime", "python")
BESIDE = ("tests", "benchmarks")
MOST_FILES = 20
# Checks of kernels without a GPU, counted apart; and tools and measurements, which are not part of the ops.
LABORATORY = ("interlace_verify", "interlace_pytest", "runtime/compiler/lint")
TOOLS = ("interlace/tools", "interlace/cli", "interlace/benchmark", "runtime/tuning")
OPS = {
    "all_gather_matmul": ("gather_matmul",),
    "attention": ("attention",),
    "dispatch": ("dispatch",),
}
# By torch's word for how a call finds its implementation; ours sends tokens to experts.
TORCH_DISPATCH = ["__torch_dispatch__", "DispatchMode", "_make_dispatchable"]
TORCH_DISPATCH += ["dispatched", "_dispatched"]
OPTION = "gather_normed"

# Besides, every folder of runtime and python may import kernels.
FOLDERS = {
    "kernels": "",
    "kernels/collectives": "kernels",
    "kernels/experts": "kernels",
    "kernels/matmul": "kernels kernels/collectives",
    "kernels/attention": "kernels kernels/collectives kernels/matmul",
    "runtime": "",
    "runtime/compat": "",
    "runtime/core": "runtime/compat",
    "runtime/numerics": "",
    "runtime/places/sim/interpreter": "runtime/compat runtime/core runtime/numerics",
    "runtime/places/sim/scheduler": "runtime/core runtime/numerics runtime/places/sim/interpreter",
    "runtime/processes": "runtime/compat runtime/core",
    "runtime/tuning": "runtime/compat runtime/core",
    "runtime/compiler/lint": "runtime/core",
    "runtime/compiler": "runtime/compat runtime/compiler/lint runtime/core",
    "runtime/places/gpu": "runtime/compat runtime/compiler runtime/core runtime/processes",
    "runtime/places/sim": "runtime/compat runtime/core runtime/places/sim/scheduler",
    "runtime/places/shm": (
        "runtime/compat runtime/core runtime/numerics runtime/places/sim "
        "runtime/places/sim/interpreter runtime/places/sim/scheduler runtime/processes"
    ),
    "runtime/places/hosts": (
        "runtime/compat runtime/core runtime/numerics runtime/places/shm runtime/processes"
    ),
    "runtime/places": (
        "runtime/compat runtime/core runtime/places/gpu runtime/places/hosts runtime/places/shm "
        "runtime/processes"
    ),
    "interlace/arguments": "runtime/compat runtime/core runtime/numerics runtime/tuning",
    "interlace/output": (
        "interlace/arguments runtime/compat runtime/compiler runtime/core runtime/places/hosts "
        "runtime/places/shm runtime/tuning"
    ),
    "interlace/cli": "interlace/output runtime/compat runtime/core",
    "interlace/groups": "interlace/arguments runtime/compat runtime/core runtime/places",
    "interlace/ops/op": "interlace/arguments interlace/groups runtime/compat runtime/core",
    "interlace/ops/collectives": (
        "interlace/arguments interlace/groups interlace/ops/op runtime/compat runtime/core "
        "runtime/numerics runtime/tuning"
    ),
    "interlace/ops/matmul": (
        "interlace/arguments interlace/groups interlace/ops/collectives interlace/ops/op "
        "runtime/compat runtime/core runtime/numerics runtime/tuning"
    ),
    "interlace/ops/experts": (
        "interlace/arguments interlace/groups interlace/ops/collectives interlace/ops/matmul "
        "interlace/ops/op runtime/compat runtime/core runtime/numerics runtime/tuning"
    ),
    "interlace/process_group": (
        "interlace/groups interlace/ops/collectives runtime/compat runtime/core runtime/places "
        "runtime/places/gpu"
    ),
    "interlace/symmetric_memory": (
        "interlace/arguments interlace/groups interlace/ops/matmul runtime/compat runtime/core"
    ),
    "interlace": (
        "interlace/arguments interlace/groups interlace/ops/matmul interlace/ops/op runtime/core "
        "runtime/places runtime/places/gpu runtime/places/sim runtime/places/sim/scheduler"
    ),
    "interlace/ops/attention": (
        "interlace/arguments interlace/groups interlace/ops/collectives interlace/ops/matmul "
        "interlace/ops/op runtime/core runtime/numerics runtime/tuning"
    ),
    "interlace/tools/catalogue": (
        "interlace/ops/attention interlace/ops/collectives interlace/ops/experts "
        "interlace/ops/matmul runtime/compiler runtime/compiler/lint runtime/core "
        "runtime/numerics runtime/tuning"
    ),
    "interlace/ops": (
        "interlace/groups interlace/ops/attention interlace/ops/collectives interlace/ops/experts "
        "interlace/ops/matmul interlace/ops/op runtime/compat"
    ),
    "interlace/compile": (
        "interlace/arguments interlace/groups interlace/ops interlace/ops/matmul interlace/ops/op "
        "runtime/tuning"
    ),
    "interlace/functional": (
        "interlace/groups interlace/ops interlace/ops/attention interlace/ops/collectives "
        "interlace/ops/experts interlace/ops/matmul interlace/ops/op"
    ),
    "interlace/experts": "interlace/ops/experts",
    "interlace/tensor": (
        "interlace/arguments interlace/groups interlace/ops interlace/ops/collectives "
        "interlace/ops/matmul interlace/ops/op runtime/compat runtime/core runtime/tuning"
    ),
    "python": "interlace/cli interlace/compile interlace/process_group",
    "program": "python",
    "interlace/nn/functional": "interlace/ops/attention",
    "interlace/nn": (
        "interlace/arguments interlace/groups interlace/nn/functional interlace/ops "
        "interlace/ops/attention interlace/ops/collectives interlace/ops/experts "
        "interlace/ops/matmul interlace/ops/op interlace/tensor runtime/compat runtime/core "
        "runtime/numerics"
    ),
    "interlace/integrations": "interlace interlace/groups interlace/nn runtime/compat runtime/core",
    "face": (
        "interlace interlace/arguments interlace/cli interlace/compile interlace/experts "
        "interlace/functional interlace/groups interlace/integrations interlace/nn interlace/ops "
        "interlace/ops/attention interlace/ops/collectives interlace/ops/experts "
        "interlace/ops/matmul interlace/symmetric_memory interlace/tensor python "
        "runtime/compat runtime/core runtime/places runtime/tuning"
    ),
    "interlace/tools": (
        "face interlace interlace/groups interlace/ops interlace/ops/attention "
        "interlace/ops/collectives interlace/ops/experts interlace/ops/matmul interlace/ops/op "
        "interlace/tools/catalogue runtime/compat runtime/core runtime/places/sim runtime/tuning"
    ),
    "interlace/benchmark": (
        "face interlace interlace/groups interlace/ops interlace/ops/attention "
        "interlace/ops/collectives interlace/ops/experts interlace/ops/matmul interlace/tools "
        "runtime/compat runtime/core runtime/numerics runtime/tuning"
    ),
    "interlace/cli/commands": (
        "face interlace interlace/arguments interlace/benchmark interlace/functional "
        "interlace/groups interlace/ops interlace/ops/collectives interlace/ops/matmul "
        "interlace/output interlace/tensor interlace/tools interlace/tools/catalogue "
        "runtime/compat runtime/core runtime/places/gpu runtime/places/sim/scheduler "
        "runtime/processes runtime/tuning"
    ),
    "interlace_verify/lint_check": (
        "runtime/compiler runtime/compiler/lint runtime/core runtime/tuning"
    ),
    "interlace_verify/protocols": "runtime/core",
    "interlace_verify/ptx": "runtime/compat runtime/core runtime/numerics runtime/places/sim",
    "interlace_verify/machine": (
        "interlace/groups interlace_verify/ptx runtime/compat runtime/compiler "
        "runtime/compiler/lint runtime/core runtime/numerics runtime/places/sim "
        "runtime/places/sim/scheduler"
    ),
    "interlace_verify/schedule_check": (
        "interlace runtime/core runtime/places runtime/places/sim runtime/places/sim/interpreter "
        "runtime/places/sim/scheduler"
    ),
    "interlace_verify/race_check": (
        "interlace interlace_verify/lint_check interlace_verify/schedule_check runtime/compat "
        "runtime/core runtime/places/sim runtime/places/sim/interpreter "
        "runtime/places/sim/scheduler"
    ),
    "interlace_verify": (
        "interlace_verify/lint_check interlace_verify/machine interlace_verify/protocols "
        "interlace_verify/race_check interlace_verify/schedule_check"
    ),
    "interlace_pytest": "interlace interlace_verify interlace_verify/schedule_check",
    "interlace_verify/shims": (
        "face interlace/groups interlace/ops/matmul interlace/process_group "
        "interlace/symmetric_memory interlace_verify/ptx runtime/compat runtime/compiler "
        "runtime/core runtime/places/sim"
    ),
    "interlace_verify/shims/triton_dist": (
        "face interlace/symmetric_memory interlace_verify/shims runtime/compat"
    ),
    "interlace_verify/suite": (
        "interlace/tools interlace/tools/catalogue interlace_verify/lint_check "
        "interlace_verify/protocols interlace_verify/race_check interlace_verify/schedule_check "
        "interlace_verify/shims runtime/compiler runtime/places/sim"
    ),
    "interlace_verify/command": (
        "face interlace/output interlace/tools interlace_verify interlace_verify/schedule_check "
        "interlace_verify/shims interlace_verify/suite runtime/compiler runtime/core"
    ),
}


def module_name(file: pathlib.PurePath) -> str:
    """The dotted name under which a source file, relative to the root, is imported."""
    parts = list(file.with_suffix("").parts)
    parts = parts[1:] if parts[0] == "python" else ["interlace", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, pathlib.PurePath]:
    """Module name -> file, of all source files; the links inside ``python/`` are not followed."""
    found = {}
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.resolve() == file and "__pycache__" not in file.parts:
                relative = file.relative_to(ROOT)
                found[module_name(relative)] = relative
    return found


parsed = functools.cache(ast.parse)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Hold back collections of garbage: they take longer than the parsing of many files, and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def called_name(call: ast.Call) -> str:
    """The last part of what is called."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports anywhere in it; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) == "import_module":
            yield from (each.value for each in node.args[:1] if isinstance(each, ast.Constant))


@without_collection()
def edges(texts: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, out of module -> source."""
    found = {}
    for module, text in texts.items():
        # `from a import b` means the module a.b where there is one, else a itself.
        names = {n if n in texts else n.rpartition(".")[0] for n in imported(text)}
        found[module] = (names & texts.keys()) - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (strongly connected components of more than one)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, after: dict[str, set[str]], into: list[str]) -> None:
        stack = [(node, iter(sorted(after.get(node, ()))))]
        seen.add(node)
        while stack:
            top, rest = stack[-1]
            following = next((n for n in rest if n not in seen), None)
            if following is None:
                stack.pop()
                into.append(top)
            else:
                seen.add(following)
                stack.append((following, iter(sorted(after.get(following, ())))))

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    backwards: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            backwards[target].add(node)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            component: list[str] = []
            visit(node, backwards, component)
            if len(component) > 1:
                found.append(sorted(component))
    return found


def folder_of(file: pathlib.PurePath) -> str:
    """Return a file's folder in ``FOLDERS``; the public modules count as one folder, and so do commands."""
    if file.as_posix() == "python/interlace/__init__.py":
        return "face"
    if file.name == "__main__.py":
        return "program"
    folder = file.parent.as_posix()
    return "python" if folder == "python" else folder.removeprefix("python/")


def folder_edges(
    files: dict[str, pathlib.PurePath], graph: dict[str, set[str]]
) -> dict[str, set[str]]:
    """Folder -> folders that its files import."""
    found: dict[str, set[str]] = {folder_of(file): set() for file in files.values()}
    for module, targets in graph.items():
        own = folder_of(files[module])
        found[own] |= {folder_of(files[target]) for target in targets} - {own}
    return found


def beside() -> list[pathlib.PurePath]:
    return [file.relative_to(ROOT) for top in BESIDE for file in (ROOT / top).rglob("*.py")]


def files_in(files: Iterable[pathlib.PurePath]) -> dict[str, int]:
    """How many files a folder has, beside its ``__init__.py``."""
    counts: dict[str, int] = {}
    for file in files:
        counts[folder_of(file)] = counts.get(folder_of(file), 0) + (file.name != "__init__.py")
    return counts


# -- the graph, for people ---------------------------------------------------------------------


def floors() -> dict[str, dict[str, set[str]]]:
    """Folders right below ``runtime`` and ``interlace``: what each needs, less what that needs itself."""
    found = {}
    for top in ("runtime", "interlace"):
        direct: dict[str, set[str]] = {}
        for folder, allowed in FOLDERS.items():
            name = _below(folder, top)
            if name:
                needed = {_below(other, top) for other in allowed.split()}
                direct.setdefault(name, set()).update(needed - {"", name})
        found[top] = {
            name: {n for n in needed if not any(n in _all(direct, o) for o in needed - {n})}
            for name, needed in direct.items()
        }
    return found


def _below(folder: str, top: str) -> str:
    if (
        folder.split("/")[0] == "interlace_verify"
    ):  # the package is one room above the rooms of interlace
        return "interlace_verify" if top == "interlace" else ""
    return folder.removeprefix(top + "/").split("/")[0] if folder.startswith(top + "/") else ""


def _all(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return the direct and indirect needs of ``name``."""
    return graph[name].union(*(_all(graph, each) for each in graph[name]))


def graph_text() -> str:
    """A line per folder, lowest first, with what it needs."""
    lines = []
    for top, graph in floors().items():
        lines += [f"{top}/"]
        for name in sorted(graph, key=lambda name: (len(_all(graph, name)), name)):
            lines.append(f"    {name:<18}{' '.join(sorted(graph[name]))}".rstrip())
    return "\n".join(lines) + "\n"


def _rows(names: list[str]) -> list[list[str]]:
    """Rows of at most three names, of nearly equal lengths."""
    count = -(-len(names) // 3)
    return [names[number::count] for number in range(count)]


def drawing() -> str:
    """Draw the graphs as an SVG: arrows point to the needed folders, and the lowest folders need none."""
    width, high, wide, top, parts, places = 480, 28, 136, 20, [], {}
    for title, graph in reversed(floors().items()):
        depths: dict[str, int] = {}
        for name in sorted(graph, key=lambda name: len(_all(graph, name))):
            depths[name] = 1 + max((depths[each] for each in graph[name]), default=-1)
        rows = [
            row
            for depth in range(max(depths.values()) + 1)
            for row in _rows(sorted(name for name in depths if depths[name] == depth))
        ]
        parts.append(f'<text x="10" y="{top + 12}" class="title">{title}/</text>')
        for row in reversed(rows):
            top += high + 34
            for number, name in enumerate(row):
                places[name] = (width * (number + 0.5) / len(row), top)
        for name, needed in graph.items():
            x, y = places[name]
            for to_x, to_y in (places[each] for each in sorted(needed)):
                start, end = f"{x:.0f} {y + high:.0f}", f"{to_x:.0f} {to_y:.0f}"
                bends = f"{x:.0f} {y + high + 25:.0f} {to_x:.0f} {to_y - 25:.0f}"
                far = ' class="far"' if to_y - y > high + 34 else ""
                parts.append(f'<path{far} d="M{start} C{bends} {end}"/>')
        for name in graph:
            x, y = places[name]
            parts.append(
                f'<rect x="{x - wide / 2:.0f}" y="{y}" width="{wide}" height="{high}" rx="5"/>'
            )
            parts.append(f'<text x="{x:.0f}" y="{y + 18}" text-anchor="middle">{name}</text>')
        top += high + 40
    style = (
        "text{font:12px sans-serif;fill:#223}.title{font-weight:bold;fill:#888}"
        "rect{fill:#eef3fb;stroke:#5b7db1}path{fill:none;stroke:#78a}.far{stroke-dasharray:4}"
        "@media(prefers-color-scheme:dark){text{fill:#dde}rect{fill:#2b303c}path{stroke:#9ab}}"
    )
    size = f'viewBox="0 0 {width} {top}" width="{width * 1.25:.0f}" height="{top * 1.25:.0f}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n{body}\n</svg>\n'
    )


# -- figures -----------------------------------------------------------------------------------


def longest_parameter_list(texts: Iterable[str]) -> int:
    functions = (
        node
        for text in texts
        for node in ast.walk(parsed(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return max(
        len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        for node in functions
    )


def within(folder: str, parts: Iterable[str]) -> bool:
    """Whether a folder is one of ``parts``, or in it."""
    return any(folder == part or folder.startswith(f"{part}/") for part in parts)


def folders_of(
    words: Iterable[str], files: dict[str, pathlib.PurePath], texts: dict[str, str]
) -> set[str]:
    """Folders with a function or class whose name contains one of ``words``, but for tools."""
    found = set()
    for module, text in texts.items():
        folder = folder_of(files[module])
        if not within(folder, (*LABORATORY, *TOOLS)):
            kinds = ast.FunctionDef, ast.ClassDef
            names = [node.name for node in ast.walk(parsed(text)) if isinstance(node, kinds)]
            ours = [name for name in names if name not in TORCH_DISPATCH]
            plain = [name.lower().replace("_", "") for name in ours]
            if any(word.replace("_", "") in name for word in words for name in plain):
                found.add(folder)
    return found


def longest_chain() -> int:
    """Floors from ``kernels`` to the highest room that users import: each needs the one below it."""

    def chain(graph: dict[str, set[str]], name: str) -> int:
        return 1 + max((chain(graph, each) for each in graph[name]), default=0)

    return 1 + sum(max(chain(graph, name) for name in graph) for graph in floors().values())


def figures() -> dict[str, str]:
    """Return the figures to watch, and their values."""
    files = sources()
    texts = {module: (ROOT / file).read_text() for module, file in files.items()}
    graph, counts = edges(texts), files_in(files.values())
    largest = max(counts, key=lambda folder: counts[folder])
    kernels = [text for module, text in texts.items() if files[module].parts[0] == "kernels"]
    library = [m for m, file in files.items() if not within(folder_of(file), LABORATORY)]
    lines = {module: text.count("\n") for module, text in texts.items()}
    spread = {op: len(folders_of(words, files, texts)) for op, words in OPS.items()}
    return {
        "source lines": f"{sum(lines.values())}",
        "source lines without the laboratory": f"{sum(lines[m] for m in library)}",
        "files without the laboratory": f"{len(library)}",
        "files": f"{len(files)} in {len(counts)} folders",
        "folders with parts of": ", ".join(f"{op} {count}" for op, count in spread.items()),
        f"files that name {OPTION}": f"{sum(OPTION in text for text in texts.values())}",
        "longest chain of floors": f"{longest_chain()}",
        "circles of files": f"{len(circles(graph))}",
        "circles of folders": f"{len(circles(folder_edges(files, graph)))}",
        "largest folder": f"{largest}: {counts[largest]} files",
        "longest parameter list in kernels/": f"{longest_parameter_list(kernels)}",
    }


def main(arguments: list[str]) -> None:
    if arguments == ["--graph"]:
        print(graph_text(), end="")
    elif arguments == ["--draw"]:
        (ROOT / "docs/images/house.svg").write_text(drawing())
    elif arguments[:1] == ["--trips"]:
        from repository import trips

        trips.report(files="--files" in arguments)
    else:
        for name, value in figures().items():
            print(f"{name:<40}{value}")


if __name__ == "__main__":
    main(sys.argv[1:])
