"""Hints of races: by the rule without which it would be none, at the lines of its signal, if it has one."""

import re

from interlace.verify.race_check.findings import Access, Finding

_BARRIER = "tl.debug_barrier()"


def _line(access: Access) -> str:
    return f"{access.what} at {access.lines[0]}" if access.lines else access.what


def _signal(finding: Finding) -> str:
    return f"the signal, {_line(finding.signal.written)}" if finding.signal else "the signal"


def _wait(finding: Finding) -> str:
    return f"the wait, {_line(finding.signal.seen)}" if finding.signal else "the wait"


def before(finding: Finding) -> str:
    return f"call {_BARRIER} between the first access and {_signal(finding)}"


def after(finding: Finding) -> str:
    return f"call {_BARRIER} between {_wait(finding)}, and the second access"


def both(finding: Finding) -> str:
    return f"call {_BARRIER} before {_signal(finding)}, and after {_wait(finding)}"


def scope(finding: Finding) -> str:
    """The atomics that do not reach each other: the race's own, or the signal's; or fences about them."""
    first, second = finding.first, finding.second
    assert first is not None
    wide, enough = ("gpu", ("gpu", "sys")) if first.rank == second.rank else ("sys", ("sys",))
    if finding.race != "narrow scope":
        if finding.signal is None:
            return f'signal and wait with scope="{wide}"'
        first, second = finding.signal.written, finding.signal.seen
    narrow = [each for each in (first, second) if _how(each)[1] not in enough]
    whose = "" if narrow else "the fences about "
    return f'{whose}{" and ".join(map(_line, narrow or (first, second)))}: scope="{wide}"'


def order(finding: Finding) -> str:
    """Of a signal and a wait that are both relaxed, fences may be what one of them has."""
    release, acquire = (
        f'{_signal(finding)} with sem="release"',
        f'{_wait(finding)} with sem="acquire"',
    )
    if finding.signal is not None:
        releases = _how(finding.signal.written)[0] in ("release", "acq_rel")
        acquires = _how(finding.signal.seen)[0] in ("acquire", "acq_rel")
        if releases != acquires:
            return acquire if releases else release
    return f"{release}, {acquire}; or fences, before the one and after the other"


def proxy(finding: Finding) -> str:
    return "fence.proxy.async between the two"


def several(finding: Finding) -> str:
    return (
        f"more than one of barriers, release and acquire, scope, proxy fence, about {_signal(finding)}, "
        f"and {_wait(finding)}"
    )


def missing(finding: Finding) -> str:
    first, second = finding.first, finding.second
    assert first is not None
    if (first.rank, first.who) == (second.rank, second.who):
        return "no barrier for both of their threads is between them"
    return "nothing that was signalled behind the first access was waited for before the second"


def _how(access: Access) -> tuple[str, str]:
    """The order and the scope of an atomic; empty of other accesses."""
    found = re.search(r"\((\w+), (\w+)\)", access.what)
    return (found[1], found[2]) if found else ("", "")
