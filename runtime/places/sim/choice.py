"""Programs of launches in ``sim``: interpreted as a whole, or compiled if that is not possible.

``docs/how-to/check/ptx.md`` says which kernels are compiled, whose PTX is run thread by thread
(``compiled.py``). The code shows before the launch whether a kernel is one: texts and names in the kernel,
in functions that it calls, and among its arguments. The interpreter refuses a text that is put together at
run time and so was not found.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import triton.language as tl

from interlace.runtime.compat.triton_launcher import named_objects
from interlace.runtime.core.errors import InlineAssemblyError, InterlaceError
from interlace.runtime.core.laboratory import laboratory
from interlace.runtime.core.launch import KernelFunction, KernelLaunch
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace.runtime.places.sim.scheduler.scheduler import Programs, interpret

Rewrite = Callable[[str, str], str]
"""Maps (name of a kernel, its PTX) to the PTX to run."""
ARCHES = (80, 90)  # architectures whose PTX can be run
_Chosen = tuple[Sequence[int], set[int]]
_chosen: ContextVar[_Chosen] = ContextVar("chosen", default=(ARCHES, set()))
_SINCE_90 = re.compile(r"\.gdc\.|\.gluon\.")  # names that the compiler has only from 9.0 on
_COMPILED = re.compile(r"triton\.(language\.(extra|target_info)|experimental\.gluon)\b")
_NOT_OURS = re.compile(  # all other code; these packages have no such texts
    rf"(?!{_COMPILED.pattern})(triton|torch|numpy|interlace\.(kernels|runtime))(\.|$)"
)


_BY_THREADS = re.compile(
    r"%(n?tid|laneid|n?warpid|lanemask)\w*|\b(elect|shfl|vote|activemask|redux)\b|\bmatch\.(any|all)\b|"
    r"\b(atom|red)\.(?!\s)|\bbar(rier)?(\.cta)?\.(warp|arrive|red)\b|"
    r"\bbar(rier)?(\.cta)?\.sync(\.aligned)?\s+\w+\s*,"
)
_LOOP, _STORE = re.compile(r"\bbra\b"), re.compile(r"\bst\.(?!\s)")


class OnlyCompiled(str):
    """The name of an object that a session has not replaced, so its kernel cannot be interpreted."""


def programs(arch: int | None, rewrite: Rewrite | None = None) -> Programs:
    """Return programs compiled for ``arch``; None: compiled if needed. ValueError for an unknown one."""
    if arch is None:
        if rewrite is not None:
            raise ValueError("rewrite changes PTX, so arch must be passed as well")
        return functools.partial(_by_need, *_chosen.get())
    if rewrite is not None and not callable(rewrite):
        raise TypeError(f"rewrite must be a function of a name and PTX, got {rewrite!r:.60}")
    if arch not in ARCHES or not isinstance(arch, int):
        raise ValueError(f"arch must be one of {', '.join(map(str, ARCHES))}, got {arch!r}")
    return _compiled_programs(arch, rewrite)


def _compiled_programs(arch: int, rewrite: Rewrite | None = None) -> Programs:
    programs: Programs = laboratory("machine.compiled").CompiledPrograms(arch, rewrite)
    return programs


@contextmanager
def compiled_for(arches: Sequence[int]) -> Iterator[set[int]]:
    """Let ``programs(None)`` compile for the first of ``arches`` that can be run and has the kernel.

    If none can be run, all of :data:`ARCHES` are tried. Yields those for which kernels were compiled.
    """
    used: set[int] = set()
    token = _chosen.set((sorted({*arches} & {*ARCHES}) or ARCHES, used))
    try:
        yield used
    finally:
        _chosen.reset(token)


def _by_need(
    arches: Sequence[int], used: set[int], launch: KernelLaunch, hooks: ProgramHooks
) -> tuple[Callable[[], None], int]:
    """Return one program of ``launch``, to run in a session, and its threads if they are distinguished.

    A kernel that must be compiled is compiled for the first of ``arches`` for which the compiler succeeds.
    """
    found = _texts(launch.kernel) | _texts.__wrapped__(launch.arguments)
    reason = next(filter(None, map(_not_interpreted, sorted(found))), None)
    if reason is None:
        return interpret(launch, hooks)
    errors: dict[str, Exception] = {}
    first = arch_for(found)
    for arch in [each for each in arches if each >= first] or arches:
        try:
            programs = _compiled_programs(arch)(launch, hooks)
        except (InterlaceError, TypeError, ValueError) as error:
            errors.setdefault(str(error), error)
            continue
        used.add(arch)
        return programs
    raise InlineAssemblyError(
        f"{launch.name}: {reason}, so its compiled code must be run, but that failed: {'; '.join(errors)}"
    ) from next(iter(errors.values()))


def _not_interpreted(text: str) -> str | None:
    """Return why a kernel that contains ``text`` has to be compiled; None if it does not have to be."""
    if isinstance(text, OnlyCompiled):
        return f"only the compiler has {text}"
    differs = by_threads(text)
    return differs and f"its threads differ ('{differs}' in its inline PTX)"


def arch_for(texts: frozenset[str]) -> int:
    """Return the first GPU, 80 for sm_80, that has all instructions in ``texts``."""
    needed_by = laboratory("ptx.targets").needed_by
    later = any(needed_by(text) > 80 or _SINCE_90.search(text) for text in texts)
    return 90 if later else 80


@functools.lru_cache(maxsize=1024)
def _texts(kernel: KernelFunction) -> frozenset[str]:
    """Return the texts in the code of ``kernel`` and of functions it may call; within a session."""
    found = (_text(each) for each in named_objects(kernel, _NOT_OURS))
    return frozenset(each for each in found if each is not None)


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    homes = str(getattr(value, "__module__", "")), type(value).__module__
    builtin = tl.core.is_builtin(value) and not getattr(value, "is_interpreted", False)
    if builtin or any(map(_COMPILED.match, homes)):
        return OnlyCompiled(f"{homes[0]}.{getattr(value, '__name__', type(value).__name__)}")
    return None


@functools.lru_cache(maxsize=1024)
def by_threads(text: str) -> str:
    """Return the part of PTX that makes threads differ, count or wait for each other; "" if none does.

    An atomic add runs once for each thread, and in a loop that stores a thread may wait for another.
    """
    found = _BY_THREADS.search(text)
    if found is None:
        return "st ... bra" if _LOOP.search(text) and _STORE.search(text) else ""
    return found[0]
