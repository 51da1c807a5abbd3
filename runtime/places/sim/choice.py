"""Programs of launches in ``sim``: interpreted as wholes, or, where that cannot be, as compiled code.

The interpreter knows programs, not threads. A kernel that tells its threads apart, lets some of them wait
or counts on how many there are, is compiled, and its PTX is run thread by thread (``compiled.py``). So is
one that names what only the compiler has: libdevice, ``tl.extra.cuda``, aggregates, Gluon, builtins
imported by name, which a session cannot replace. Both are seen from the code before the launch: from
texts and names in the kernel, in what it calls, and among its arguments. A text that is put together while
it runs, and so was not seen, is refused by the interpreter.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import triton.language as tl

from interlace.runtime.compat.triton_launcher import named
from interlace.runtime.core.errors import InlineAssemblyError, InterlaceError
from interlace.runtime.core.laboratory import laboratory
from interlace.runtime.core.launch import KernelFunction, KernelLaunch
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace.runtime.places.sim.scheduler.scheduler import Programs, interpreted

Rewrite = Callable[[str, str], str]
"""(name of a kernel, its PTX) -> the PTX to run."""
ARCHES = (80, 90)  # whose PTX can be run
_Chosen = tuple[Sequence[int], set[int]]
_chosen: ContextVar[_Chosen] = ContextVar("chosen", default=(ARCHES, set()))
_SINCE_90 = re.compile(r"\.gdc\.|\.gluon\.")  # names of what only the compiler has
_COMPILED = re.compile(r"triton\.(language\.(extra|target_info)|experimental\.gluon)\b")
_NOT_OURS = re.compile(  # have no such texts
    rf"(?!{_COMPILED.pattern})(triton|torch|numpy|interlace\.(kernels|runtime))(\.|$)"
)


_BY_THREADS = re.compile(
    r"%(n?tid|laneid|n?warpid|lanemask)\w*|\b(elect|shfl|vote|activemask|redux)\b|\bmatch\.(any|all)\b|"
    r"\b(atom|red)\.(?!\s)|\bbar(rier)?(\.cta)?\.(warp|arrive|red)\b|"
    r"\bbar(rier)?(\.cta)?\.sync(\.aligned)?\s+\w+\s*,"
)
_LOOP, _STORE = re.compile(r"\bbra\b"), re.compile(r"\bst\.(?!\s)")


class OnlyCompiled(str):
    """The name of what a kernel uses and a session has not replaced, so that it cannot be interpreted."""


def programs(arch: int | None, rewrite: Rewrite | None = None) -> Programs:
    """Programs compiled for ``arch``; None: as they need it. ValueError for one that cannot be run."""
    if arch is None:
        if rewrite is not None:
            raise ValueError("rewrite changes PTX, which needs arch")
        return functools.partial(_by_need, *_chosen.get())
    if rewrite is not None and not callable(rewrite):
        raise TypeError(f"rewrite must be a function of a name and PTX, got {rewrite!r:.60}")
    if arch not in ARCHES or not isinstance(arch, int):
        raise ValueError(f"arch is {arch!r}; PTX is run of {', '.join(map(str, ARCHES))}")
    return _compiled(arch, rewrite)


def _compiled(arch: int, rewrite: Rewrite | None = None) -> Programs:
    made: Programs = laboratory("machine.compiled").CompiledPrograms(arch, rewrite)
    return made


@contextmanager
def compiled_for(arches: Sequence[int]) -> Iterator[set[int]]:
    """Within, ``programs(None)`` compiles for the first of ``arches`` that can be run and has the kernel.

    Where none can be run, for all of :data:`ARCHES`. Yields those for which kernels were compiled.
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
    """One program of ``launch``, to be run in a session, and its threads if they are told apart.

    A kernel that must be compiled is, for the first of ``arches`` for which the compiler does it.
    """
    found = _texts(launch.kernel) | _texts.__wrapped__(launch.arguments)
    reason = next(filter(None, map(_not_interpreted, sorted(found))), None)
    if reason is None:
        return interpreted(launch, hooks)
    errors: dict[str, Exception] = {}
    first = arch_for(found)
    for arch in [each for each in arches if each >= first] or arches:
        try:
            made = _compiled(arch)(launch, hooks)
        except (InterlaceError, TypeError, ValueError) as error:
            errors.setdefault(str(error), error)
            continue
        used.add(arch)
        return made
    raise InlineAssemblyError(
        f"{launch.name}: {reason}, so its compiled code is to be run, and cannot be: {'; '.join(errors)}"
    ) from next(iter(errors.values()))


def _not_interpreted(text: str) -> str | None:
    """Why a kernel with ``text`` in it has to be compiled; None if it does not."""
    if isinstance(text, OnlyCompiled):
        return f"only the compiler has {text}"
    differs = by_threads(text)
    return differs and f"its threads differ ('{differs}' in its inline PTX)"


def arch_for(texts: frozenset[str]) -> int:
    """The first GPU, 80 for sm_80, that has all instructions in ``texts``."""
    needed_by = laboratory("ptx.targets").needed_by
    later = any(needed_by(each) > 80 or _SINCE_90.search(each) for each in texts)
    return 90 if later else 80


@functools.lru_cache(maxsize=1024)
def _texts(kernel: KernelFunction) -> frozenset[str]:
    """The texts in the code of ``kernel`` and of what it may call, or in values; within a session."""
    found = (_text(each) for each in named(kernel, _NOT_OURS))
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
    """What of a piece of PTX makes threads differ, or count, or wait for each other; empty if nothing does.

    One that adds does so once for each thread; in a loop that stores, one waits for what another does.
    """
    found = _BY_THREADS.search(text)
    if found is None:
        return "st ... bra" if _LOOP.search(text) and _STORE.search(text) else ""
    return found[0]
