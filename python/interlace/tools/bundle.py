"""Build an op ahead of time: a directory with SASS, PTX and a manifest that says how to launch it.

A manifest has data alone; the loader computes with it (``kernels/bundle_formulas.py``). Values that could
become wrong are not written by hand: arguments, sizes and resources come from this compilation
(``compiler/worker.py``), contracts from the paragraphs of the kernels' docstrings.
docs/reference/bundle-manifest.md describes the files.
"""

import ast
import contextlib
import functools
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
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import triton

from interlace import __version__, aot
from interlace.kernels import bundle_formulas, launch_formulas, signal
from interlace.kernels.attention.decode import DECODE_LANES
from interlace.kernels.collectives import low_latency as words
from interlace.kernels.experts.dispatch import COUNT_NUMBERS
from interlace.kernels.signal import HEADER_WORDS, MAX_WORLD_SIZE
from interlace.kernels.tiling import arrival_order, owner_order, send_order
from interlace.ops.attention.blocks import MERGED
from interlace.ops.attention.decode import MOST_PIECES
from interlace.ops.collectives.launch import BLOCK_WORDS, EPOCHS_OFFSET, MOST_PROGRAMS, WORDS_OFFSET
from interlace.ops.matmul.formats import FORMATS, format_named
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default
from interlace.tools.catalogue import catalogue, catalogue_attention
from interlace.tools.catalogue.absent_group import KernelOptions as KernelOptions
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, MatmulVariant, entries, signals
from interlace.tools.catalogue.catalogue_attention import HeadsVariant

# Not options of one build: the path has its own option, and the launch says how many programs.
_NOT_OVERRIDDEN = ("descriptors", "programs", "warp_roles")


def operands_of(options: KernelOptions, arch: int) -> MatmulVariant:
    """Return the operands of a matmul with these options. Raises ValueError for impossible ones."""
    packs = options.quantize in FORMATS
    if packs and options.gather != "none":
        raise ValueError(
            f"gather is {options.gather!r}: no bundle gathers rows in {options.quantize}"
        )
    if options.quantize and not packs and arch < 89:
        raise ValueError(f"quantize: Triton makes no float8_e4m3fn for sm_{arch}")
    if packs:
        format_named(options.quantize).check_widths(columns=options.columns)
    if options.format:
        format_named(options.format).check_widths(inner=options.inner)
        if options.weight != "nk":
            raise ValueError(
                f"weight is 'kn': columns of {options.format} are packed, which is 'nk'"
            )
    possible = (
        gpu_default(arch, options.torch_dtype, options.rows).descriptors and not options.format
    )
    possible = possible and options.columns % 16 == 0 and options.inner % 16 == 0
    if options.path == "tma" and not possible:
        raise ValueError(
            f"path is 'tma': sm_{arch} does not have it for {options.format or options.torch_dtype} with "
            f"{options.columns} columns and inner dimension {options.inner}"
        )
    path = "tma" if possible and options.path != "pointers" else "pointers"
    return MatmulVariant(**{**vars(options), "path": path})


Make = Callable[[int, KernelOptions], list[Entry]]


@dataclass(frozen=True)
class BundleOp:
    """One op of a bundle: ``entries`` are its kernels, in the order of their launches.

    finish_kernel follows on the stream, except for memory of ``words`` that carry their flags. Kernels in
    ``apart`` wait for nothing, and without a ``workspace`` no kernel waits. ``tables`` name the quantity
    that an argument points to; ``options`` are those that apply. ``names``: for a kernel, arguments with
    another meaning than in the other kernels, and their names. ``constants`` are the same for all builds.
    ``bias_by_column``: it has no bias by row.
    """

    entries: Make
    options: tuple[str, ...]
    tables: dict[str, str] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    words: bool = False
    workspace: bool = True
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    bias_by_column: bool = False

    @property
    def finished(self) -> bool:
        return self.workspace and not self.words

    def checked(self, name: str, options: KernelOptions) -> None:
        """Raise ValueError for an option that ``name`` does not have, or for a wrong value."""
        for one in fields(KernelOptions):
            changed = getattr(options, one.name) != getattr(KernelOptions(), one.name)
            if changed and one.name not in (*self.options, "dtype", "rows", "overrides"):
                raise ValueError(f"{one.name} is not an option of {name}")
        if options.bias == "m" and self.bias_by_column:
            raise ValueError("bias is 'm': this op has a bias per column only")
        known = {f.name for f in fields(Configuration)} - set(_NOT_OVERRIDDEN)
        chunks = options.overrides.get("chunks", 1)
        if chunks > bundle_formulas.MOST_CHUNKS:
            raise ValueError(
                f"chunks is {chunks}; a bundle has {bundle_formulas.MOST_CHUNKS} at the most"
            )
        for key, value in options.overrides.items():
            if key not in known:
                raise ValueError(f"{key} is not in the configuration: {', '.join(sorted(known))}")
            check_values({key: value})
            if value == 0 and not isinstance(value, bool):
                raise ValueError(f"{key} must be positive, got {value}")


