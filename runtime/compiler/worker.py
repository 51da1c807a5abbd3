"""Compile one kernel for a GPU that need not be here, and measure what came out.

This is what the processes of ``server.py`` do: they run without ``TRITON_INTERPRET``, whatever
the caller does, and make a :class:`Measurement` of each :class:`Compilation`. Triton's cache, which
keeps disassemblies too, makes the second time of an unchanged kernel a matter of milliseconds.
"""

import gzip
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from interlace.runtime.compat.stand_ins import installed
from interlace.runtime.compat.triton_launcher import (
    cached,
    compiled,
    driver_of,
    knobs,
    to_be_run,
    tool,
)
from interlace.runtime.compiler import artifacts, kept
from interlace.runtime.compiler.lint import sass as sass_rules
from interlace.runtime.compiler.lint.faults import NOWHERE, Frame, describe, selected
from interlace.runtime.compiler.lint.sass import loops
from interlace.runtime.compiler.lint.triton_ir import TritonIR
from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.core.errors import PlaceUnavailableError, RankError, SourceText
from interlace.runtime.core.kernel_arguments import joined, leaves

# Set in compiling processes. A script that compiles at its top level would otherwise start another.
COMPILING = "INTERLACE_COMPILING"


class ReenteredError(BaseException):
    """A file that is being loaded for its kernel wants to compile; the kernel may be there already."""


def load(request: Compilation) -> Any:
    """The kernel of ``request``, compiled where ``@triton.jit`` compiles."""
    sys.meta_path.append(finder := Absent(request.absent))
    try:
        module = _imported(request.module, request.path) or _loaded(request.path, request.kernel)
    finally:
        sys.meta_path.remove(finder)
    kernel = getattr(module, request.kernel)
    while not hasattr(kernel, "raw_src") and hasattr(kernel, "fn"):
        kernel = kernel.fn  # under an autotuner or heuristics
    return kernel


class Nothing(ModuleType):
    """What there is in a package that is not there: a file that imports it for its host side is loaded."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *args: Any, **kwargs: Any) -> "Nothing":
        return self

    def __or__(self, other: Any) -> "Nothing":
        return self

    __ror__ = __or__


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``packages`` where nobody else does, with nothing in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _imported(name: str, path: str) -> ModuleType | None:
    if name == "__main__":
        return None
    try:
        module = importlib.import_module(name)
    except ImportError:
        if not path:
            raise
        return None
    file = getattr(module, "__file__", None)
    same = not path or (file is not None and os.path.realpath(file) == os.path.realpath(path))
    return module if same else None


def _loaded(path: str, kernel: str) -> ModuleType:
    name = "_interlace_kernels_" + re.sub(r"\W", "_", os.path.realpath(path))
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        # of a script that runs ranks at its top level it may be the error of one, or that none can be run
        raised = error.original if isinstance(error, RankError) else error
        wanted_ranks = isinstance(raised, (ReenteredError, PlaceUnavailableError))
        if not wanted_ranks or not hasattr(module, kernel):
            del sys.modules[name]
            raise
    return module


def compile_kernel(request: Compilation) -> Any:
    """Triton's compiled kernel. Only where ``@triton.jit`` compiles."""
    knobs.cache.dir = str(kept.folder(request.path))
    with driver_of(request.arch):
        return _compiled(load(request), request)


def _compiled(kernel: Any, request: Compilation) -> Any:
    names = list(kernel.arg_names)
    given = dict.fromkeys(path.partition(".")[0] for path in request.types)
    if given.keys() != set(names):
        differing = sorted(given.keys() ^ set(names))
        raise TypeError(f"the request and {request.kernel} differ in arguments {differing}")
    options: dict[str, Any] = {
        "num_warps": request.num_warps,
        "num_stages": request.num_stages,
        **({"maxnreg": request.max_registers} if request.max_registers else {}),
    }
    if request.to_run:
        options["sanitize_overflow"] = False  # conditions of its own at every operation
    if request.libraries:
        options["extern_libs"] = request.libraries
    return compiled(kernel, _specialised(names, request), request.arch, options)


