"""The laws of the device code that the source text alone can break (DESIGN.md, laws 9 to 12).

Each law is a function over source text that returns what breaks it, and is shown text that it must
flag: a checker that cannot fail says nothing.
"""

import ast
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
SIGNAL = KERNELS / "signal.py"
# A table of extern functions; kernels call them behind a constexpr.
EXTERNS = KERNELS / "node_puts.py"
CONSTEXPR = re.compile(r"[A-Z][A-Z0-9_]*\Z")
MOST_PARAMETERS = 14
PER_RANK = re.compile(r"peer|rank|base|buf|remote|symm")
FunctionDef = ast.FunctionDef


def is_jitted(function: FunctionDef) -> bool:
    """Decorated with @triton.jit, @jit, or a call of either."""
    names = []
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.append(target.attr if isinstance(target, ast.Attribute) else ast.unparse(target))
    return "jit" in names


def jitted(source: str) -> Iterator[FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FunctionDef) and is_jitted(node):
            yield node


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def pointer_tuples(source: str) -> list[str]:
    """Law 9: peers are reached through an int64 table, never through a tuple of W pointers.

    Seen in the text: a parameter annotated as a tuple, or a parameter named for ranks that is
    subscripted by a plain index, iterated or measured. Tensors take slices and None only.
    """
    found = []
    for function in jitted(source):
        for arg in function.args.args:
            if arg.annotation and "tuple" in ast.unparse(arg.annotation).lower():
                found.append(f"line {arg.lineno}: {arg.arg} is annotated as a tuple")
        named = {a.arg for a in function.args.args if PER_RANK.search(a.arg)}
        for node in ast.walk(function):
            used: ast.expr | None = None
            if isinstance(node, ast.Subscript):
                index = ast.unparse(node.slice)
                used = None if ":" in index or "None" in index else node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                used = node.iter
            elif isinstance(node, ast.Call) and called_name(node) == "len":
                used = node.args[0]
            if isinstance(used, ast.Name) and used.id in named:
                found.append(f"line {used.lineno}: {used.id} is used as a tuple")
    return found