VALUES = {
    "rank": "this rank, from 0",
    "world_size": "number of ranks",
    "rows": "rows of every rank, by rank; of a flat tensor: its elements; of attention: its tokens",
    "splits": "rows of every rank for each of all experts, one rank after another",
    "tokens": "rows of the input",
    "programs": "programs of the kernel, alike on all ranks",
    "home_rows": "rows of the rank to which most come home",
    "most_tokens": "tokens of the rank that has most",
    "senders": "programs that send to one rank, alike on all ranks",
    "query_rows": "heads of queries that see one head of keys, times the tokens of a sequence",
    "resident": "programs of this kernel that the device keeps resident at once: one for each of its "
    "multiprocessors, less what else runs there meanwhile",
}


def _collective(op: str) -> Make:
    def make(arch: int, options: KernelOptions) -> list[Entry]:
        kind = options.dtype, options.configuration(arch)
        return [catalogue.collective(arch, op, *kind, average=options.average)]

    return make


def _one(kernel: Callable[[int, MatmulVariant], Entry]) -> Make:
    return lambda arch, options: [kernel(arch, operands_of(options, arch))]


def _experts_rows(*kernels: str) -> Make:
    def make(arch: int, options: KernelOptions) -> list[Entry]:
        found = catalogue.experts_rows(arch, operands_of(options, arch))
        return [each for each in found if each.kernel in kernels]

    return make


def _attention(kernels: Callable[..., Iterable[Entry]]) -> Make:
    return lambda arch, options: list(kernels(arch, HeadsVariant(**vars(options))))


RANKS = (f"0 < world_size <= {MAX_WORLD_SIZE}", "0 <= rank < world_size")
_ROWS = (*RANKS, "len(rows) == world_size", "min(rows) >= 0", "max(rows) > 0")
_SPLITS = (*RANKS, "num_experts > 0", "min(splits) >= 0", "max(splits) > 0")
_SENT = (*RANKS, "senders > 0", "most_tokens > 0", "experts <= EXPERTS")
# Without columns no program would wait for rows that arrive, and they would hit the next op.
_WAITED = ("N > 0", "resident > COPIERS")
_BLOCKS = f"0 < blocks <= {MOST_PROGRAMS}"
_FUSED = ("weight", "bias", "path", "columns", "inner")
_SCALED = (*_FUSED, "format")
_NORM = ("average", "norm", "quantize")
_ROUTED = ("topk", "experts", "columns")
_HEAD = ("head_dim", "value_dim")
_SEGMENTS = {"segments_ptr": "segments"}
_KEYS = {"parts_ptr": "parts", "spans_ptr": "spans"}
_WORDS = {"epochs_offset": EPOCHS_OFFSET, "words_offset": WORDS_OFFSET}
# Constants of all ops, for ``bundle_formulas.py``.
CONSTANTS = {
    "WORD": WORD,
    "HEADER_WORDS": HEADER_WORDS,
    "DATA_ALIGNMENT": DATA_ALIGNMENT,
    "BLOCK_WORDS": BLOCK_WORDS,
    "COUNT_NUMBERS": COUNT_NUMBERS,
    "DECODE_LANES": DECODE_LANES,
    "MERGED": MERGED,
    "MOST_PIECES": MOST_PIECES,
}


def _of_heads(*, backward: bool) -> BundleOp:
    return BundleOp(
        _attention(functools.partial(catalogue_attention.heads_kernels, backward=backward)),
        _HEAD,
        _KEYS,
        (*_ROWS, "min(rows) > 1", "heads % key_heads == 0"),
        workspace=False,
        constants={"span_stride": 0, "first_head": 0},
    )


