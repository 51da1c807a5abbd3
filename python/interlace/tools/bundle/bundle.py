"""Build an op ahead of time: a directory with SASS, PTX and a manifest that says how to launch it.

::

    manifest.json                          see docs/aot.md; written last
    <kernel>.sm_<arch>.cubin, .ptx         per kernel and architecture

Nothing in the manifest is written by hand where it could drift: arguments, sizes and resources are those
of this compilation (``compiler/artifacts.py``), formulas are what the launch side evaluates
(``launch_formulas.py``), contracts are the kernels' docstrings.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import triton

from interlace.kernels import signal
from interlace.kernels.collectives import low_latency as words
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.tools.bundle import ops
from interlace.tools.bundle.options import RANKS
from interlace.tools.bundle.texts import contracts, functions, names
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, entries, signals

FORMAT = "interlace bundle"
VERSION = 1
MANIFEST = "manifest.json"

_WHOLE_GRID = (
    "All programs of the grid at once, on all ranks at the same time: programs wait for each other. A "
    "cooperative launch is refused where they cannot be. If a wait is for a program that is not there, it "
    "is given up after the polls that the header allows: the abort word is set, the results are wrong."
)
_ALONE = "One program, which waits for nothing."
_APART = "Any: no program waits for another, or for a rank."
_LAST = "finish_kernel"


@dataclass(frozen=True)
class BundleTarget:
    """A bundle to build: ``op`` for every one of ``arches``, into directory ``out``."""

    op: str
    options: ops.KernelOptions
    arches: Sequence[int]
    out: pathlib.Path

    def entries(self) -> list[Entry]:
        """Everything to compile. Raises ValueError naming the op, or an option."""
        if self.op not in ops.OPS:
            raise ValueError(f"op is {self.op!r}; there are {', '.join(ops.OPS)}")
        ops.OPS[self.op].checked(self.op, self.options)
        return [entry for arch in self.arches for entry in _sequence(self, arch)]


def build_bundles(
    targets: Sequence[BundleTarget],
    *,
    built_with: str,
    files: Mapping[str, str],
    on_report: Callable[[BuildReport], None] = lambda report: None,
) -> list[BuildReport]:
    """Compile ``targets`` together and write their bundles; a report per kernel.

    ``files`` are texts to put beside the kernels. If a report has problems, nothing but directories is
    made. Raises ValueError naming an option, OSError if a directory cannot be written.
    """
    entries = [target.entries() for target in targets]
    with contextlib.ExitStack() as stack:
        folders, stems = [], []
        for target, kernels in zip(targets, entries, strict=True):
            target.out.mkdir(parents=True, exist_ok=True)
            staging = tempfile.TemporaryDirectory(prefix=".building-", dir=target.out)
            folders.append(pathlib.Path(stack.enter_context(staging)))
            stems += [str(folders[-1] / _stem(entry)) for entry in kernels]
        reports = build(
            [entry for kernels in entries for entry in kernels],
            artifacts=stems,
            on_report=on_report,
        )
        if not any(report.problems() for report in reports):
            for target, folder in zip(targets, folders, strict=True):
                manifest = _manifest(target, folder, built_with)
                _place(
                    target.out, folder, {**files, MANIFEST: json.dumps(manifest, indent=2) + "\n"}
                )
    return reports


def _place(out: pathlib.Path, staging: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Move what was compiled into ``out``, and write ``texts``; the manifest, last, is replaced whole."""
    for path in sorted(staging.iterdir()):
        if path.suffix != ".json":
            os.replace(path, out / path.name)
    for name, text in texts.items():
        (staging / name).write_text(text)
        os.replace(staging / name, out / name)


def _mains(target: BundleTarget, arch: int) -> list[Entry]:
    """The kernels of the op itself."""
    made = ops.OPS[target.op].entries(arch, target.options)
    if any(each.fixed.get("COPIERS") == 0 for each in made):
        raise ValueError("copiers is 0: a bundle has no kernels for the copy engine to send")
    # chosen by hand, it may spill
    by_hand = bool(target.options.overrides)
    return [replace(each, default=each.default and not by_hand) for each in made]


def _sequence(target: BundleTarget, arch: int) -> list[Entry]:
    """The kernels of one launch of the op, in order."""
    last = [each for each in signals(arch) if each.kernel == _LAST]
    return [*_mains(target, arch), *(last if ops.OPS[target.op].finished else ())]


