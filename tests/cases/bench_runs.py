"""Runs of ``interlace bench`` in the process of a test."""

import io
import json
import pathlib
from typing import Any

from rich.console import Console

from interlace.cli.commands.bench import BenchOptions, bench

FAST: dict[str, Any] = {"repetitions": 2}


def run(target: str, folder: pathlib.Path, **options: Any) -> tuple[int, str, dict[str, Any]]:
    """(exit status, what was printed, the JSON)."""
    out, path = io.StringIO(), folder / "out.json"
    given = BenchOptions(target, json=str(path), **{**FAST, **options})
    code = bench(Console(file=out, width=200), given)
    return code, out.getvalue(), json.loads(path.read_text())


def rows(facts: dict[str, Any], size: int = 0) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in facts["results"][size]["rows"]}
