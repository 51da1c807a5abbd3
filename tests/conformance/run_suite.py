"""Run torch's own tests against interlace, and compare with the tests that gloo passes.

    python tests/conformance/run_suite.py                       process groups, both world sizes, minutes
    python tests/conformance/run_suite.py -w 2 broadcast reduce   tests whose name matches one of these
    python tests/conformance/run_suite.py --update              run gloo, and store the tests that it passes
    python tests/conformance/run_suite.py --pytorch ~/pytorch   the tests of FILES, with gloo too; hours

interlace replaces gloo, because many of torch's tests run for known names only.
``gloo_passes.json`` lists the tests that gloo passes for one release of torch; with another, gloo is run
too. Torch's wheels have no more tests: ``--pytorch`` names a checkout of the installed release. Tests
that ask for GPUs run on the CPU there. Exit code 1 if interlace fails a test that gloo passes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
STORED = HERE / "gloo_passes.json"
WORLD_SIZES = ("2", "4")
FILES = (  # collectives, meshes, DTensor, tensor parallelism, FSDP2, checkpoints, optimizers
    "test_functional_api.py",
    "test_c10d_functional_native.py",
    "test_c10d_object_collectives.py",
    "test_device_mesh.py",
    "tensor/**/test_*.py",
    "_composable/**/test_*.py",
    "checkpoint/**/test_*.py",
    "_shard/**/test_*.py",
    "algorithms/**/test_*.py",
    "optim/test_*.py",
)
LIMIT_SECONDS = 1800


@dataclass
class Results:
    """Results of torch's tests for one backend, and for a world size or a file."""

    backend: str
    what: str
    records: list[dict[str, Any]]
    seconds: float
    broken: str  # why they ended early, or nothing

    @property
    def passed(self) -> set[str]:
        return {record["test"] for record in self.records if record["verdict"] == "pass"}

    def __str__(self) -> str:
        counts = Counter(record["verdict"] for record in self.records)
        text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("pass", "skip", "fail"))
        return (
            f"{self.backend}, {label(self.what)}: {len(self.records)} tests, {text}, "
            f"{self.seconds:.0f} s{self.broken}"
        )


def label(what: str) -> str:
    return f"{what} ranks" if what.isdigit() else "/".join(Path(what).parts[-2:])


def run(backend: str, what: str, patterns: list[str]) -> Results:
    """Run the tests in a new process, because the suite has settings at module level."""
    start, broken = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "results", Path(folder) / "log"
        command = [sys.executable, str(HERE / "torch_suite.py"), backend, what]
        results.touch()
        with open(log, "w") as output:
            try:
                subprocess.run(
                    [*command, str(results), *patterns],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_SECONDS,
                    env={**os.environ, "TEMP_DIR": folder},
                    check=True,
                )
            except subprocess.SubprocessError as error:
                broken = f"; {error}\n{log.read_text()[-4000:]}"
        records = [json.loads(line) for line in results.read_text().splitlines()]
    return Results(backend, what, records, time.monotonic() - start, broken)


def stored() -> dict[str, set[str]]:
    """Return the tests that gloo of this torch passes, by world size; empty for another torch."""
    if not STORED.exists():
        return {}
    content = json.loads(STORED.read_text())
    if content["torch"] != torch.__version__.split("+")[0]:
        return {}
    return {world_size: set(names) for world_size, names in content["passes"].items()}


def store(results: list[Results]) -> None:
    content = {
        "torch": torch.__version__.split("+")[0],
        "passes": {each.what: sorted(each.passed) for each in results},
    }
    STORED.write_text(json.dumps(content, indent=1) + "\n")


def known(what: str, patterns: list[str]) -> set[str]:
    """Return the tests that gloo passes: the stored ones, or the results of a run."""
    if names := stored().get(what):
        return {name for name in names if re.search("|".join(patterns), name)}
    gloo = run("gloo", what, patterns)
    print(gloo, flush=True)
    return gloo.passed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="torch's tests of process groups, run on interlace, compared with gloo."
    )
    parser.add_argument("patterns", nargs="*", help="regular expressions; all tests by default")
    parser.add_argument(
        "-w", "--world-size", action="append", help="may be repeated; 2 and 4 by default"
    )
    parser.add_argument("--pytorch", type=Path, help="run FILES of this checkout instead")
    parser.add_argument("--update", action="store_true", help="run gloo and store what it passes")
    chosen = parser.parse_args(arguments)
    world_sizes = chosen.world_size or WORLD_SIZES
    if chosen.update:
        results = [run("gloo", world_size, []) for world_size in world_sizes]
        print(*results, sep="\n")
        if any(each.broken for each in results):
            return 1
        store(results)
        print(f"written to {STORED}")
        return 0
    failed = False
    if folder := chosen.pytorch and chosen.pytorch.expanduser() / "test/distributed":
        files = sorted(file for each in FILES for file in folder.glob(each))
        world_sizes = [str(file.absolute()) for file in files] or parser.error(f"none in {folder}")
    for what in world_sizes:
        passed = known(what, chosen.patterns)
        if not passed:  # such as a file of another release, that cannot be imported
            continue
        results = run("interlace", what, chosen.patterns)
        print(results, flush=True)
        for name in sorted(passed - results.passed):
            failed = True
            record = next((each for each in results.records if each["test"] == name), {})
            print(f"FAILED, and gloo passes it: {name}\n{record.get('message', 'not run')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
