"""Hints of races: what to change, and at which lines, by the rule without which it would be none.

A test applies each hint to its own example (``tests/sim/verify/reports/test_hints.py``).
"""

import functools
import pathlib
import re
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from interlace.runtime.core.errors import SourceText
from interlace_verify.race_check.findings import ORDERS, Access, Finding

_BARRIER = "tl.debug_barrier()"
_SHIMS = "/interlace_verify/shims/"


class Hint(NamedTuple):
    """What to do, and the accesses at whose lines it is to be done."""

    text: str
    at: tuple[Access, ...]


def _line(access: Access) -> str:
    return f"{access.what} at {access.lines[0]}" if access.lines else access.what


def _own(access: Access) -> Access:
    """``access`` without the lines of shims, which nobody can change."""
    depth = next((n for n, line in enumerate(access.lines) if not _is_ours(line)), 0)
    return replace(access, lines=access.lines[depth:])


def _is_ours(line: SourceText) -> bool:
    return bool(line.frames) and _SHIMS in pathlib.PurePath(line.frames[0][0]).as_posix()


def _accesses(finding: Finding) -> tuple[Access, Access]:
    assert finding.first is not None
    return _own(finding.first), _own(finding.second)


def _ends(finding: Finding) -> tuple[Access, Access]:
    """The signal and the wait between the two accesses; these themselves if there is none."""
    if finding.signal is None:
        return _accesses(finding)
    return _own(finding.signal.written), _own(finding.signal.seen)


def _wide(finding: Finding) -> str:
    """The scope that reaches all who are part of it: some signals pass by another rank."""
    ranks = {each.rank for each in (*_accesses(finding), *_ends(finding))}
    return "gpu" if len(ranks) == 1 else "sys"


def before(finding: Finding) -> Hint:
    signal, _ = _ends(finding)
    which = f"the signal, {_line(signal)}" if finding.signal else "the signal behind it"
    return Hint(f"call {_BARRIER} between the first access and {which}", (signal,))


def after(finding: Finding) -> Hint:
    _, wait = _ends(finding)
    which = f"the wait, {_line(wait)}," if finding.signal else "the wait before it"
    return Hint(f"call {_BARRIER} between {which} and the second access", (wait,))


def scope(finding: Finding) -> Hint:
    """The atomics that do not reach each other: the race's own, or the signal's; or fences about them."""
    first, second = _accesses(finding)
    wide = _wide(finding)
    enough = ("gpu", "sys") if wide == "gpu" else ("sys",)
    if finding.race != "narrow scope":
        if finding.signal is None:
            return Hint(f'signal and wait with scope="{wide}"', (first, second))
        first, second = _ends(finding)
    narrow = [each for each in (first, second) if _how(each)[1] not in enough]
    whose, at = "" if narrow else "the fences about ", narrow or [first, second]
    lines = dict.fromkeys(map(_line, at))
    return Hint(f'{whose}{" and ".join(lines)}: scope="{wide}"', tuple(at))


def _half(half: str, finding: Finding) -> Hint:
    """What the signal lacks, "release", or the wait, "acquire"."""
    signal, wait = _ends(finding)
    if finding.signal is None:
        text = (
            'between the two, give sem="release" to what signals, sem="acquire" to what waits, and '
            'sem="acq_rel" to what does both, as a counter of programs does'
        )
        return Hint(text, (signal, wait))
    if signal.lines[:1] == wait.lines[:1] and signal.what == wait.what:
        return relay(signal)
    if half == "acquire":
        return Hint(f"the wait, {_ordered(wait, 'acquire', finding)}", (wait,))
    if finding.first is not None and finding.first.what == "puts":
        return puts(finding)
    return Hint(f"the signal, {_ordered(signal, 'release', finding)}", (signal,))


release, acquire = (functools.partial(_half, each) for each in ("release", "acquire"))


def relay(access: Access) -> Hint:
    own = _own(access)
    return Hint(f'{_line(own)}, which signals and waits, with sem="acq_rel"', (own,))


