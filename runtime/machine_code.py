"""What PTX and SASS say about a kernel: ordering faults, and instruction counts.

Pure functions over text, so that each rule is tested on text that it must flag. Rules return a list
of findings, one line of text each; empty is good. They follow the branches of the PTX: "reaches"
means along some path through the kernel.

unordered_releases   a release that a barrier does not precede leaves other threads' stores unordered
published_bulk_stores  a descriptor store reaches a release before it is complete
unfenced_bulk_loads  a wait reaches a descriptor load without ``fence.proxy.async`` in between
early_loads          an asynchronous load precedes the wait it depends on
weak_polls           a poll that acquires nothing
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

Rule = Callable[[str], list[str]]

# "@%p1 atom.global.sys.release.exch.b64 ..." and "atom.release.sys.global.exch.b64 ..." alike.
_PREDICATE = re.compile(r"@!?%p\d+\s+")
_RELEASE = re.compile(r"(atom|red|st)\.[\w.:]*\b(release|acq_rel)\b")
_ACQUIRE = re.compile(r"(ld|atom)\.[\w.:]*\bacquire\b")
_GLOBAL_STORE = re.compile(r"st\.(?!shared|local|async)|cp\.async\.bulk[\w.:]*\.global\.shared")
_BULK_LOAD = re.compile(r"cp\.async\.bulk\.tensor[\w.:]*\.shared::\w+\.global")
_BULK_STORE = re.compile(r"cp\.async\.bulk\.tensor[\w.:]*\.global\.shared::cta")
_BULK_DONE = re.compile(r"cp\.async\.bulk\.wait_group\s+0")
_ASYNC_LOAD = re.compile(r"cp\.async\.c[ag]\.shared\.global")
_PROXY_FENCE = re.compile(r"fence\.proxy\.async(\.global)?\s*;")
_WEAK_POLL = re.compile(r"(ld|atom)\.[\w.:]*\b(volatile|relaxed)\b")
_BARRIER = re.compile(r"(bar\.sync|barrier\.sync|barrier\.cta\.sync)\b")
_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", re.MULTILINE)


def _statements(ptx: str) -> list[str]:
    """One stripped line each, predicates and comments removed except on branches and returns."""
    lines = []
    for line in ptx.splitlines():
        text = line.split("//")[0].strip()
        bare = _PREDICATE.sub("", text)
        lines.append(text if bare.startswith(("bra", "ret")) else bare)
    return lines


def _reach(lines: Sequence[str], first: int, stop: re.Pattern[str]) -> Iterable[int]:
    """Indices of the lines on some path after ``first``, up to those that ``stop`` matches."""
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    seen, todo = set(), [first + 1]
    while todo:
        index = todo.pop()
        if index in seen or index >= len(lines) or stop.match(lines[index]):
            continue
        seen.add(index)
        line = lines[index]
        branch = _BRANCH.search(line)
        if branch and branch.group(1) in labels:
            todo.append(labels[branch.group(1)])
        if line.startswith("@") or not line.startswith(("bra", "ret")):
            todo.append(index + 1)
    return sorted(seen)


def _from_to(
    ptx: str, start: re.Pattern[str], end: re.Pattern[str], stop: re.Pattern[str], what: str
) -> list[str]:
    lines = _statements(ptx)
    ends = [
        found
        for index, line in enumerate(lines)
        if start.match(line)
        for found in _reach(lines, index, stop)
        if end.match(lines[found])
    ]
    return [f"line {index + 1}: {what}: {lines[index]}" for index in sorted(set(ends))]


def unordered_releases(ptx: str) -> list[str]:
    """Releases with a store, or the beginning of a block, between them and the barrier before them."""
    lines = _statements(ptx)
    found = []
    for index, line in enumerate(lines):
        if not _RELEASE.match(line):
            continue
        before = index - 1
        while before >= 0 and not _BARRIER.match(lines[before]):
            if before == 0 or _GLOBAL_STORE.match(lines[before]) or _LABEL.match(lines[before]):
                found.append(f"line {index + 1}: release without a barrier before it: {line}")
                break
            before -= 1
    return found


def published_bulk_stores(ptx: str) -> list[str]:
    """Releases that a descriptor store reaches without ``cp.async.bulk.wait_group 0``."""
    return _from_to(ptx, _BULK_STORE, _RELEASE, _BULK_DONE, "release of a descriptor store")


def unfenced_bulk_loads(ptx: str) -> list[str]:
    """Descriptor loads that a wait reaches without ``fence.proxy.async``."""
    return _from_to(ptx, _ACQUIRE, _BULK_LOAD, _PROXY_FENCE, "descriptor load without a fence")


def early_loads(ptx: str) -> list[str]:
    """Asynchronous loads before the last wait: for kernels whose waits all precede their matmul.

    In the text, not along paths: every round of a loop of chunks comes back from loads to the wait.
    """
    lines = _statements(ptx)
    last = max((i for i, line in enumerate(lines) if _ACQUIRE.match(line)), default=-1)
    return [
        f"line {index + 1}: load before a wait: {lines[index]}"
        for index in range(last)
        if _BULK_LOAD.match(lines[index]) or _ASYNC_LOAD.match(lines[index])
    ]


def weak_polls(ptx: str) -> list[str]:
    """Volatile or relaxed reads of signals."""
    return [
        f"line {index + 1}: read without acquire: {line}"
        for index, line in enumerate(_statements(ptx))
        if _WEAK_POLL.match(line)
    ]


def instruction_counts(sass: str) -> Counter[str]:
    """How often each instruction stands in the disassembly, modifiers left out: {"HGMMA": 4}."""
    return Counter(match.group(1) for match in _SASS.finditer(sass))


def tensor_core_instructions(counts: Counter[str], arch: int) -> int:
    """Matrix instructions of the kind that ``arch`` is fast with: HGMMA on 9.0, UTC*MMA on 10.x."""
    kinds = {9: r"HGMMA", 10: r"UTC\w*MMA"}
    kind = re.compile(kinds.get(arch // 10, r"HMMA"))
    return sum(count for name, count in counts.items() if kind.fullmatch(name))


def spills(counts: Counter[str]) -> int:
    """Accesses to local memory: registers that did not fit, or arrays that were indexed."""
    return counts["LDL"] + counts["STL"]
