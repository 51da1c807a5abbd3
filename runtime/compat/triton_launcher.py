"""Triton's compiler, launcher and driver, as far as interlace uses their internals; Triton 3.6 to 3.9.

The releases differ::

    launcher   3.6 takes the arguments of a launch one by one, tuples as tuples; 3.7 to 3.9 take a list, and
               the kinds of single values beside it: :func:`direct`. Untried releases use ``kernel.run``
    unloading  3.8 unloads a kernel's module when the kernel is freed; a jitted function's stays, because
               its own cache keeps it
"""

import dis
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import quote

from interlace.runtime.compat.releases import installed_release, release, requiring, was_tried
from interlace.runtime.compat.stand_ins import replacing

FUSED = {"enable_fp_fusion": True}
"""The default of all these releases. 3.9 warns that the next release changes it."""

with requiring("Triton", "Triton's compiler"):
    import triton
    from triton import knobs
    from triton._C import libtriton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import _allocation, driver
    from triton.runtime.jit import DependenciesFinder, mangle_type

    _ = driver.set_active, driver._active

__all__ = ["knobs", "mangle_type"]

DirectLaunch = Callable[
    [tuple[int, int, int], int, tuple[Any, Any, Any], int | None, list[Any]], None
]
"""(grid, stream, (metadata, enter hook, leave hook), address of the scratch memory or None, values)"""


PROGRAMS = 8
"""The number of programs that may wait for each other, each on an SM of its own."""


class StandIn:
    """A driver of a GPU that may be absent, for code that asks ``triton.runtime.driver.active``."""

    def __init__(self, arch: int) -> None:
        self.arch, self.utils = arch, self

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> Any:
        import torch  # compiling processes run without it

        on_gpu = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_device_properties(self, device: object = 0) -> dict[str, int]:
        return {
            "max_shared_mem": (227 if self.arch >= 90 else 163) << 10,
            "max_num_regs": 65536,
            "multiprocessor_count": PROGRAMS,
            "warpSize": 32,
        }


@contextmanager
def driver_of(arch: int) -> Iterator[None]:
    """Within the block the active driver is one of an ``arch``, 90 for sm_90."""
    before = driver._active
    driver.set_active(StandIn(arch))
    try:
        yield
    finally:
        driver._active = before


def compile_for(
    fn: Any, arguments: Mapping[str, Any], arch: int, options: dict[str, object]
) -> Any:
    """Return Triton's compiled kernel for a GPU that may be absent; ``arguments`` of its ``ASTSource``."""
    from triton.compiler import ASTSource

    kind = ASTSource
    if fn.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    source = kind(fn=fn, **arguments)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**FUSED, **options})


@functools.cache
def ready_to_compile() -> None:
    """Do what Triton does once before it compiles: imports, its own digest, versions of its tools."""
    from triton.compiler import make_backend

    make_backend(GPUTarget("cuda", 80, 32)).hash()
    _ = tool("nvdisasm").version
    with suppress(ImportError):  # another release has it elsewhere: then every fork does it
        from triton.runtime.cache import triton_key

        triton_key()


@functools.cache
def version_and_settings() -> str:
    """Return what Triton's cache distinguishes; Triton's own code only by its version and size."""
    settings = dict(libtriton.get_cache_invalidating_env_vars())
    settings.pop("TRITON_DISABLE_LINE_INFO", None)  # compiling processes have their own setting
    size = os.path.getsize(libtriton.__file__)
    return f"{triton.__version__} {size} {sorted(settings.items())}"


def unknown_options(names: Iterable[str]) -> list[str]:
    """Return the keywords of a launch that no GPU compiler of Triton accepts."""
    return sorted({*names} - _options())


@functools.cache
def _options() -> frozenset[str]:
    homes = [sys.modules[backend.compiler.__module__] for backend in backends.values()]
    classes = [(home.__name__, each) for home in homes for each in vars(home).values()]
    kinds = [each for home, each in classes if is_dataclass(each) and each.__module__ == home]
    return frozenset(field.name for kind in kinds for field in fields(kind))


@contextmanager
def to_be_run() -> Iterator[None]:
    """Within the block, compiling ends with PTX that is run on a CPU; called functions need not exist.

    A kernel's assertions are ``check`` instructions there (``ptx/waits.py``). Triton's own code for an
    assertion contains a barrier, which would hide a missing barrier. ``check`` instructions contain none.
    """
    from triton.language import core as tl
    from triton.language.semantic import TritonSemantic

    def change(backend: object = None, stages: Any = None, *rest: object) -> Any:
        if stages is None:
            return "checked ptx", "checked ptx"  # distinguishes them in Triton's cache
        stages["cubin"] = lambda ptx, metadata: b""
        return None

    def check(language: Any, condition: Any, name: str, message: object) -> None:
        text = f"check.{name} $1, {quote(str(message), safe='')}; mov.u32 $0, 0;"
        holds = language.cast(language.cast(condition, tl.int1), tl.int32)
        tl.inline_asm_elementwise(
            text, "=r,r", [holds], tl.int32, is_pure=False, pack=1, _semantic=language
        )

    def device_assert(language: Any, condition: Any, message: object, mask: Any) -> None:
        if mask is not None:
            condition = language.or_(condition, language.not_(mask))
        check(language, condition, "device_assert", message)

    def assume(language: object, condition: object) -> Any:
        check(language, condition, "assume", "")
        return stock(language, condition)

    stock = TritonSemantic.assume
    with replacing(
        (knobs.runtime, "add_stages_inspection_hook", change),
        (TritonSemantic, "device_assert", device_assert),
        (TritonSemantic, "assume", assume),
    ):
        yield


