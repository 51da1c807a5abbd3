"""Hints of races: what to change, and at which lines, by the rule that the race breaks.

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
    """A text that says what to do, and the accesses whose lines to change."""

    text: str
    at: tuple[Access, ...]


def _line(access: Access) -> str:
    return f"{access.what} at {access.lines[0]}" if access.lines else access.what


def _without_shims(access: Access) -> Access:
    """Return ``access`` without the lines of shims, which the user cannot change."""
    depth = next((n for n, line in enumerate(access.lines) if not _is_ours(line)), 0)
    return replace(access, lines=access.lines[depth:])


def _is_ours(line: SourceText) -> bool:
    return bool(line.frames) and _SHIMS in pathlib.PurePath(line.frames[0][0]).as_posix()


def _accesses(finding: Finding) -> tuple[Access, Access]:
    assert finding.first is not None
    return _without_shims(finding.first), _without_shims(finding.second)


def _ends(finding: Finding) -> tuple[Access, Access]:
    """Return the signal and the wait between the two accesses, or these accesses if there is no signal."""
    if finding.signal is None:
        return _accesses(finding)
    return _without_shims(finding.signal.written), _without_shims(finding.signal.seen)


def _wide(finding: Finding) -> str:
    """Return the scope that reaches all ranks of the race. Some signals pass through another rank."""
    ranks = {each.rank for each in (*_accesses(finding), *_ends(finding))}
    return "gpu" if len(ranks) == 1 else "sys"


def before(finding: Finding) -> Hint:
    signal, _ = _ends(finding)
    signal_text = f"the signal, {_line(signal)}" if finding.signal else "the signal after it"
    return Hint(f"call {_BARRIER} between the first access and {signal_text}", (signal,))


def after(finding: Finding) -> Hint:
    _, wait = _ends(finding)
    wait_text = f"the wait, {_line(wait)}," if finding.signal else "the wait before it"
    return Hint(f"call {_BARRIER} between {wait_text} and the second access", (wait,))


def scope(finding: Finding) -> Hint:
    """Widen the atomics that do not reach each other (the race's own or the signal's) or their fences."""
    first, second = _accesses(finding)
    wide = _wide(finding)
    enough = ("gpu", "sys") if wide == "gpu" else ("sys",)
    if finding.race != "narrow scope":
        if finding.signal is None:
            return Hint(f'use scope="{wide}" for the signal and the wait', (first, second))
        first, second = _ends(finding)
    narrow = [each for each in (first, second) if _order_and_scope(each)[1] not in enough]
    whose, at = "" if narrow else "the fences around ", narrow or [first, second]
    lines = dict.fromkeys(map(_line, at))
    return Hint(f'use scope="{wide}" for {whose}{" and ".join(lines)}', tuple(at))


def _half(half: str, finding: Finding) -> Hint:
    """Add what is missing: "release" to the signal, or "acquire" to the wait."""
    signal, wait = _ends(finding)
    if finding.signal is None:
        text = (
            'between the two, use sem="release" for the signal, sem="acquire" for the wait, and '
            'sem="acq_rel" for an atomic that is both, such as a counter of programs'
        )
        return Hint(text, (signal, wait))
    if signal.lines[:1] == wait.lines[:1] and signal.what == wait.what:
        return relay(signal)
    if half == "acquire":
        return Hint(f"change the wait, {_order_hint(wait, 'acquire', finding)}", (wait,))
    if finding.first is not None and finding.first.what == "puts":
        return puts(finding)
    return Hint(f"change the signal, {_order_hint(signal, 'release', finding)}", (signal,))


release, acquire = (functools.partial(_half, each) for each in ("release", "acquire"))


def relay(access: Access) -> Hint:
    kernel_access = _without_shims(access)
    return Hint(
        f'change {_line(kernel_access)}, which signals and waits, to sem="acq_rel"',
        (kernel_access,),
    )


def _order_hint(access: Access, half: str, finding: Finding) -> str:
    """Say how to add ``half``, "release" or "acquire", to the order that ``access`` has."""
    kind, scope = access.what.partition(" ")[0], _wide(finding)
    if kind in ("load", "loads"):
        replacement = f'tl.atomic_add(..., 0, sem="acquire", scope="{scope}") or ld.acquire.{scope}'
        return f"{_line(access)}, to {replacement}"
    if kind in ("store", "stores"):
        replacement = f'tl.atomic_xchg(..., sem="release", scope="{scope}") or st.release.{scope}'
        return f"{_line(access)}, to {replacement}"
    other = "acquire" if half == "release" else "release"
    sem = "acq_rel" if _order_and_scope(access)[0] in (other, "acq_rel") else half
    return f'{_line(access)}, to sem="{sem}"'


def proxy(finding: Finding) -> Hint:
    accesses = _accesses(finding)
    kind = "alias" if any("by multicast" in access.what for access in accesses) else "async"
    return Hint(f"add fence.proxy.{kind} between the two", accesses)


def puts(finding: Finding) -> Hint:
    if finding.signal is None:
        first, second = _accesses(finding)
        return Hint(
            f"add a fence or a quiet between the put and the later access, {_line(second)}",
            (first,),
        )
    signal, _ = _ends(finding)
    text = "add a quiet, or a fence in the thread that signals, between the put and the signal"
    return Hint(f"{text}, {_line(signal)}", (signal,))


def _move_signal(signal: Access, first: Access) -> Hint:
    """Move a signal that is sent too early: its line, or its call in the function of ``first``."""
    functions = [line.rpartition(" ")[2] for line in (*first.lines[:1], *signal.lines)]
    depth = functions.index(functions[0], 1) - 1 if functions[0] in functions[1:] else 0
    at = replace(signal, lines=signal.lines[depth:])
    return Hint(f"move the signal, {_line(at)}, after the first access", (at,))


def plain_flag(finding: Finding, polls: Container[object]) -> Hint | None:
    """Return the hint for a flag that is polled or stored plainly. ``polls`` are plain polling loads."""
    first, second = _accesses(finding)
    pair = [first, second] if finding.race in ORDERS else []
    signal = next((each for each in pair if each.what == "stores"), None)
    load = next((each for each in pair if (each.what, each.lines) in polls), None)
    if load is None or signal is None:
        load, signal = finding.polled, None
        if load is None or (load.what, load.lines) not in polls:
            return None
    text = f"poll with acquire: change {_order_hint(_without_shims(load), 'acquire', finding)}"
    if signal is None:
        return Hint(text, (_without_shims(load),))
    return Hint(
        f"{text}; and signal with release: change {_order_hint(signal, 'release', finding)}",
        (load, signal),
    )


def missing(finding: Finding, behind: bool) -> Hint:
    """Return the hint if no rule explains the race. ``behind``: the signal follows the first access."""
    first, second = _accesses(finding)
    plain: Access | None = None if finding.polled is None else _without_shims(finding.polled)
    if plain is None and finding.race == "mixed access":
        plain, atomic = (second, first) if _order_and_scope(first)[0] else (first, second)
        signals = ("store ", "xchg (relaxed", "xchg (release")  # these do not wait
        resets = plain.what == "stores" and atomic.what.startswith(signals)
        if resets or plain.what not in ("loads", "stores"):
            plain = None
    if plain is not None:
        poll = plain.what == "loads"
        text = f"{'poll with acquire' if poll else 'signal with release'}: change "
        return Hint(text + _order_hint(plain, "acquire" if poll else "release", finding), (plain,))
    if finding.signal is not None:
        signal, wait = _ends(finding)
        if not behind:
            return _move_signal(signal, first)
        problem = f"{_line(wait)} does not wait for {_line(signal)}"
        text = f"{problem}: its width differs, or the word was overwritten"
        return Hint(text, (signal, wait))
    if (first.rank, first.who) == (second.rank, second.who):
        return Hint("there is no barrier between them in which both threads take part", (second,))
    if finding.race == "write-write":
        return Hint(
            "both store to the same bytes: make their addresses differ, or order the two stores",
            (first, second),
        )
    text = "no signal that was sent after the first access was waited for before the second"
    return Hint(text, (second,))


def _order_and_scope(access: Access) -> tuple[str, str]:
    """Return the order and the scope of an atomic, or empty strings for another access."""
    found = re.search(r"\((\w+), (\w+)\)", access.what)
    return (found[1], found[2]) if found else ("", "")
