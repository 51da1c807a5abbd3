"""One corner of the releases that interlace is for: the core of the suite with the installed torch.

    make matrix                            every corner in its own .venv, then the table
    python tests/repository/corner.py              all parts
    python tests/repository/corner.py sim build    these parts; known results of the others stay
    python tests/repository/corner.py --table      docs/reference/compatibility.md's table of all results

Each part writes its results to benchmarks/results/corner-torch-X.Y.json when it ends. Its tests are the
tests of ``make test`` without the thorough ones.
"""

import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/reference/compatibility.md"
PARTS = {
    "sim": ("tests/sim",),
    "multi": (
        "tests/multi",
        "--ignore=tests/multi/process_group",
        "--ignore=tests/multi/functional",
    ),
    "build": ("tests/build",),
    "backend": ("tests/multi/process_group", "tests/conformance"),
    "compile": ("tests/multi/functional",),
}
WORKERS = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")
DEMO = "demo"
HEAD = "| torch | Triton | Python | demo | " + " | ".join(PARTS) + " | date |"


def outcome(report: pathlib.Path) -> dict[str, Any]:
    """Counts of a JUnit report, and the names of what failed."""
    counts = {"passed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return {**counts, "failed": sorted(failed)}


def run_part(arguments: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        options = ["-q", f"--junitxml={report}", *WORKERS]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        done = subprocess.run(command, cwd=ROOT)
        if not report.exists():  # pytest died
            return {"passed": 0, "skipped": 0, "failed": [f"exit code {done.returncode}"]}
        return outcome(report)


def run_demo() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "interlace", "demo"], cwd=ROOT)
    failed = [f"exit code {done.returncode}"] if done.returncode else []
    return {"passed": 1 - len(failed), "skipped": 0, "failed": failed}


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def run(parts: list[str]) -> int:
    """Run parts, note their results, and return the number of failed tests."""
    import torch
    import triton

    release = ".".join(torch.__version__.split(".")[:2])
    path = RESULTS / f"corner-torch-{release}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    failures = 0
    for part in parts:
        began = time.monotonic()
        found = run_demo() if part == DEMO else run_part(PARTS[part])
        seconds = round(time.monotonic() - began)
        failures += len(found["failed"])
        about = {"seconds": seconds, "date": time.strftime("%Y-%m-%d"), "commit": commit()}
        known = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, no GPU",
            "parts": {**known.get("parts", {}), part: {**found, **about}},
        }
        path.write_text(json.dumps(known, indent=1) + "\n")
    return failures


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if not found["failed"]:
        return str(found["passed"])
    return f"{found['passed']}, {len(found['failed'])} failed"


def table(results: list[dict[str, Any]]) -> str:
    """A line per corner, oldest first: how many tests of each part passed."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for each in sorted(results, key=lambda each: [int(n) for n in each["torch"].split(".")[:2]]):
        parts = each["parts"]
        demo = {"1": "yes", "not run": "not run"}.get(cell(parts.get(DEMO)), "fails")
        dates = sorted(part["date"] for part in parts.values())
        cells = [each["torch"], each["triton"], each["python"], demo]
        cells += [cell(parts.get(name)) for name in PARTS]
        lines.append("| " + " | ".join([*cells, dates[-1]]) + " |")
    return "\n".join(lines) + "\n"


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in RESULTS.glob("corner-torch-*.json")]


def in_page(page: str, made: str) -> str:
    before, _, rest = page.partition(HEAD)
    after = rest[rest.index("\n\n") + 1 :]
    return before + made + after


def main(arguments: list[str]) -> int:
    if arguments == ["--table"]:
        PAGE.write_text(in_page(PAGE.read_text(), table(results())))
        return 0
    failures = run(arguments or [DEMO, *PARTS])
    return main(["--table"]) or min(1, failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