def _stem(entry: Entry) -> str:
    return f"{entry.kernel}.sm_{entry.arch}"


def _manifest(target: BundleTarget, staging: pathlib.Path, built_with: str) -> dict[str, Any]:
    op, options = ops.OPS[target.op], target.options
    sequence = _sequence(target, target.arches[0])
    per_arch = {str(arch): _arch(target, arch, staging) for arch in target.arches}
    space = ops.WORDS_SPACE if op.words else ops.WORKSPACE if op.workspace else {}
    every = [*op.grids.values(), *op.conditions, *op.quantities.values(), *space.values()]
    needed = {
        value for text in every for value in names(text)
    } & ops.VALUES.keys() - op.quantities.keys()
    return {
        "format": FORMAT,
        "version": VERSION,
        "built_with": {"interlace": built_with, "triton": triton.__version__},
        "op": target.op,
        "options": {**asdict(options), "dtype": str(options.torch_dtype).removeprefix("torch.")},
        "sequence": [entry.kernel for entry in sequence],
        "values": {value: ops.VALUES[value] for value in ops.VALUES if value in needed},
        "quantities": op.quantities,
        "tables": op.tables,
        "workspace": {
            "formulas": space,
            "alignment": DATA_ALIGNMENT,
            "slot_bytes": WORD,
            # index of every int64 word of the header that a host has to do with; credits: of rank 0's
            "header_words": {
                "epoch": signal.EPOCH_WORD,
                "abort": signal.ABORT_WORD,
                "spin_limit": signal.SPIN_LIMIT_WORD,
                "claimed": signal.CLAIMED_WORD,
                "credits": signal.CREDIT_WORDS,
            },
            "protocol": _protocol(words if op.words else signal),
        },
        "functions": functions(every),
        "contracts": contracts(sequence, entries(target.arches[0])),
        "arches": per_arch,
    }


def _protocol(module: Any) -> str:
    return (module.__doc__ or "").partition("\nFlags:")[0].strip()


def _arch(target: BundleTarget, arch: int, staging: pathlib.Path) -> dict[str, Any]:
    op, options = ops.OPS[target.op], target.options
    mains = _mains(target, arch)
    baked: dict[str, Any] = {
        "CHUNKS": options.configuration(arch).chunks,
        "ITEMSIZE": options.torch_dtype.itemsize,
        "NORMED_ITEMSIZE": 1 if options.quantize else options.torch_dtype.itemsize,
        "GATHERS": ("none", "normed", "both").index(options.gather),
    }
    for entry in mains:  # in one that is first it is meant
        there = {name: value for name, value in entry.fixed.items() if value is not None}
        baked = {**there, **baked}
    conditions = (*op.conditions, *ops.descriptor_conditions(mains[0]))
    formulas = (*op.grids.values(), *op.quantities.values(), *conditions)
    used = {value for text in formulas for value in names(text)}
    kernels = {
        entry.kernel: _kernel(target, entry, staging, op.grids[entry.kernel], conditions)
        for entry in mains
    }
    for last in _sequence(target, arch)[len(mains) :]:
        kernels[last.kernel] = _kernel(target, last, staging, "1", RANKS)
    return {
        "constants": {value: baked[value] for value in sorted(used & baked.keys())},
        "kernels": kernels,
    }


def _kernel(
    target: BundleTarget, entry: Entry, staging: pathlib.Path, grid: str, conditions: Sequence[str]
) -> dict[str, Any]:
    """``staging`` has the artifacts of ``entry``."""
    stem, op = _stem(entry), ops.OPS[target.op]
    facts: dict[str, Any] = json.loads((staging / f"{stem}.json").read_text())
    for argument in facts["arguments"]:
        argument["name"] = op.names.get(entry.kernel, {}).get(argument["name"], argument["name"])
    waits = entry.kernel not in (_LAST, *op.apart)
    alone = _ALONE if grid == "1" else _APART
    return {
        "cubin": _file(staging / f"{stem}.cubin"),
        "ptx": _file(staging / f"{stem}.ptx"),
        "grid": grid,
        "conditions": list(conditions),
        "residency": {"programs": grid, "contract": _WHOLE_GRID if waits else alone},
        "cooperative": waits,
        **facts,
    }


def _file(path: pathlib.Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
