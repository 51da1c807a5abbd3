"""Hints of races: each is applied to its own example, to the letter, and the example is clean then."""

import importlib.util
import pathlib
import re
from typing import Any

import pytest

from interlace.runtime.core.errors import SourceText
from interlace.verify import Finding, races
from interlace_verify.race_check import hints
from interlace_verify.race_check.findings import Access, FailedSignal

HEAD = pathlib.Path(__file__).with_name("hinted.txt").read_text()
RANKS = {"PEER": "1", "FIRST": "(rank == 0) & (tl.program_id(0) == 0)"}
RANKS["SECOND"] = "(rank == 1) & (tl.program_id(0) == 0)"
PROGRAMS = {"PEER": "rank", "FIRST": "tl.program_id(0) == 0", "SECOND": "True"}


def told(signal: str, wait: str, **who: str) -> dict[str, str]:
    """An example of message passing: lines of the signal and of the wait."""
    parts = {"SIGNAL": signal, "WAIT": wait, "KERNEL": "tell", **(who or RANKS)}
    return {name: text.replace("\n", "\n        ") for name, text in parts.items()}


BARRIER = "tl.debug_barrier()\n"
RAISE = 'tl.atomic_xchg(flag, 1, sem="{}", scope="{}")'
POLL = 'while tl.atomic_add(flag, 0, sem="{}", scope="{}") == 0:\n    pass'
PLAIN_POLL = "while tl.load(flag) == 0:\n    pass"
RAISED, POLLED = RAISE.format("release", "sys"), POLL.format("acquire", "sys")
RELAXED = RAISE.format("relaxed", "sys"), POLL.format("relaxed", "sys")

# Of each: the example, and a part of its hint.
EXAMPLES = {
    "no release": (told(BARRIER + RELAXED[0], POLLED), 'the signal, xchg (relaxed, sys) at'),
    "no acquire": (told(BARRIER + RAISED, RELAXED[1]), 'the wait, add (relaxed, sys) at'),
    "neither": (told(BARRIER + RELAXED[0], RELAXED[1]), "; and change the wait, add (relaxed, sys) at"),
    "a counter that releases": ({"LAST": "release", "KERNEL": "last"}, 'sem="acq_rel"'),
    "a counter that acquires": ({"LAST": "acquire", "KERNEL": "last"}, 'sem="acq_rel"'),
    "a relaxed counter": ({"LAST": "relaxed", "KERNEL": "last"}, 'sem="acq_rel"'),
    "a counter that releases, before a signal": (
        {"LAST": "release", "KERNEL": "relayed"}, "add (release, gpu) at"),
    "a relaxed counter before a signal": (
        {"LAST": "relaxed", "KERNEL": "relayed"}, "add (relaxed, gpu) at"),
    "a counter that acquires and signals": (
        told(BARRIER + RAISE.format("acquire", "sys"), POLL.format("release", "sys")), "acq_rel"),
    "fences of all threads before a barrier": (
        told('fence("sys")\n' + BARRIER + RELAXED[0], POLLED), "the signal, xchg (relaxed, sys) at"),
    "no barrier": (told(RAISED, POLLED), "the signal, xchg (release, sys) at"),
    "signal of gpu scope": (told(BARRIER + RAISE.format("release", "gpu"), POLLED), "xchg (release, gpu)"),
    "wait of gpu scope": (told(BARRIER + RAISED, POLL.format("acquire", "gpu")), "add (acquire, gpu)"),
    "both of cta scope": (
        told(BARRIER + RAISE.format("release", "cta"), POLL.format("acquire", "cta"), **PROGRAMS),
        'scope="gpu"'),
    "a fence of the one thread before its signal": (
        told(BARRIER + 'fence("sys")\n' + RELAXED[0], RELAXED[1]), "the wait, add (relaxed, sys) at"),
    "a plain poll": (told(BARRIER + RAISED, PLAIN_POLL), "or ld.acquire.sys"),
    "a plain poll of the same GPU": (told(BARRIER + RAISED, PLAIN_POLL, **PROGRAMS), "or ld.acquire.gpu"),
    "a volatile poll": (
        told(BARRIER + RAISED, "while tl.load(flag, volatile=True) == 0:\n    pass"), "to tl.atomic_add"),
    "a plain signal": (told(BARRIER + "tl.store(flag, 1)", POLLED), "with release: change stores at"),
    "a plain signal and a plain poll": (
        told(BARRIER + "tl.store(flag, 1)", PLAIN_POLL),
        "; and signal with release: change stores at"),
    "fences of gpu scope": (
        told(BARRIER + 'fence("gpu")\n' + RELAXED[0], RELAXED[1] + '\nfence("gpu")'), 'scope="sys"'),
    "a signal before the store": (
        told("raise_behind_a_barrier(flag)\ntl.store(block, i + 2.0)", POLLED), "move the signal, xchg"),
    "relaxed, and no barrier": (told(RELAXED[0], POLLED), "; and "),
    "relaxed, and of gpu scope": (
        told(BARRIER + RAISE.format("relaxed", "gpu"), POLLED), "; and "),
}  # fmt: skip