OPS = {
    "all_gather_matmul": BundleOp(
        _one(catalogue.all_gather_matmul),
        _SCALED,
        {"sends_ptr": "sends", "chunks_ptr": "chunks"},
        (*_ROWS, *_WAITED),
        constants={"multicast": 0},  # bundles send to each rank by itself
    ),
    "matmul_reduce_scatter": BundleOp(
        _one(catalogue.matmul_reduce_scatter), (*_SCALED, "average"), _SEGMENTS, _ROWS
    ),
    "matmul_all_reduce": BundleOp(
        _one(catalogue.matmul_all_reduce), (*_SCALED, "average"), conditions=RANKS
    ),
    "matmul_reduce_scatter_norm": BundleOp(
        _one(catalogue.matmul_reduce_scatter_norm), (*_SCALED, *_NORM, "gather"), _SEGMENTS, _ROWS
    ),
    "matmul_all_reduce_norm": BundleOp(
        _one(catalogue.matmul_all_reduce_norm), (*_SCALED, *_NORM), conditions=RANKS
    ),
    "reduce_norm": BundleOp(
        _one(catalogue.reduce_norm),
        ("columns", *_NORM, "gather"),
        _SEGMENTS,
        (*_ROWS, "N <= BLOCK_N"),
    ),
    "low_latency_norm": BundleOp(
        _one(catalogue.low_latency_norm),
        ("columns", *_NORM),
        conditions=(*RANKS, _BLOCKS, "N * ITEMSIZE % UNIT == 0"),
        words=True,
        constants=_WORDS,
    ),
    "dispatch": BundleOp(
        _experts_rows("dispatch_send_kernel", "dispatch_receive_kernel"),
        _ROUTED,
        conditions=_SENT,
        constants={"counts_byte": 0},
    ),
    "combine": BundleOp(
        _experts_rows("combine_kernel"), _ROUTED, conditions=_SENT, constants={"tokens": 0}
    ),
    "grouped_matmul_combine": BundleOp(
        _one(catalogue.grouped_matmul_combine),
        ("weight", "path", "columns", "inner", "format", "topk", "experts"),
        conditions=(*RANKS, "0 < programs <= resident", "home_rows > 0", "num_experts <= EXPERTS"),
    ),
    **{
        op: BundleOp(
            _one(catalogue.grouped_matmul),
            _SCALED,
            {"sends_ptr": "sends", **_SEGMENTS},
            (*_SPLITS, experts, *_WAITED),
            bias_by_column=True,
        )
        for op, experts in (
            ("all_gather_grouped_matmul", "len(splits) == world_size * num_experts"),
            ("all_to_all_grouped_matmul", "len(splits) == world_size * world_size * num_experts"),
        )
    },
    "matmul_all_to_all": BundleOp(
        _one(catalogue.matmul_all_to_all),
        _FUSED,
        {"shards_ptr": "shards"},
        _ROWS,
        bias_by_column=True,
    ),
    "all_to_all_matmul": BundleOp(
        _one(catalogue.all_to_all_matmul),
        ("weight", "bias", "columns", "inner"),
        {"sends_ptr": "sends"},
        (*_ROWS, "min(rows) > 0", *_WAITED),
        bias_by_column=True,
    ),
    "context_parallel_attention": BundleOp(
        _attention(catalogue_attention.gathered_attention),
        _HEAD,
        {"sends_ptr": "sends", **_KEYS},
        (*_ROWS, "min(rows) > 1", "resident > COPIERS", "heads % key_heads == 0"),
        apart=("merge_attention_kernel",),
        constants={"span_stride": 0, "first_head": 0},
    ),
    "attention_of_heads": _of_heads(backward=False),
    "attention_of_heads_backward": _of_heads(backward=True),
    "distributed_decode": BundleOp(
        _attention(catalogue_attention.decode_kernels),
        _HEAD,
        conditions=(*RANKS, _BLOCKS),
        apart=("decode_attention_kernel", "merge_attention_kernel"),
        words=True,
        # between the last two kernels, merged results are exchanged
        names={
            "merge_attention_kernel": {"output_ptr": "input_ptr"},
            # a cache in one piece has no pages
            "decode_attention_kernel": {"pages_ptr": "lengths_ptr"},
        },
        constants={"per_key": 1, "first_head": 0, "pages_stride": 0, "pages_size": 0, **_WORDS},
    ),
    "all_gather": BundleOp(
        _collective("all_gather"),
        (),
        {"sends_ptr": "sends", "arrivals_ptr": "arrivals"},
        (*_ROWS, "resident > COPIERS"),
    ),
    "reduce_scatter": BundleOp(_collective("reduce_scatter"), ("average",), _SEGMENTS, _ROWS),
    "all_reduce": BundleOp(_collective("all_reduce"), ("average",), conditions=RANKS),
    "broadcast": BundleOp(
        lambda arch, options: catalogue.broadcast(arch, options.dtype),
        (),
        conditions=(*RANKS, "0 <= root < world_size", _BLOCKS),
        words=True,
        constants=_WORDS,
    ),
}