def foreign_calls(source: str) -> list[str]:
    """Law 10: inline asm and extern calls are under an `if` whose names are all UPPER_CASE."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def hidden(node: ast.AST) -> bool:
        above = parents.get(node)
        while above is not None and not isinstance(above, FunctionDef):
            if isinstance(above, (ast.If, ast.IfExp)) and node is not above.test:
                names = [n.id for n in ast.walk(above.test) if isinstance(n, ast.Name)]
                if names and all(CONSTEXPR.match(name) for name in names):
                    return True
            node, above = above, parents.get(above)
        return False

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = called_name(node)
            last = name.rpartition(".")[2]
            foreign = last in ("inline_asm_elementwise", "extern_elementwise")
            foreign = foreign or "libdevice." in name or "nvshmem" in name
            if foreign and not hidden(node):
                found.append(f"line {node.lineno}: {name}")
    return found


def memory_ordering(source: str) -> list[str]:
    """Law 11: only kernels/signal.py names atomics, `sem=` and `scope=`."""
    found: list[str] = []
    if not re.search(r"atomic_|\b(sem|scope)\b", source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("atomic_"):
            # The runtime may name the interpreter's own atomics, which are not device code.
            if ast.unparse(node.value) in ("tl", "tl.core", "triton.language"):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
            names = [a.name for a in node.names if a.name.startswith("atomic_")]
            found += [f"line {node.lineno}: {name}" for name in names]
    for function in jitted(source):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                words = [k.arg for k in node.keywords if k.arg in ("sem", "scope")]
                found += [f"line {node.lineno}: {word}=" for word in words]
    return found


def kernel_docstrings(source: str) -> list[str]:
    """Law 12: a kernel (jitted, named *_kernel) states its ordering and shows an example."""
    found = []
    for function in jitted(source):
        if function.name.endswith("_kernel"):
            text = ast.get_docstring(function) or ""
            missing = [part for part in ("Ordering:", "Example:") if part not in text]
            if missing:
                found.append(f"line {function.lineno}: {function.name} lacks {', '.join(missing)}")
    return found


def long_parameter_lists(source: str) -> list[str]:
    """Related parameters travel together (``kernels/arguments.py``), so that few are left."""
    return [
        f"line {function.lineno}: {function.name} has {len(function.args.args)} parameters"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, FunctionDef) and len(function.args.args) > MOST_PARAMETERS
    ]


def breaches(law: Callable[[str], list[str]], files: list[pathlib.Path]) -> dict[str, list[str]]:
    found = {str(f.relative_to(ROOT)): law(f.read_text()) for f in files}
    return {file: bad for file, bad in found.items() if bad}


def device_files(*, outside_ordering: bool) -> list[pathlib.Path]:
    return [f for f in sorted(KERNELS.rglob("*.py")) if not (outside_ordering and f == SIGNAL)]


def test_law_9_no_pointer_tuples() -> None:
    assert breaches(pointer_tuples, device_files(outside_ordering=False)) == {}


def test_law_10_no_foreign_calls_in_the_interpreter() -> None:
    files = [file for file in device_files(outside_ordering=False) if file != EXTERNS]
    assert breaches(foreign_calls, files) == {}
    assert list(jitted(EXTERNS.read_text())) == []


def test_words_that_carry_their_flag_order_nothing() -> None:
    """Data and flag are one word; code that relies on an order uses publish and wait."""
    source = SIGNAL.read_text()
    names = {"store_words", "look_for_words", "count_program"}
    parts = [ast.get_source_segment(source, f) or "" for f in jitted(source) if f.name in names]
    words = "\n".join(parts)
    assert len(parts) == len(names)
    assert set(re.findall(r'sem="(\w+)"', words)) == {"relaxed"}
    assert not re.search(r"\.(acquire|release|acq_rel)|fence|membar|volatile", words)


def test_law_11_memory_ordering_in_signal() -> None:
    host = [f.resolve() for folder in ("runtime", "python") for f in (ROOT / folder).rglob("*.py")]
    # the shims say what order the functions of others give
    others = (KERNELS, ROOT / "python/interlace_verify/shims")
    host = [f for f in sorted(set(host)) if not {*others}.intersection(f.parents)]
    assert breaches(memory_ordering, device_files(outside_ordering=True) + host) == {}


def test_parameter_lists_are_short() -> None:
    assert breaches(long_parameter_lists, device_files(outside_ordering=False)) == {}


def test_law_12_kernels_explain_themselves() -> None:
    assert breaches(kernel_docstrings, device_files(outside_ordering=False)) == {}


JIT = "import triton\nimport triton.language as tl\n@triton.jit\n"
BAD = [
    (pointer_tuples, JIT + "def copy_kernel(peers: tuple):\n    pass"),
    (pointer_tuples, JIT + "def copy_kernel(peer_ptrs, n):\n    tl.store(peer_ptrs[n], 1)"),
    (pointer_tuples, JIT + "def f(buffers):\n    for b in buffers:\n        tl.store(b, 1)"),
    (
        foreign_calls,
        JIT + "def f(x):\n    tl.inline_asm_elementwise('', '=r', [x], tl.int32, 1, 1)",
    ),
    (foreign_calls, JIT + "def f(x, n):\n    if n > 0:\n        x = libdevice.rint(x)"),
    (foreign_calls, JIT + "def f(x, N):\n    if tl.program_id(0) < N:\n        nvshmem_quiet()"),
    (foreign_calls, JIT + "def f(x, put):\n    if put:\n        nvshmem.signal(x, 1, 9, 1)"),
    (memory_ordering, JIT + "def f(p):\n    tl.atomic_add(p, 1)"),
    (memory_ordering, "from triton.language import atomic_cas"),
    (memory_ordering, JIT + "def f(p):\n    publish(p, scope='gpu')"),
    (memory_ordering, JIT + "def f(p):\n    publish(p, sem='relaxed')"),
    (kernel_docstrings, JIT + "def copy_kernel(p):\n    pass"),
    (long_parameter_lists, JIT + "def f(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o):\n    pass"),
    (kernel_docstrings, JIT + 'def copy_kernel(p):\n    """Copy.\n\n    Ordering: none.\n    """'),
]


@pytest.mark.parametrize(("law", "source"), BAD)
def test_breaches_are_seen(law: Callable[[str], list[str]], source: str) -> None:
    assert law(source)