def cached(digest: str) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(digest)


def tool(name: str) -> Any:
    """Return ``nvdisasm`` or ``cuobjdump`` of Triton's wheel, with ``path`` and ``version``."""
    return getattr(knobs.nvidia, name)


def _merge_known(finder: Any, called: Any, merge: Any = DependenciesFinder._update_hash) -> None:
    _ = called.cache_key
    merge(finder, called)


DependenciesFinder._update_hash = _merge_known
"""Make keys in Triton's cache independent of what the process has compiled before.

By itself, Triton adds the constants of a called function to the key of its caller only if that function's
key is known already. A kernel's hash is its key, so this applies to the whole process from the first
import.
"""


def warmed_up(kernel: Any, arguments: Mapping[str, Any], **options: object) -> Any:
    """Compile ``kernel`` for these arguments and load it without running it: a ``CompiledKernel``."""
    compiled = kernel.warmup(**arguments, **{**FUSED, **options})
    if hasattr(compiled, "result"):  # it is compiled in the background
        compiled = compiled.result()
    compiled._init_handles()
    return compiled


def hooks() -> tuple[object, object]:
    """Return the functions to call around a launch; None, which is cheaper, if Triton's chain is empty."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return enter if getattr(enter, "calls", True) else None, (
        leave if getattr(leave, "calls", True) else None
    )


@contextmanager
def scratch_from(memory: object) -> Iterator[None]:
    """Within the block, launches use the tensor ``memory`` as scratch memory; None: Triton's default."""
    if memory is None:
        yield
        return
    token = _allocation._allocator.set(lambda size, alignment, stream: memory)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def direct(
    kernel: Any, kinds: Callable[[Any], object], nested: Callable[[list[Any]], list[Any]]
) -> DirectLaunch | None:
    """Return a way around the Python half of ``kernel``'s launcher, which only finds scratch memory.

    ``kinds`` returns the kinds of a signature one by one; ``nested`` returns values with tuples as tuples.
    None for an unknown kind of launcher or one that does more: then use ``kernel.run``.
    """
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    launch = getattr(run, "launch", None)
    more = getattr(run, "profile_scratch_size", 1) or getattr(run, "gsan_enabled", False)
    if launch is None or more or not was_tried("Triton") or type(run) is not _launcher_class():
        return None
    fixed = function, run.launch_cooperative_grid, run.launch_pdl
    if release(installed_release("Triton")) >= (3, 7):
        from triton.backends.nvidia.driver import annotate_arguments

        annotated, signature = annotate_arguments(kinds(kernel.src.signature)), run.kernel_signature
        return lambda grid, stream, hooks, scratch, values: launch(
            *grid, stream, *fixed, packed, *hooks, scratch, None, annotated, signature, values
        )
    return lambda grid, stream, hooks, scratch, values: launch(
        *grid, stream, *fixed, scratch, None, packed, *hooks, *nested(values)
    )


def _launcher_class() -> Any:
    from triton.backends.nvidia.driver import CudaLauncher

    return CudaLauncher


def named_objects(value: object, beyond: re.Pattern[str]) -> Iterator[object]:
    """Yield constants, values, modules, classes and functions, each before its names; keep jitted ones.

    A function or a class of a module that matches ``beyond`` is included if it is named by itself.
    """
    return _named(value, beyond, set())


def _named(value: object, beyond: re.Pattern[str], seen: set[int]) -> Iterator[object]:
    found = value
    while hasattr(value, "fn"):  # inside triton.jit, an autotuner, heuristics
        found, value = value, value.fn
    if not isinstance(value, type) and hasattr(value, "value"):  # a constant
        yield from _named(value.value, beyond, seen)
    elif isinstance(value, dict):
        yield from _named(tuple(value.values()), beyond, seen)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _named(each, beyond, seen)
    elif not isinstance(value, (type, types.FunctionType)):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        yield found
        if not beyond.match(str(value.__module__)):
            names = _of_class(value) if isinstance(value, type) else _of_function(value, beyond)
            for name in names:
                yield from _named(name, beyond, seen)


def _of_class(value: type) -> Iterator[object]:
    if hasattr(value, "hash_attrs"):  # a Triton aggregate, made of a class in the source
        value = inspect.getclosurevars(value.__new__).nonlocals["cls"]
    for member in vars(value).values():
        plain = isinstance(member, (types.FunctionType, int, float, str))
        if plain or hasattr(member, "fn"):
            yield member


def _of_function(function: types.FunctionType, beyond: re.Pattern[str]) -> Iterator[object]:
    """Yield what its code names: constants, names of enclosing scopes and modules; and its defaults."""
    yield from (function.__defaults__, function.__kwdefaults__)
    around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        value: Any = None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                value = around.get(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(
                value, types.ModuleType
            ):
                other = beyond.match(value.__name__)
                value = vars(value).get(step.argval)
                if other and not isinstance(value, types.ModuleType):
                    value = None
            elif step.opname != "PUSH_NULL":
                value = None
            if value is not None:
                yield value
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            elif constant != function.__doc__:
                yield constant


def wrap_with_statements(wrapper: Callable[[object], object]) -> None:
    """From now on, call ``wrapper`` around the compilation of each ``with`` statement in Triton."""
    from triton.compiler.code_generator import CodeGenerator  # rarely needed

    CodeGenerator.visit_With = wrapper(CodeGenerator.visit_With)