def _ordered(access: Access, half: str, finding: Finding) -> str:
    """``access`` with ``half``, "release" or "acquire", besides the order that it has."""
    kind, scope = access.what.partition(" ")[0], _wide(finding)
    if kind in ("load", "loads"):
        how = f'tl.atomic_add(..., 0, sem="acquire", scope="{scope}") or ld.acquire.{scope}'
        return f"{_line(access)}, as {how}"
    if kind in ("store", "stores"):
        how = f'tl.atomic_xchg(..., sem="release", scope="{scope}") or st.release.{scope}'
        return f"{_line(access)}, as {how}"
    other = "acquire" if half == "release" else "release"
    sem = "acq_rel" if _how(access)[0] in (other, "acq_rel") else half
    return f'{_line(access)} with sem="{sem}"'


def proxy(finding: Finding) -> Hint:
    accesses = _accesses(finding)
    kind = "alias" if any("by multicast" in each.what for each in accesses) else "async"
    return Hint(f"fence.proxy.{kind} between the two", accesses)


def puts(finding: Finding) -> Hint:
    if finding.signal is None:
        first, second = _accesses(finding)
        return Hint(
            f"a fence or a quiet between the put and what comes later, {_line(second)}", (first,)
        )
    signal, _ = _ends(finding)
    text = "a quiet, or a fence of the thread that signals, between the put and the signal"
    return Hint(f"{text}, {_line(signal)}", (signal,))


def _moved(signal: Access, first: Access) -> Hint:
    """The signal is given too early: its line, or the call of it, in the function of ``first``."""
    functions = [line.rpartition(" ")[2] for line in (*first.lines[:1], *signal.lines)]
    depth = functions.index(functions[0], 1) - 1 if functions[0] in functions[1:] else 0
    at = replace(signal, lines=signal.lines[depth:])
    return Hint(f"move the signal, {_line(at)}, behind the first access", (at,))


def plain_flag(finding: Finding, polls: Container[object]) -> Hint | None:
    """Of a flag that is polled and stored plainly, and of what comes behind it. ``polls``: such loads."""
    first, second = _accesses(finding)
    pair = [first, second] if finding.race in ORDERS else []
    signal = next((each for each in pair if each.what == "stores"), None)
    load = next((each for each in pair if (each.what, each.lines) in polls), None)
    if load is None or signal is None:
        load, signal = finding.polled, None
        if load is None or (load.what, load.lines) not in polls:
            return None
    text = f"poll with acquire: {_ordered(_own(load), 'acquire', finding)}"
    if signal is None:
        return Hint(text, (_own(load),))
    return Hint(
        f"{text}; and signal with release: {_ordered(signal, 'release', finding)}", (load, signal)
    )


def missing(finding: Finding, behind: bool) -> Hint:
    """Of what no rule explains. ``behind``: whether the signal comes after the first access at all."""
    first, second = _accesses(finding)
    plain: Access | None = None if finding.polled is None else _own(finding.polled)
    if plain is None and finding.race == "mixed access":
        plain, atomic = (second, first) if _how(first)[0] else (first, second)
        signals = ("store ", "xchg (relaxed", "xchg (release")  # which wait for nothing
        resets = plain.what == "stores" and atomic.what.startswith(signals)
        if resets or plain.what not in ("loads", "stores"):
            plain = None
    if plain is not None:
        poll = plain.what == "loads"
        text = "poll with acquire: " if poll else "signal with release: "
        return Hint(text + _ordered(plain, "acquire" if poll else "release", finding), (plain,))
    if finding.signal is not None:
        signal, wait = _ends(finding)
        if not behind:
            return _moved(signal, first)
        text = (
            f"{_line(wait)} is no wait for {_line(signal)}: another width, or written again since"
        )
        return Hint(text, (signal, wait))
    if (first.rank, first.who) == (second.rank, second.who):
        return Hint("no barrier for both of their threads is between them", (second,))
    if finding.race == "write-write":
        return Hint(
            "both store to the same bytes: their addresses overlap, or else something has to order them",
            (first, second),
        )
    text = "nothing that was signalled behind the first access was waited for before the second"
    return Hint(text, (second,))


def _how(access: Access) -> tuple[str, str]:
    """The order and the scope of an atomic; empty of other accesses."""
    found = re.search(r"\((\w+), (\w+)\)", access.what)
    return (found[1], found[2]) if found else ("", "")