def written(text: str, folder: pathlib.Path, number: int) -> Any:
    path = folder / f"hinted_{folder.name}_{number}.py".replace("-", "_")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fn


def applied(text: str, finding: Finding) -> str:
    """``text`` with the lines changed that the finding says to change, as its hint says."""
    lines, hint = text.splitlines(), finding.hint
    assert finding.change, finding
    for change in sorted(finding.change, key=lambda each: -each[0].frames[0][1]):
        number = change[0].frames[0][1] - 1
        at = next(n for n in (number, number - 1) if lines[n].strip() != "pass")
        named = f":{change[0].frames[0][1]} in"
        line = lines[at]
        for part in hint.split("; and "):
            if named not in part:
                continue
            if sem := re.search(r'to sem="(\w+)"', part):
                line = re.sub(r'sem="\w+"', f'sem="{sem[1]}"', line)
            if scope := re.search(r'scope="(\w+)"', part):
                line = re.sub(r'scope="\w+"', f'scope="{scope[1]}"', line)
            if "to tl.atomic_add" in part:
                line = re.sub(
                    r"tl\.load\(flag.*?\)",
                    'tl.atomic_add(flag, 0, sem="acquire", scope="sys")',
                    line,
                )
            if "to tl.atomic_xchg" in part:
                line = re.sub(r"tl\.store\(flag, 1\)", RAISED, line)
            if "the fences around" in part:
                text = re.sub(r'fence\("\w+"\)', f'fence("{scope[1]}")', "\n".join(lines))
                lines = text.splitlines()
            if "tl.debug_barrier() between the first access and" in part:
                indent = line[: len(line) - len(line.lstrip())]
                line = f"{indent}tl.debug_barrier()\n{line}"
        if "move the signal" in hint:
            assert finding.first
            lines.insert(finding.first.lines[0].frames[0][1], line)
            del lines[at]
            continue
        lines[at] = line
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_clean_once_its_hint_is_applied(name: str, tmp_path: pathlib.Path) -> None:
    parts, said = EXAMPLES[name]
    text = HEAD
    for word, part in parts.items():
        text = text.replace(word, part)
    (finding,) = races(written(text, tmp_path, 0), 2, seeds=3).findings
    assert said in finding.hint, finding
    mended = applied(text, finding)
    assert mended != text
    report = races(written(mended, tmp_path, 1), 2, seeds=3)
    assert report.clean, f"{finding}\n{mended}\n{report}"


def access(rank: int, what: str, *files: str) -> Access:
    lines = (SourceText(f"{file}:1 in f", ((f"/x/{file}", 1),)) for file in files)
    return Access(rank, "f program 0", what, tuple(lines))


def test_a_hint_names_lines_that_a_user_can_change_and_a_scope_that_reaches_all_who_pass_it_on() -> (
    None
):
    store, load = access(0, "stores", "mine.py"), access(0, "loads", "mine.py")
    raised = access(0, "cas (release, gpu)", "interlace_verify/shims/nvshmem.py", "mine.py")
    signal = FailedSignal(
        "signal pad 0 of rank 1", 0, 0, 1, raised, access(1, "cas (acquire, sys)", "a.py")
    )
    finding = Finding("narrow scope", store, load, "memory", 0, 1, 0, "write-read", signal=signal)
    text, (at,) = hints.scope(finding)
    assert (
        text == 'use scope="sys" for cas (release, gpu) at mine.py:1 in f'
        and at.lines == raised.lines[1:]
    )
    (at,) = hints.before(finding).at
    assert at.lines == raised.lines[1:]


def test_a_hint_without_a_signal_names_atomics_that_acquire_and_release() -> None:
    store, load = access(0, "stores", "a.py"), access(1, "loads", "b.py")
    finding = Finding("write-read", store, load, "memory", 0, 1, 0, "write-read")
    assert "both, such as a counter of programs" in hints.release(finding).text
