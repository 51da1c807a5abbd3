"""``interlace build``: compile every kernel, or one op ahead of time, without a GPU, and check it."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from interlace.arguments.paths import refuse_empty
from interlace.ops.matmul.formats import FORMATS
from interlace.output import consoles
from interlace.output.consoles import count_in_bar, new_table
from interlace.output.files import refuse_no_folder
from interlace.output.options import CommandOptions, arches, option, positive_int
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.tuning.configuration import Configuration, check_values
from interlace.tools.bundle import LOADER, OPS, BundleTarget, KernelOptions, build_bundles
from interlace.tools.catalogue.build import STRICT_ARCHES, BuildReport, build as build_entries
from interlace.tools.catalogue.catalogue import ARCHES, Entry, entries, linked_entries, one_of_each

NUMBERS = ("registers", "stack", "spills", "shared", "tensor_cores")  # the figures of a report
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class BuildOptions(CommandOptions):
    """Compile every kernel for the named architectures, without a GPU, and check the result.

    The default is one variant of each kernel for sm_90, which takes a minute. --full builds all variants,
    which takes many minutes.

    With --op it builds one op ahead of time: cubin, PTX and a manifest for launches without Triton
    (docs/how-to/compile/aot.md). The options from --out on belong to --op. Tiles are chosen for the given
    extents; if columns or inner is a multiple of 16, it must be one at every launch.
    """

    statuses = ((1, "a kernel is faulty"),)

    arch: tuple[int, ...] | None = option(
        None, type=arches, metavar="80,90,100", help="GPUs to compile for (default 90)"
    )
    full: bool = option(
        False, action="store_true", help="every variant; --arch is 80,90,100 by default"
    )
    json: bool = option(False, action="store_true", help="print JSON")
    kernel: tuple[str, ...] | None = option(
        None,
        action="append",
        metavar="NAME",
        help="build only the kernel with this name, as build prints it; may be repeated",
    )
    nvshmem: str | None = option(None, metavar="FOLDER", help="folder of libnvshmem_device.bc")
    op: str | None = option(None, choices=tuple(OPS), help="the op to build ahead of time")
    out: str | None = option(None, metavar="DIR", help="directory to write the bundle to")
    dtype: str | None = option(None, metavar="NAME", help="dtype: " + ", ".join(_DTYPES))
    weight: str | None = option(
        None,
        choices=("kn", "nk"),
        help="layout of the weight: contiguous along N (default without --format) or K",
    )
    bias: str | None = option(
        None, choices=("none", "n", "m"), help="bias: none (default), per column (n), per row (m)"
    )
    average: bool | None = option(
        None, action="store_const", const=True, help="average over ranks instead of summing"
    )
    path: str | None = option(
        None,
        choices=("auto", "tma", "pointers"),
        help="loads of operands in kernels (default auto)",
    )
    rows: int | None = option(
        None, type=positive_int, metavar="N", help="rows of a rank (default 4096)"
    )
    columns: int | None = option(
        None, type=positive_int, metavar="N", help="columns of the weight (default 4096)"
    )
    inner: int | None = option(
        None, type=positive_int, metavar="N", help="contracted dimension K (default 4096)"
    )
    norm: str | None = option(
        None, choices=("rms", "layer"), help="norm of rows, for ops that have one (default rms)"
    )
    quantize: str | None = option(
        None,
        nargs="?",
        const="fp8",
        choices=("fp8", "fp8_static", *FORMATS),
        help="quantize the result of an op with a norm. Without a value it is fp8, with a scale for each "
        "row. fp8_static takes a scale that the norm's weight contains. A block-scaled format excludes "
        "--gather",
    )
    gather: str | None = option(
        None,
        choices=("none", "normed", "both"),
        help="the normed rows that all ranks get (default none)",
    )
    format: str | None = option(
        None,
        choices=tuple(FORMATS),
        help="block-scaled format of packed operands; --weight is then nk, --dtype the output dtype",
    )
    head_dim: int | None = option(
        None, type=positive_int, metavar="N", help="head size of attention (default 128)"
    )
    value_dim: int | None = option(
        None, type=positive_int, metavar="N", help="head size of the values (default: of the keys)"
    )
    topk: int | None = option(
        None, type=positive_int, metavar="N", help="experts per token (default 8)"
    )
    experts: int | None = option(
        None, type=positive_int, metavar="N", help="largest number of experts of a rank (default 2)"
    )
    set: tuple[str, ...] | None = option(
        None,
        action="append",
        metavar="NAME=VALUE",
        help="set a value of the configuration, such as block_m=64; may be repeated",
    )


_NAMES = [field.name for field in fields(BuildOptions)]
_OF_ONE_OP = _NAMES[_NAMES.index("op") + 1 :]


def build(console: Any, options: BuildOptions) -> int:
    """Build kernels of the catalogue, or one op; print a line per variant. Return 1 if one is faulty."""
    if options.op is not None:
        return _bundle(console, options.op, options)
    for name in _OF_ONE_OP:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} needs --op, which is one of {', '.join(OPS)}")
    if options.nvshmem is not None:
        refuse_empty("--nvshmem", options.nvshmem)
    kernels = options.kernel
    chosen = options.arch or (ARCHES if options.full else (90,))
    some: Callable[[list[Entry]], list[Entry]] = list if options.full else one_of_each
    wanted = [entry for arch in chosen for entry in some(entries(arch))]
    wanted += [entry for arch in chosen for entry in some(_link(arch, options.nvshmem))]
    if kernels is not None:
        known = list(dict.fromkeys(entry.name.split()[0] for entry in wanted))
        for name in kernels:
            if name not in known:
                raise ValueError(f"--kernel must be one of {', '.join(known)}, got {name}")
        wanted = [entry for entry in wanted if entry.name.split()[0] in kernels]
    with count_in_bar() as begin:
        reports = build_entries(wanted, on_report=begin("compiling", len(wanted)))
    code = show(console, reports, options.json)
    if not (options.full or options.json):
        consoles.write(console, "This was one variant of each kernel; --full builds all.", "dim")
    return code


def _link(arch: int, folder: str | None) -> list[Entry]:
    """Return the variants that are linked with NVSHMEM; without NVSHMEM none, and print a message."""
    try:
        return linked_entries(arch, folder)
    except PlaceUnavailableError as error:
        if folder is not None:
            raise
        text = f"not linked with NVSHMEM: {error}"
        consoles.write(consoles.new_console(stderr=True), text, "yellow")
        return []


def show(console: Any, reports: list[BuildReport], as_json: bool) -> int:
    """Print a line per report, or all reports as JSON; return 1 if any is faulty, otherwise 0."""
    failed = sum(bool(report.problems()) for report in reports)
    if as_json:
        facts = [{**asdict(report), "problems": report.problems()} for report in reports]
        console.out(json.dumps(facts, indent=2))
        return 1 if failed else 0
    from rich.text import Text

    table = new_table(
        title="registers per thread, bytes of stack, spill instructions, bytes of shared memory, "
        "tensor-core instructions",
        title_justify="left",
    )
    table.add_column("kernel, variant", min_width=28)
    for column in ("sm", "regs", "stack", "spills", "shared", "tensor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict")
    kernels = list(dict.fromkeys(report.name.split(" ")[0] for report in reports))
    kernel = ""
    for report in sorted(reports, key=lambda report: kernels.index(report.name.split(" ")[0])):
        name, _, variant = report.name.partition(" ")
        if name != kernel:
            kernel = name
            table.add_row(Text(kernel, "bold"))
        problems = report.problems()
        numbers = [None if report.error is not None else getattr(report, name) for name in NUMBERS]
        if problems:
            verdict = Text("; ".join(problems), "red")
        elif not report.spills and not report.stack:
            verdict = Text("good", "green")
        else:
            why = "older chip" if report.arch not in STRICT_ARCHES else "not a default"
            verdict = Text(f"spills ({why})", "yellow")
        table.add_row(
            Text(f"  {variant or 'any'}"),
            str(report.arch),
            *("-" if number is None else str(number) for number in numbers),
            verdict,
        )
    consoles.write_table(console, table)
    console.print(f"{len(reports)} built, {failed} of them faulty.")
    return 1 if failed else 0


def _bundle(console: Any, op: str, options: BuildOptions) -> int:
    """Build one op into ``out``; return 1 and write nothing if a kernel is faulty."""
    if options.out is None:
        raise ValueError("--op needs --out, the directory for the bundle")
    for name in ("kernel", "full"):
        if getattr(options, name):
            raise ValueError(f"--{name} is not for --op, which builds all kernels of its op")
    refuse_no_folder("--out", options.out)
    arches = tuple(dict.fromkeys(options.arch or ARCHES))
    target = BundleTarget(op, _options(options), arches, pathlib.Path(options.out))
    with count_in_bar() as begin:
        reports = build_bundles([target], on_report=begin("compiling", len(target.entries())))
    code = show(console, reports, options.json)
    if not options.json and not code:
        consoles.write(console, f"Written to {options.out}. Its {LOADER} launches without Triton.")
    return code


def _options(options: BuildOptions) -> KernelOptions:
    chosen: dict[str, Any] = {name: getattr(options, name) for name in _OF_ONE_OP if name != "out"}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if "dtype" in chosen:
        named = {**_DTYPES, **{short: short for short in _DTYPES.values()}}
        if chosen["dtype"] not in named:
            raise ValueError(
                f"--dtype must be one of {', '.join(_DTYPES)}, got {chosen['dtype']!r}"
            )
        chosen["dtype"] = named[chosen["dtype"]]
    if "format" in chosen and "format" in OPS[str(options.op)].options:
        chosen.setdefault("weight", "nk")  # columns of a block-scaled weight are packed
    if chosen.get("bias") == "none":
        chosen["bias"] = ""
    overrides = dict(_override(text) for text in chosen.pop("set", ()))
    return KernelOptions(**chosen, overrides=overrides)


def _override(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise ValueError(f"--set must be like block_m=64, got {text!r}")
    number = int(value)
    if isinstance(getattr(Configuration, name, None), bool) and value in ("0", "1"):
        number = value == "1"
    try:
        check_values({name: number})
    except (TypeError, ValueError) as error:
        raise ValueError(f"--set {text}: {error}") from None
    return name, number
