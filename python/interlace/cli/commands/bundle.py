"""``interlace build --op``: build one op ahead of time, for launches without Triton."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from interlace import __version__, aot
from interlace.cli.commands.build import show
from interlace.cli.output.options import add_options, option
from interlace.cli.output.progress import counted
from interlace.runtime.compiler.build import Report
from interlace.runtime.compiler.bundle.bundle import Target, build_bundles
from interlace.runtime.compiler.bundle.ops import OPS, Options
from interlace.runtime.tuning.configuration import Configuration

if TYPE_CHECKING:
    from rich.console import Console

LOADER = "load.py"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class BundleOptions:
    """The options of ``build`` that are for one op; None where they are not given."""

    op: str | None = option(None, metavar="OP", help=", ".join(OPS))
    out: str | None = option(None, metavar="DIR", help="where the bundle goes")
    dtype: str | None = option(None, metavar="NAME", help=", ".join(_DTYPES))
    weight: str | None = option(
        None, choices=("kn", "nk"), help="contiguous along N (default) or K"
    )
    bias: str | None = option(
        None, choices=("none", "n", "m"), help="per column, per row; default none"
    )
    average: bool | None = option(None, action="store_const", const=True, help="not the sum")
    path: str | None = option(
        None, choices=("auto", "tma", "pointers"), help="of loads; default auto"
    )
    rows: int | None = option(None, type=int, metavar="N", help="of a rank; default 4096")
    columns: int | None = option(None, type=int, metavar="N", help="of the weight; default 4096")
    inner: int | None = option(None, type=int, metavar="N", help="K; default 4096")
    set: tuple[str, ...] | None = option(
        None,
        action="append",
        metavar="NAME=VALUE",
        help="a value of the configuration, such as block_m=64; may be repeated",
    )


_OPTIONS = tuple(each.name for each in fields(BundleOptions) if each.name != "op")


def add_bundle_options(build: argparse.ArgumentParser) -> None:
    """A group of options of ``build``."""
    group = build.add_argument_group(
        "one op ahead of time",
        "cubin, PTX and a manifest for launches without Triton: docs/aot.md. Tiles are chosen for the "
        "given extents; columns and inner that are multiples of 16 have to be so at every launch.",
    )
    add_options(group, BundleOptions)


def bundle(console: Console, given: argparse.Namespace, as_json: bool) -> int:
    """Build ``given.op`` into ``given.out``; 1, and nothing is written, if a kernel is not as it should be.

    Raises ValueError naming an option, OSError if the directory cannot be written.
    """
    if given.out is None:
        raise ValueError("--op needs --out, the directory for the bundle")
    if given.kernel is not None:
        raise ValueError("--kernel is for the whole catalogue; --op builds all kernels of an op")
    arches = tuple(dict.fromkeys(given.arch))
    target = Target(given.op, _options(given), arches, pathlib.Path(given.out))
    with counted() as begin:
        reports = write([target], on_report=begin("compiling", len(target.entries())))
    show(console, reports, as_json)
    failed = any(report.problems() for report in reports)
    if not as_json and not failed:
        console.print(f"Written to {given.out}. Without Triton: {LOADER} there.")
    return 1 if failed else 0


def write(
    targets: Sequence[Target], *, on_report: Callable[[Report], None] = lambda report: None
) -> list[Report]:
    """Build ``targets``, with the loader in every bundle."""
    loader = pathlib.Path(aot.__file__).read_text()
    return build_bundles(
        targets, built_with=__version__, files={LOADER: loader}, on_report=on_report
    )


def refuse_without_op(given: argparse.Namespace) -> None:
    """Raises ValueError for an option that only ``--op`` has."""
    for name in _OPTIONS:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name} is for one op; give --op too: {', '.join(OPS)}")


def _options(given: argparse.Namespace) -> Options:
    chosen: dict[str, Any] = {
        name: value
        for name in _OPTIONS
        if name != "out" and (value := getattr(given, name)) is not None
    }
    if "dtype" in chosen:
        named = {**_DTYPES, **{short: short for short in _DTYPES.values()}}
        if chosen["dtype"] not in named:
            raise ValueError(f"--dtype is {chosen['dtype']!r}; there are {', '.join(_DTYPES)}")
        chosen["dtype"] = named[chosen["dtype"]]
    if chosen.get("bias") == "none":
        chosen["bias"] = ""
    for name in ("rows", "columns", "inner"):
        if chosen.get(name, 1) < 1:
            raise ValueError(f"--{name} must be positive, got {chosen[name]}")
    overrides = dict(_override(text) for text in chosen.pop("set", ()))
    return Options(**chosen, overrides=overrides)


def _override(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise ValueError(f"--set is {text!r}; it must be like block_m=64")
    if isinstance(getattr(Configuration, name, None), bool) and value in ("0", "1"):
        return name, value == "1"
    return name, int(value)