def descriptor_conditions(entry: Entry) -> tuple[str, ...]:
    """Return conditions of descriptors (TMA) on the operands, besides multiples of 16."""
    rows_of_weight = {"kn": "weight_stride_k >= N", "nk": "weight_stride_n >= K"}
    path = entry.fixed.get("DESCRIPTORS")
    if path in rows_of_weight:
        return "K > 0", "input_stride >= K", rows_of_weight[path]
    return ("keys_stride >= batches * key_heads * (HEAD_DIM + VALUE_DIM)",) if path else ()


def kernels(op: str) -> tuple[str, ...]:
    """Return names of the kernels of an op itself, in the order of their launches."""
    return tuple(name for name in bundle_formulas.OPS[op] if name.endswith("_kernel"))


FORMAT = "interlace bundle"
VERSION = 2
MANIFEST = "manifest.json"
LOADER = "load.py"
_NOT_IN_LOADER = ("interlace", "__future__")

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
    options: KernelOptions
    arches: Sequence[int]
    out: pathlib.Path

    def entries(self) -> list[Entry]:
        """Return everything to compile. Raises ValueError naming the op, or an option."""
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}; there are {', '.join(OPS)}")
        OPS[self.op].checked(self.op, self.options)
        return [entry for arch in self.arches for entry in _sequence(self, arch)]


def build_bundles(
    targets: Sequence[BundleTarget],
    *,
    on_report: Callable[[BuildReport], None] = lambda report: None,
) -> list[BuildReport]:
    """Compile ``targets`` together; if no report has problems, write their bundles."""
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
                manifest = json.dumps(_manifest(target, folder), indent=2) + "\n"
                _place(target.out, folder, {LOADER: loader(), MANIFEST: manifest})
    return reports


def loader() -> str:
    """Return the loader as one file: ``aot.py``, preceded by all code of interlace that it calls."""
    called = [inspect.getsource(each) for each in (send_order, arrival_order, owner_order)]
    head, body = _less_imports(aot)
    modules = [_less_imports(each)[1] for each in (launch_formulas, bundle_formulas)]
    return "\n\n".join([head, "from __future__ import annotations", *called, *modules, body])


def _less_imports(module: types.ModuleType) -> tuple[str, str]:
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    docstring, *nodes = ast.parse(source).body
    for node in reversed(nodes):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(_NOT_IN_LOADER):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines[: docstring.end_lineno]), "".join(lines[docstring.end_lineno :])


