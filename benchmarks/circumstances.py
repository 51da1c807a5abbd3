"""Commit, machine and versions, for the reader of a benchmark. Needs nothing beside torch and triton."""

import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def said_by(*command: str) -> str:
    """Return the output of a program; an empty text if it is missing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return answer.stdout.strip()


def circumstances() -> dict[str, object]:
    def git(*arguments: str) -> str:
        return said_by("git", *arguments)

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    import triton

    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(
            git("status", "--porcelain", "--", ":(top,exclude)benchmarks/results")
        ),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "protocol": "candidates alternate; slowest rank from a common barrier; medians; 2 warm-ups",
    }


def in_turn(
    names: Iterable[str], repetitions: int, warm_up: int, measure: Callable[[str], float]
) -> dict[str, list[float]]:
    """Measure the candidates alternately; the first ``warm_up`` rounds do not count."""
    values: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-warm_up, repetitions):
        for name, counted in values.items():
            value = measure(name)
            if repetition >= 0:
                counted.append(value)
    return values


def ask(questions: Mapping[str, Callable[[], object]], known: Mapping[str, object]) -> None:
    """Print the answer to every question, then all with what is ``known`` as JSON."""
    found = dict(known)
    for question, answer in questions.items():
        try:
            found[question] = answer()
        except Exception as error:  # the other questions are still worth asking
            found[question] = f"{type(error).__name__}: {error}"[:300]
        print(f"{question}: {found[question]}", flush=True)
    print(json.dumps(found))


def new_result(kind: str, facts: dict[str, object]) -> Path:
    """A file of ``benchmarks/results/`` that is not there yet: "kind-date-commit", "-2" for the second."""
    stem = f"{kind}-{facts['date']}-{str(facts['commit'])[:8]}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := RESULTS / f"{name}.json").exists())