def _specialised(names: list[str], request: Compilation) -> dict[str, Any]:
    """``request`` in Triton's words. A tuple of nothing but constants is one constant."""
    signature, constants = joined(request.types), joined(request.constants)
    places: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, tuple) and set(kind) == {"constexpr"}:
            signature[name] = kind = "constexpr"
        if isinstance(kind, tuple):
            fields = leaves({name: kind})
            places |= {path: (index, number) for number, path in enumerate(fields)}
        else:
            places[name] = (index,)
    fixed = {**constants, **request.constants}
    return {
        "signature": {name: signature[name] for name in names},
        "constexprs": {place: fixed[path] for path, place in places.items() if path in fixed},
        "attrs": {places[path]: [["tt.divisibility", 16]] for path in request.divisible},
    }


def _to_run(request: Compilation) -> Measurement:
    with to_be_run(), installed(request.stand_ins):
        file = kept.file_of(request, load(request))  # before Triton's folder is this kernel's
        kernel = compile_kernel(request)
    metadata = kernel.metadata
    if metadata.num_ctas != 1:
        raise NotImplementedError("clusters are not run")
    made = Measurement(
        shared=int(metadata.shared),
        ptx=kernel.asm["ptx"],
        scratch=int(metadata.global_scratch_size),
        descriptors=tuple(metadata.tensordesc_meta or ()),
    )
    if file is not None:
        kept.write(file, made)
    return made


def measure(request: Compilation) -> Measurement:
    if request.to_run:
        return _to_run(request)
    kernel = compile_kernel(request)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _disassembly(kernel.asm["cubin"], file.name)
    ir, arch = TritonIR(kernel.asm["source"]), request.arch
    counts = sass_rules.instruction_counts(sass)
    spills = sass_rules.spills(counts)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    if request.artifacts:
        artifacts.write(kernel, request.artifacts, usage=used, spills=spills)
    tensor_cores, found = None, []
    if not all(dot.exact for dot in ir.dots()):
        tensor_cores = sass_rules.tensor_core_instructions(counts, arch, any_kind=True)
    if not request.libraries:
        found = sass_rules.faults(ir, kernel.asm["ptx"], sass, arch, request.num_warps)
    faults = selected(found, request.ignore)
    sizes = used["REG"], used["STACK"], spills, int(kernel.metadata.shared)
    return Measurement(*sizes, tensor_cores, faults, loops=loops(sass))


def _disassembly(cubin: bytes, file_name: str) -> str:
    """SASS with line information. Triton's cache keeps it: nvdisasm takes 0.3 s for the smallest kernel."""
    version = tool("nvdisasm").version
    digest = hashlib.blake2b(cubin, key=f"nvdisasm -g {version}".encode(), digest_size=32)
    manager, name = cached(digest.hexdigest()), "disassembly.sass.gz"
    found = manager.get_file(name)
    if found:
        return gzip.decompress(pathlib.Path(found).read_bytes()).decode()
    sass = _tool("nvdisasm", "-g", file_name)
    manager.put(gzip.compress(sass.encode(), compresslevel=1), name)
    return sass


def _tool(name: str, *arguments: str) -> str:
    command = [tool(name).path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _describe(error: BaseException) -> str:
    """One line for a compiler's error, which may be thousands long."""
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [line.strip() for line in str(cause).splitlines()]
        # ptxas' own words come before the command to run it again
        last = [line for line in lines if line and not line.startswith("Repro command")]
        first = [line.partition("; ")[2] for line in lines if "; error " in line]  # ptxas'
        causes.append(f"{type(cause).__name__}: {(first or last[-1:] or [''])[0]}")
        cause = cause.__cause__
    return "; ".join(causes)[:1000]


def _refused(request: Compilation, error: BaseException) -> SourceText:
    """The line of the kernel that Triton's front end refused, if that is where it failed."""
    line = getattr(getattr(error, "node", None), "lineno", None)
    if line is None:
        return NOWHERE
    kernel = load(request)
    decorators = next(
        i for i, text in enumerate(kernel.raw_src) if text.lstrip().startswith("def ")
    )
    first: int = kernel.starting_line_number + decorators  # lines count from the "def"
    return describe((Frame(kernel.fn.__code__.co_filename, first + line - 1),))


def refused_file(request: Compilation) -> Measurement | None:
    """Load the file of ``request``; what came of it if it cannot be."""
    try:
        with installed(request.stand_ins):
            load(request)
    except (Exception, ReenteredError) as error:
        return Measurement(error=_describe(error), where=_refused(request, error))
    return None


def measured(request: Compilation) -> Measurement:
    """:func:`measure`, or the error that it is."""
    try:
        return measure(request)
    except (Exception, ReenteredError) as error:
        return Measurement(error=_describe(error), where=_refused(request, error))
