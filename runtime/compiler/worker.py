"""Compile one kernel for a GPU that may be absent, and measure the result.

The processes of ``pool.py`` run this code. They run without ``TRITON_INTERPRET``, whatever the caller's
setting is. With Triton's cache, which also keeps disassemblies, an unchanged kernel takes milliseconds.

For launches without Triton it writes ``<stem>.cubin``, ``<stem>.ptx`` and ``<stem>.json``. The last one
describes this very compilation: Triton's signature and metadata, and the declarations of the PTX. A cubin
takes the non-constant arguments in order, followed by what Triton's own launcher would add: pointers to
scratch memory. Their number is counted. Anything else that a launch would have to do (clusters, profiling,
tensor maps) is refused here, before a GPU is involved.
"""

import gzip
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from interlace.runtime.compat.stand_ins import installing
from interlace.runtime.compat.triton_launcher import (
    cached,
    compile_for,
    driver_of,
    knobs,
    to_be_run,
    tool,
)
from interlace.runtime.compiler import kept
from interlace.runtime.compiler.lint import sass as sass_rules
from interlace.runtime.compiler.lint.faults import NOWHERE, Frame, describe, select_faults
from interlace.runtime.compiler.lint.sass import loops
from interlace.runtime.compiler.lint.triton_ir import TritonIR
from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.core.errors import PlaceUnavailableError, RankError, SourceText
from interlace.runtime.core.launch import join_leaves, leaves, outside_name

# The values that Triton's launcher passes after the arguments of the signature, in this order.
SCRATCH = ("global_scratch", "profile_scratch")


class ArtifactError(RuntimeError):
    """A compiled kernel needs more of a launch than arguments, shared memory and scratch."""


def write(compiled: Any, stem: str, *, usage: dict[str, int], spills: int) -> None:
    """Write the three files of one compilation. ``usage`` has the names of ``cuobjdump -res-usage``."""
    path = pathlib.Path(stem)
    found = facts(compiled, usage=usage, spills=spills)
    path.with_name(path.name + ".cubin").write_bytes(compiled.asm["cubin"])
    path.with_name(path.name + ".ptx").write_text(compiled.asm["ptx"])
    path.with_name(path.name + ".json").write_text(json.dumps(found))


def facts(compiled: Any, *, usage: dict[str, int], spills: int) -> dict[str, object]:
    """Return what a launch of ``compiled`` needs, and what one program of it uses of a multiprocessor."""
    metadata, source, ptx = compiled.metadata, compiled.src, compiled.asm["ptx"]
    for name, allowed in (("num_ctas", 1), ("profile_scratch_size", 0), ("launch_pdl", False)):
        if (value := getattr(metadata, name)) != allowed:
            raise ArtifactError(f"{metadata.name}: {name} is {value}; a bundle has {allowed}")
    if metadata.tensordesc_meta:
        raise ArtifactError(f"{metadata.name} takes tensor maps, which a bundle cannot make")
    return {
        "symbol": metadata.name,
        "target": _only(r"^\.target (\w+)", ptx),
        "threads": int(_only(r"\.reqntid (\d+)", ptx)),
        "arguments": _arguments(source, metadata.name, ptx),
        "constants": {
            outside_name(path): value
            for place, constant in sorted(source.constants.items())
            for path, value in leaves({_path(source, place): constant}).items()
        },
        "shared_memory": {"static": usage["SHARED"], "dynamic": metadata.shared},
        "scratch": {
            "bytes_per_program": metadata.global_scratch_size,
            "alignment": metadata.global_scratch_align,
        },
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "spill_instructions": spills,
        "tensor_memory_columns": metadata.tmem_size or 0,
    }


