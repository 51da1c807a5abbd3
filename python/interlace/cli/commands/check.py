"""``python -m interlace check``: every kernel, at several shapes and world sizes, against float64.

On ``cpu`` the kernels run interpreted in ``sim``; on ``cuda`` the same kernels run compiled, with virtual
ranks on the current GPU. A line per case says how large the worst error was as a share of what the dtypes
allow; the exit code is 0 only if no share exceeds 1, and 3 if only time was missing.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import interlace
from interlace.cli.commands.check_cases import Verdict, cases, listed, run_case
from interlace.output.consoles import write
from interlace.output.options import CommandOptions, option, positive_int, seed_number

LEFT_OUT = 3  # the exit code if all that began have passed


@dataclass(frozen=True)
class CheckOptions(CommandOptions):
    """Run every kernel against float64 references, those first that teach most."""

    device: str | None = option(
        None, choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    seed: int = option(0, type=seed_number, help="of the inputs (default 0)")
    ranks: tuple[int, ...] = option(
        (),
        type=positive_int,
        action="append",
        metavar="N",
        help="only on so many ranks; may be repeated",
    )
    seconds: float | None = option(
        None,
        type=positive_int,
        metavar="S",
        help="begin no case after so many seconds; what is left out is counted",
    )
    list: bool = option(
        False, action="store_true", help="print the kernels and the cases that run them, run none"
    )
    json: bool = option(False, action="store_true", help="print JSON")

    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def interprets(self) -> bool:
        return self.chosen_device() == "cpu"


def check(console: Any, options: CheckOptions) -> int:
    """Print a line per case; 0 if all pass, 1 if one fails, LEFT_OUT if only time was missing."""
    device, ranks, seconds = options.chosen_device(), options.ranks, options.seconds
    if options.list:
        return _list(console, device, options)
    if device == "cuda" and not torch.cuda.is_available():
        raise interlace.PlaceUnavailableError(
            "check --device cuda needs a CUDA device, and torch sees none; use --device cpu"
        )
    has_roles = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    every = cases(device, has_roles=has_roles)
    chosen = [case for case in every if not ranks or case.world_size in ranks]
    if not chosen:
        raise ValueError(f"ranks: check --device {device} has no cases on {sorted(ranks)} ranks")
    verdicts: list[Verdict] = []
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    for case in chosen:
        if time.monotonic() > end:
            break
        verdict = run_case(case, device, options.seed)
        verdicts.append(verdict)
        if not options.json:
            console.print(_line(verdict), soft_wrap=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    left_out = len(chosen) - len(verdicts)
    if options.json:
        document = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "seed": options.seed,
            "left_out": left_out,
            "cases": [asdict(v) | {"passed": v.passed} for v in verdicts],
        }
        print(json.dumps(document, indent=1))
    else:
        skipped = sum(bool(verdict.skipped) for verdict in verdicts)
        counts = f"{len(verdicts) - len(failed) - skipped} passed, {len(failed)} failed on {device}"
        counts += f", {skipped} skipped" if skipped else ""
        console.print(counts + (f", {left_out} left out after {seconds:g} s" if left_out else ""))
    return 1 if failed else LEFT_OUT if left_out else 0


def _line(verdict: Verdict) -> str:
    case = verdict.case
    begin = f"{case.op:<35} {case.variant:<30} W={case.world_size} {case.shape:<17} {case.dtype:<4}"
    if verdict.skipped:
        return f"[yellow]skip[/yellow]  {begin}  {verdict.skipped}"
    mark = "[green]pass[/green]" if verdict.passed else "[red]FAIL[/red]"
    error = f"  {verdict.error.splitlines()[0]}" if verdict.error else ""
    figures = f"{verdict.ratio:5.2f} of bound  {verdict.seconds * 1e3:6.0f} ms"
    return f"{mark}  {begin}  {figures}{error}"


def _list(console: Any, device: str, options: CheckOptions) -> int:
    found = listed(device)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for kernel, titles in found.items():
            write(console, "\n  ".join([kernel, *titles]))
    return 0
