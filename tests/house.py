"""The house in figures: which folder may import which, how large it is, and how tangled.

    python tests/house.py            the figures, without those that run code
    python tests/house.py --trips    also the files that a call enters on its way to the launch

``FOLDERS`` is the plan: a line per folder, lowest first, with the folders that its files may import.
``tests/test_layout.py`` holds the code against it.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("kernels", "runtime", "python")
MOST_FILES = 13
MOST_PARAMETERS = 14

# Besides, every folder of runtime and python may import kernels.
FOLDERS = {
    "kernels": "",
    "kernels/collectives": "kernels",
    "kernels/fused": "kernels kernels/collectives",
    "kernels/nodes": "kernels kernels/fused",
    "runtime": "",
    "runtime/core": "",
    "runtime/numerics": "",
    "runtime/interpreter/inline_ptx": "runtime/core runtime/numerics",
    "runtime/interpreter": "runtime/core runtime/interpreter/inline_ptx runtime/numerics",
    "runtime/places": "",
    "runtime/places/one_host": "runtime/core",
    "runtime/places/shm/machine_code": "",
    "runtime/scheduler": "runtime/core runtime/interpreter",
    "runtime/places/shm": (
        "runtime/core runtime/interpreter runtime/numerics runtime/places/one_host "
        "runtime/places/shm/machine_code runtime/scheduler"
    ),
    "runtime/places/hosts": (
        "runtime/core runtime/numerics runtime/places/one_host runtime/places/shm"
    ),
    "runtime/tuning": "runtime/core",
    "runtime/algorithms": "runtime/core runtime/numerics runtime/tuning",
    "runtime/compiler/lint": "runtime/tuning",
    "runtime/compiler": "runtime/compiler/lint runtime/core runtime/tuning",
    "runtime/compiler/bundle": "runtime/compiler runtime/core runtime/tuning",
    "runtime/engines": "runtime/algorithms runtime/core runtime/numerics runtime/tuning",
    "runtime/places/cuda": "runtime/core runtime/engines runtime/tuning",
    "runtime/places/cuda_processes": "runtime/core runtime/places/cuda runtime/places/one_host",
    "runtime/places/nvshmem": (
        "runtime/compiler runtime/core runtime/places/cuda runtime/places/cuda_processes"
    ),
    "runtime/places/sim": (
        "runtime/core runtime/engines runtime/interpreter/inline_ptx runtime/scheduler"
    ),
    "runtime/start": (
        "runtime/core runtime/places/cuda runtime/places/cuda_processes "
        "runtime/places/hosts runtime/places/nvshmem runtime/places/one_host "
        "runtime/places/shm"
    ),
    "interlace/arguments": "runtime/core runtime/numerics runtime/tuning",
    "interlace/cli/output": "runtime/places/hosts runtime/places/shm/machine_code",
    "interlace/groups": "interlace/arguments runtime/core runtime/start",
    "interlace/collectives": (
        "interlace/arguments interlace/groups runtime/algorithms runtime/core "
        "runtime/engines runtime/numerics"
    ),
    "interlace/fused": (
        "interlace/arguments interlace/collectives runtime/algorithms runtime/core "
        "runtime/numerics runtime/tuning"
    ),
    "interlace/ops/eager": (
        "interlace/arguments interlace/collectives interlace/fused runtime/algorithms "
        "runtime/core runtime/tuning"
    ),
    "interlace/ops": (
        "interlace/arguments interlace/fused interlace/groups interlace/ops/eager "
        "runtime/algorithms runtime/core runtime/numerics"
    ),
    "interlace/compile": "interlace/ops runtime/tuning",
    "interlace/functional": (
        "interlace/arguments interlace/groups interlace/ops interlace/ops/eager runtime/core"
    ),
    "interlace/nn/functions": (
        "interlace/arguments interlace/collectives interlace/fused interlace/groups "
        "interlace/ops interlace/ops/eager runtime/algorithms runtime/core"
    ),
    "interlace/integrations": "interlace/groups interlace/nn/functions runtime/core",
    "interlace/process_group": (
        "interlace/arguments interlace/collectives interlace/groups runtime/core "
        "runtime/numerics runtime/places/cuda runtime/start"
    ),
    "interlace/symmetric_memory": (
        "interlace/arguments interlace/groups interlace/ops/eager runtime/core"
    ),
    "interlace/tensor/uneven": (
        "interlace/arguments interlace/collectives interlace/groups interlace/ops runtime/core"
    ),
    "interlace/verify/lint_check": "runtime/compiler runtime/compiler/lint runtime/core",
    "interlace/verify/protocols": "runtime/core",
    "python": "interlace/compile interlace/process_group",
    "interlace": (
        "interlace/arguments interlace/collectives interlace/functional interlace/fused "
        "interlace/groups interlace/ops interlace/ops/eager interlace/symmetric_memory "
        "python runtime/core runtime/numerics runtime/places/cuda runtime/places/sim "
        "runtime/start runtime/tuning"
    ),
    "interlace/benchmark/timing": "interlace interlace/groups",
    "interlace/benchmark": "interlace/benchmark/timing",
    "interlace/cli/demo": (
        "interlace interlace/cli/output interlace/groups runtime/scheduler runtime/tuning"
    ),
    "interlace/tensor/mesh": (
        "interlace interlace/arguments interlace/collectives interlace/functional "
        "interlace/groups interlace/ops runtime/core runtime/tuning"
    ),
    "interlace/tensor": "interlace/tensor/mesh interlace/tensor/uneven",
    "interlace/nn/parameters": (
        "interlace/collectives interlace/groups interlace/tensor runtime/core"
    ),
    "interlace/nn/layers": (
        "interlace/arguments interlace/collectives interlace/groups "
        "interlace/nn/functions interlace/nn/parameters runtime/core runtime/numerics"
    ),
    "interlace/nn": "interlace/nn/functions interlace/nn/layers interlace/nn/parameters",
    "interlace/verify/schedule_check": (
        "interlace runtime/core runtime/interpreter runtime/places/sim runtime/scheduler"
    ),
    "interlace/verify/race_check": (
        "interlace interlace/verify/lint_check interlace/verify/schedule_check "
        "runtime/core runtime/interpreter runtime/places/sim runtime/scheduler"
    ),
    "interlace/verify": (
        "interlace/verify/lint_check interlace/verify/protocols "
        "interlace/verify/race_check interlace/verify/schedule_check"
    ),
    "interlace/verify/suite": (
        "interlace interlace/groups interlace/verify/lint_check "
        "interlace/verify/protocols interlace/verify/race_check "
        "interlace/verify/schedule_check runtime/compiler runtime/core "
        "runtime/places/sim runtime/tuning"
    ),
    "interlace/benchmark/subjects": (
        "interlace interlace/benchmark/timing interlace/groups interlace/verify/suite "
        "runtime/algorithms runtime/core"
    ),
    "interlace/benchmark/runs": (
        "interlace/benchmark/subjects interlace/benchmark/timing interlace/groups "
        "runtime/core runtime/tuning"
    ),
    "interlace/cli/bench": (
        "interlace interlace/benchmark/runs interlace/benchmark/subjects "
        "interlace/benchmark/timing interlace/cli/output interlace/groups"
    ),
    "interlace/cli/commands": (
        "interlace interlace/cli/bench interlace/cli/output interlace/tensor/mesh "
        "interlace/verify/suite runtime/algorithms runtime/compiler "
        "runtime/compiler/bundle runtime/core runtime/tuning"
    ),
    "interlace/cli/tune": (
        "interlace interlace/benchmark/runs interlace/benchmark/subjects "
        "interlace/benchmark/timing interlace/cli/bench interlace/cli/output "
        "interlace/fused runtime/tuning"
    ),
    "interlace/cli": (
        "interlace interlace/cli/bench interlace/cli/commands interlace/cli/demo "
        "interlace/cli/output interlace/cli/tune runtime/core"
    ),
    "program": "interlace/cli",
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


def imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports anywhere in it; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def edges(texts: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, out of module -> source."""
    found = {}
    for module, text in texts.items():
        # `from a import b` means the module a.b where there is one, else a itself.
        names = {n if n in texts else n.rpartition(".")[0] for n in imported(text)}
        found[module] = (names & texts.keys()) - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other: strongly connected components of more than one."""
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
    """The folder of a file as ``FOLDERS`` names it; ``python -m interlace`` counts as one of its own."""
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


def files_in(files: Iterable[pathlib.PurePath]) -> dict[str, int]:
    """How many files a folder has, beside its ``__init__.py``."""
    counts: dict[str, int] = {}
    for file in files:
        counts[folder_of(file)] = counts.get(folder_of(file), 0) + (file.name != "__init__.py")
    return counts