def _arguments(source: Any, symbol: str, ptx: str) -> list[dict[str, Any]]:
    """Return every parameter of the cubin in order: the signature's, then scratch."""
    declared = _parameters(symbol, ptx)
    divisible = {
        _path(source, place)
        for place, attribute in source.attrs.items()
        if any(name == "tt.divisibility" and value % 16 == 0 for name, value in attribute)
    }
    arguments: list[dict[str, Any]] = [
        {
            "name": outside_name(path),
            "from": "caller",
            "type": kind,
            "divisible_by": 16 if path in divisible else 1,
        }
        for path, kind in leaves(source.signature).items()
        if kind != "constexpr"
    ]
    hidden = len(declared) - len(arguments)
    if hidden != len(SCRATCH):
        raise ArtifactError(
            f"{symbol} has {hidden} parameters besides its signature; interlace knows {SCRATCH}"
        )
    scratch = {"from": "loader", "type": "*u8", "divisible_by": 1}
    arguments += [{"name": name, **scratch} for name in SCRATCH]
    offset = 0
    for argument, (size, used) in zip(arguments, declared, strict=True):
        if size != (expected := _size(argument["type"])):
            raise ArtifactError(
                f"{symbol} takes {size} bytes for {argument['name']}, a {argument['type']} "
                f"has {expected}"
            )
        offset = -(-offset // size) * size
        argument |= {"bytes": size, "offset": offset, "used": used}
        offset += size
    return arguments


def _path(source: Any, place: tuple[int, ...]) -> str:
    """Return the name of an argument, or of its field, which Triton identifies by position."""
    name = source.fn.arg_names[place[0]]
    return ".".join((name, *(source.signature[name]._fields[each] for each in place[1:])))


def _size(kind: str) -> int:
    if kind.startswith("*"):
        return 8
    if not re.fullmatch("[iu](8|16|32|64)|fp32", kind):
        raise ArtifactError(f"arguments of type {kind} are not supported in a bundle")
    return int(kind.lstrip("iufp")) // 8


def _parameters(symbol: str, ptx: str) -> list[tuple[int, bool]]:
    """Return (bytes, whether the kernel reads it) of every parameter that the PTX declares."""
    found = re.findall(rf"\.param \.[usbf](\d+)[^\n]*? {symbol}_param_(\d+)", ptx)
    assert [int(index) for _, index in found] == list(range(len(found))), found
    return [
        (int(bits) // 8, len(re.findall(rf"\b{symbol}_param_{index}\b", ptx)) > 1)
        for bits, index in found
    ]


def _only(pattern: str, ptx: str) -> str:
    (found,) = re.findall(pattern, ptx, re.MULTILINE)
    return str(found)


# Set in compiling processes: otherwise a script that compiles at its top level would start another one.
COMPILING = "INTERLACE_COMPILING"


class ReenteredError(BaseException):
    """Raised when a file that is loaded for its kernel starts a compilation; its kernel may exist."""


def load(request: Compilation) -> Any:
    """Load the kernel of ``request``, in a process in which ``@triton.jit`` compiles."""
    sys.meta_path.append(finder := Absent(request.absent))
    try:
        module = _import_module(request.module, request.path) or _load_module(
            request.path, request.kernel
        )
    finally:
        sys.meta_path.remove(finder)
    kernel = getattr(module, request.kernel)
    while not hasattr(kernel, "raw_src") and hasattr(kernel, "fn"):
        kernel = kernel.fn  # inside an autotuner or heuristics
    return kernel


class Nothing(ModuleType):
    """A stand-in module for a package that is not installed, so that a file that imports it can load."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *args: object, **kwargs: object) -> "Nothing":
        return self

    def __or__(self, other: object) -> "Nothing":
        return self

    __ror__ = __or__


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``packages`` that no other finder knows, and returns empty modules for them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _import_module(name: str, path: str) -> ModuleType | None:
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


def _load_module(path: str, kernel: str) -> ModuleType:
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
        # a script that runs ranks at its top level may raise the error of a rank
        raised = error.original if isinstance(error, RankError) else error
        wanted_ranks = isinstance(raised, (ReenteredError, PlaceUnavailableError))
        if not wanted_ranks or not hasattr(module, kernel):
            del sys.modules[name]
            raise
    return module


def compile_kernel(request: Compilation) -> Any:
    """Return Triton's compiled kernel. Only in a process in which ``@triton.jit`` compiles."""
    knobs.cache.dir = str(kept.folder(request.path))
    with driver_of(request.arch):
        return _compile(load(request), request)


def _compile(kernel: Any, request: Compilation) -> Any:
    names = list(kernel.arg_names)
    requested = dict.fromkeys(path.partition(".")[0] for path in request.types)
    if requested.keys() != set(names):
        differing = sorted(requested.keys() ^ set(names))
        raise TypeError(f"the request and {request.kernel} differ in arguments {differing}")
    options: dict[str, object] = {
        "num_warps": request.num_warps,
        "num_stages": request.num_stages,
        **({"maxnreg": request.max_registers} if request.max_registers else {}),
    }
    if request.to_run:
        options["sanitize_overflow"] = False  # it would add conditions at every operation
    if request.libraries:
        options["extern_libs"] = request.libraries
    return compile_for(kernel, _specialise(names, request), request.arch, options)


def _specialise(names: list[str], request: Compilation) -> dict[str, object]:
    """Return ``request`` in Triton's terms. A tuple of constants only is one constant."""
    signature, constants = join_leaves(request.types), join_leaves(request.constants)
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
    with to_be_run(), installing(request.stand_ins):
        # This comes before Triton's folder is set to this kernel's.
        file = kept.file_of(request, load(request))
        kernel = compile_kernel(request)
    metadata = kernel.metadata
    if metadata.num_ctas != 1:
        raise NotImplementedError("clusters are not run")
    measurement = Measurement(
        shared=int(metadata.shared),
        ptx=kernel.asm["ptx"],
        scratch=int(metadata.global_scratch_size),
        descriptors=tuple(metadata.tensordesc_meta or ()),
    )
    if file is not None:
        kept.write(file, measurement)
    return measurement


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
        write(kernel, request.artifacts, usage=used, spills=spills)
    tensor_cores, found = None, []
    if not all(dot.exact for dot in ir.dots()):
        tensor_cores = sass_rules.tensor_core_instructions(counts, arch, any_kind=True)
    if not request.libraries:
        found = sass_rules.faults(ir, kernel.asm["ptx"], sass, arch, request.num_warps)
    faults = select_faults(found, request.ignore)
    sizes = used["REG"], used["STACK"], spills, int(kernel.metadata.shared)
    return Measurement(*sizes, tensor_cores, faults, loops=loops(sass))


def _disassembly(cubin: bytes, file_name: str) -> str:
    """Return SASS with line information. Triton's cache keeps it: nvdisasm takes 0.3 s or more."""
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
    """Describe a compiler's error, which may have thousands of lines, in one line."""
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [line.strip() for line in str(cause).splitlines()]
        # ptxas' own messages come before the command to run it again
        last = [line for line in lines if line and not line.startswith("Repro command")]
        first = [line.partition("; ")[2] for line in lines if "; error " in line]  # ptxas'
        causes.append(f"{type(cause).__name__}: {(first or last[-1:] or [''])[0]}")
        cause = cause.__cause__
    return "; ".join(causes)[:1000]


def _refused_line(request: Compilation, error: BaseException) -> SourceText:
    """Return the line of the kernel that Triton's front end refused, if it failed there."""
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
    """Load the file of ``request``. Return the error's measurement if that fails, else None."""
    try:
        with installing(request.stand_ins):
            load(request)
    except (Exception, ReenteredError) as error:
        return Measurement(error=_describe(error), where=_refused_line(request, error))
    return None


def measure_or_error(request: Compilation) -> Measurement:
    try:
        return measure(request)
    except (Exception, ReenteredError) as error:
        return Measurement(error=_describe(error), where=_refused_line(request, error))