def _place(out: pathlib.Path, staging: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Move compiled files into ``out``, and write ``texts``; the manifest, last, is replaced whole."""
    for path in sorted(staging.iterdir()):
        if path.suffix != ".json":
            os.replace(path, out / path.name)
    for name, text in texts.items():
        (staging / name).write_text(text)
        os.replace(staging / name, out / name)


def _mains(target: BundleTarget, arch: int) -> list[Entry]:
    entries = OPS[target.op].entries(arch, target.options)
    if any(entry.fixed.get("COPIERS") == 0 for entry in entries):
        raise ValueError("copiers is 0: a bundle has no kernels for the copy engine to send")
    # a configuration chosen by hand may spill
    by_hand = bool(target.options.overrides)
    return [replace(entry, default=entry.default and not by_hand) for entry in entries]


def _sequence(target: BundleTarget, arch: int) -> list[Entry]:
    last = [each for each in signals(arch) if each.kernel == _LAST]
    return [*_mains(target, arch), *(last if OPS[target.op].finished else ())]


def _stem(entry: Entry) -> str:
    return f"{entry.kernel}.sm_{entry.arch}"


def _manifest(target: BundleTarget, staging: pathlib.Path) -> dict[str, Any]:
    op, options = OPS[target.op], target.options
    sequence = _sequence(target, target.arches[0])
    per_arch = {str(arch): _arch(target, arch, staging) for arch in target.arches}
    functions = bundle_formulas.OPS[target.op]
    needed = _names(function.__code__ for function in functions.values()) - functions.keys()
    needed |= {name for text in op.conditions for name in bundle_formulas.inputs(text)}
    protocol = (words if op.words else signal).__doc__
    layout = ("slot_offset", "data_offset", "buffer_bytes") if op.workspace else ()
    return {
        "format": FORMAT,
        "version": VERSION,
        "built_with": {"interlace": __version__, "triton": triton.__version__},
        "op": target.op,
        "options": {**asdict(options), "dtype": str(options.torch_dtype).removeprefix("torch.")},
        "sequence": [entry.kernel for entry in sequence],
        "values": {value: VALUES[value] for value in VALUES if value in needed},
        "quantities": sorted(functions.keys() - set(kernels(target.op))),
        "tables": op.tables,
        "workspace": {
            "layout": list(layout[2:] if op.words else layout),
            "alignment": DATA_ALIGNMENT,
            "slot_bytes": WORD,
            # index of every int64 word of the header that a host uses; credits: rank 0's
            "header_words": {
                "epoch": signal.EPOCH_WORD,
                "abort": signal.ABORT_WORD,
                "spin_limit": signal.SPIN_LIMIT_WORD,
                "claimed": signal.CLAIMED_WORD,
                "credits": signal.CREDIT_WORDS,
            },
            "protocol": str(protocol).partition("\nFlags:")[0].strip(),
        },
        "contracts": contracts(sequence, entries(target.arches[0])),
        "arches": per_arch,
    }


def _arch(target: BundleTarget, arch: int, staging: pathlib.Path) -> dict[str, Any]:
    op, options = OPS[target.op], target.options
    mains = _mains(target, arch)
    baked: dict[str, Any] = {
        "CHUNKS": options.configuration(arch).chunks,
        # rows of the input are sent, or results made from them
        "ITEMSIZE": 1
        if options.format and "sends_ptr" in op.tables
        else options.torch_dtype.itemsize,
        "NORMED_ITEMSIZE": 1 if options.quantize else options.torch_dtype.itemsize,
        "GATHERS": ("none", "normed", "both").index(options.gather),
    }
    for entry in mains:  # if it is in the first kernel, that one is meant
        fixed = {name: value for name, value in entry.fixed.items() if value is not None}
        baked = {**fixed, **baked}
    baked |= {**CONSTANTS, **op.constants}
    conditions = (*op.conditions, *descriptor_conditions(mains[0]))
    kernels = {entry.kernel: _kernel(target, entry, staging, conditions) for entry in mains}
    for last in _sequence(target, arch)[len(mains) :]:
        kernels[last.kernel] = _kernel(target, last, staging, RANKS)
    numbers = {name: int(value) for name, value in baked.items() if isinstance(value, int)}
    return {"constants": dict(sorted(numbers.items())), "kernels": kernels}


def _kernel(
    target: BundleTarget, entry: Entry, staging: pathlib.Path, conditions: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest's entry of a kernel; ``staging`` has the artifacts of ``entry``."""
    stem, op = _stem(entry), OPS[target.op]
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
    found = set[str]()
    for code in functions:
        within = (const for const in code.co_consts if isinstance(const, types.CodeType))
        found |= {*code.co_names} | _names(within)
    return found


def contract(module: str, kernel: str) -> dict[str, str]:
    """Return the paragraphs of the docstring: "computes" is the first, the others have names in it."""
    function = getattr(importlib.import_module(module), kernel)
    paragraphs = inspect.cleandoc(function.fn.__doc__).split("\n\n")
    first, *named = (" ".join(paragraph.split()) for paragraph in paragraphs)
    found = {"computes": first}
    for paragraph in named:
        label, _, text = paragraph.partition(": ")
        if label.lower() in _LABELS:
            found[label.lower()] = text
    return found


def contracts(entries: list[Entry], known: list[Entry]) -> dict[str, dict[str, str]]:
    """Return contracts, by kernel, of ``entries`` and of ``known`` ones that their texts refer to."""
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
