"""Programs of launches in ``sim``: interpreted as wholes, or, where their threads differ, as compiled code.

The interpreter knows programs, not threads. A kernel that tells its threads apart, lets some of them wait
or counts on how many there are, is compiled, and its PTX is run thread by thread (``compiled.py``). Which
ones do is seen from their code before the launch: the texts of inline PTX in the kernel, in what it
calls, and among its arguments. A text that is put together while it runs, and so was not seen, is refused
by the interpreter.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from interlace.runtime.compiler.kernel_code import named
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.ptx.instruction import InlineAssemblyError
from interlace.runtime.ptx.special import by_threads
from interlace.runtime.scheduler.scheduler import Programs, interpreted

Rewrite = Callable[[str, str], str]
"""(name of a kernel, its PTX) -> the PTX to run."""
ARCHES = (80, 90)  # whose PTX can be run
_SINCE_90 = re.compile(
    r"\b(elect|mbarrier|wgmma|multimem|mapa|fence\.proxy|cp\.async\.bulk)\b|\.cluster\b"
)
_NOT_OURS = re.compile(
    r"(triton|torch|numpy|interlace\.(kernels|runtime))(\.|$)"
)  # have no such texts


def programs(arch: int | None, rewrite: Rewrite | None = None) -> Programs:
    """Programs compiled for ``arch``; None: as they need it. ValueError for one that cannot be run."""
    if arch is None:
        if rewrite is not None:
            raise ValueError("rewrite changes PTX, which needs arch")
        return by_need
    if arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}; PTX is run of {', '.join(map(str, ARCHES))}")
    return _compiled(arch, rewrite)


def _compiled(arch: int, rewrite: Rewrite | None = None) -> Programs:
    from interlace.runtime.programs.compiled import CompiledPrograms  # few need it

    return CompiledPrograms(arch, rewrite)


def by_need(launch: KernelLaunch, hooks: Any) -> tuple[Callable[[], None], int]:
    """One program of ``launch``, to be run in a session, and its threads if they are told apart."""
    texts = _texts(launch.kernel) | _texts.__wrapped__(launch.arguments)
    reason = next(filter(None, map(by_threads, sorted(texts))), None)
    if reason is None:
        return interpreted(launch, hooks)
    try:
        return _compiled(arch_for(texts))(launch, hooks)
    except (InterlaceError, TypeError, ValueError) as error:
        raise InlineAssemblyError(
            f"{launch.name}: its threads differ ('{reason}' in its inline PTX), so its compiled code is "
            f"to be run, and cannot be: {error}"
        ) from error


def arch_for(texts: frozenset[str]) -> int:
    """The GPU to compile for: 80 for sm_80, the first that has all instructions in ``texts``."""
    return 90 if any(map(_SINCE_90.search, texts)) else 80


@functools.lru_cache(maxsize=1024)
def _texts(kernel: Any) -> frozenset[str]:
    """All texts in the code of ``kernel`` and of what it may call, or in values."""
    return frozenset(each for each in named(kernel, _NOT_OURS) if isinstance(each, str))
