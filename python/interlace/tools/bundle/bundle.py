"""Build an op ahead of time: a directory with SASS, PTX and a manifest that says how to launch it.

::

    manifest.json                          see docs/aot.md; written last
    <kernel>.sm_<arch>.cubin, .ptx         per kernel and architecture

A manifest has data alone; the loader computes with it (``kernels/bundle_formulas.py``). Nothing in it is
written by hand where it could drift: arguments, sizes and resources are those of this compilation
(``compiler/artifacts.py``), contracts are the paragraphs of the kernels' docstrings.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import pathlib
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import triton

from interlace.kernels import bundle_formulas, signal
from interlace.kernels.collectives import low_latency as words
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.tools.bundle import ops
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, entries, signals

FORMAT = "interlace bundle"
VERSION = 2
MANIFEST = "manifest.json"

_WHOLE_GRID = (
    "All programs of the grid at once, on all ranks at the same time: programs wait for each other. A "
    "cooperative launch is refused where they cannot be. If a wait is for a program that is not there, it "
    "is given up after the polls that the header allows: the abort word is set, the results are wrong."
)
_ALONE = "One program, which waits for nothing."
_APART = "Any: no program waits for another, or for a rank."
_LAST = "finish_kernel"
_LABELS = ("legend", "ordering", "example")


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
    functions = bundle_formulas.OPS[target.op]
    needed = _names(each.__code__ for each in functions.values()) - functions.keys()
    needed |= {name for text in op.conditions for name in bundle_formulas.inputs(text)}
    layout = ("slot_offset", "data_offset", "buffer_bytes") if op.workspace else ()
    return {
        "format": FORMAT,
        "version": VERSION,
        "built_with": {"interlace": built_with, "triton": triton.__version__},
        "op": target.op,
        "options": {**asdict(options), "dtype": str(options.torch_dtype).removeprefix("torch.")},
        "sequence": [entry.kernel for entry in sequence],
        "values": {value: ops.VALUES[value] for value in ops.VALUES if value in needed},
        "quantities": sorted(functions.keys() - set(ops.kernels(target.op))),
        "tables": op.tables,
        "workspace": {
            "layout": list(layout[2:] if op.words else layout),
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
    baked |= {**ops.CONSTANTS, **op.constants}
    conditions = (*op.conditions, *ops.descriptor_conditions(mains[0]))
    kernels = {entry.kernel: _kernel(target, entry, staging, conditions) for entry in mains}
    for last in _sequence(target, arch)[len(mains) :]:
        kernels[last.kernel] = _kernel(target, last, staging, ops.RANKS)
    numbers = {name: int(value) for name, value in baked.items() if isinstance(value, int)}
    return {"constants": dict(sorted(numbers.items())), "kernels": kernels}


def _kernel(
    target: BundleTarget, entry: Entry, staging: pathlib.Path, conditions: Sequence[str]
) -> dict[str, Any]:
    """``staging`` has the artifacts of ``entry``."""
    stem, op = _stem(entry), ops.OPS[target.op]
    facts: dict[str, Any] = json.loads((staging / f"{stem}.json").read_text())
    for argument in facts["arguments"]:
        argument["name"] = op.names.get(entry.kernel, {}).get(argument["name"], argument["name"])
    waits = op.workspace and entry.kernel not in (_LAST, *op.apart)
    alone = _ALONE if entry.kernel == _LAST else _APART
    return {
        "cubin": _file(staging / f"{stem}.cubin"),
        "ptx": _file(staging / f"{stem}.ptx"),
        "conditions": list(conditions),
        "residency": _WHOLE_GRID if waits else alone,
        "cooperative": waits,
        **facts,
    }


def _names(functions: Iterable[types.CodeType]) -> set[str]:
    """All names in functions, and in those within them."""
    found = set[str]()
    for code in functions:
        within = (each for each in code.co_consts if isinstance(each, types.CodeType))
        found |= {*code.co_names} | _names(within)
    return found


def contract(module: str, kernel: str) -> dict[str, str]:
    """The paragraphs of the docstring: "computes" is the first, the others are named in it."""
    function = getattr(importlib.import_module(module), kernel)
    paragraphs = inspect.cleandoc(function.fn.__doc__).split("\n\n")
    first, *others = (" ".join(paragraph.split()) for paragraph in paragraphs)
    found = {"computes": first}
    for paragraph in others:
        label, _, text = paragraph.partition(": ")
        if label.lower() in _LABELS:
            found[label.lower()] = text
    return found


def contracts(entries: list[Entry], known: list[Entry]) -> dict[str, dict[str, str]]:
    """Of ``entries``, and of those among ``known`` that their texts refer to, by kernel."""
    modules = {entry.kernel: entry.module for entry in known}
    found: dict[str, dict[str, str]] = {}
    missing = [entry.kernel for entry in entries]
    while missing:
        kernel = missing.pop(0)
        if kernel not in found:
            found[kernel] = contract(modules[kernel], kernel)
            named = re.findall(r"\b\w+_kernel\b", " ".join(found[kernel].values()))
            missing += [name for name in named if name in modules]
    return found


def _file(path: pathlib.Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
