"""Artifacts of a compiled kernel for launches without Triton: cubin, PTX, and how to call it.

A compiling process writes ``<stem>.cubin``, ``<stem>.ptx`` and ``<stem>.json``. The facts in the last one
are of this very compilation: Triton's signature and metadata, and what the PTX declares. A cubin takes
the arguments that are no constants, in order, and after them what Triton's own launcher would add:
pointers to scratch memory. How many those are is counted, and anything else that a launch would have to
do (clusters, profiling, tensor maps) is refused here and not found out on a GPU.
"""

import json
import pathlib
import re
from typing import Any

from interlace.runtime.core.kernel_arguments import leaves, outside_name

# What Triton's launcher passes after the arguments of the signature, in this order.
SCRATCH = ("global_scratch", "profile_scratch")


class ArtifactError(RuntimeError):
    """A compiled kernel needs more of a launch than arguments, shared memory and scratch."""


def write(compiled: Any, stem: str, *, usage: dict[str, int], spills: int) -> None:
    """The three files of one compilation. ``usage`` is named as ``cuobjdump -res-usage`` does."""
    path = pathlib.Path(stem)
    found = facts(compiled, usage=usage, spills=spills)
    path.with_name(path.name + ".cubin").write_bytes(compiled.asm["cubin"])
    path.with_name(path.name + ".ptx").write_text(compiled.asm["ptx"])
    path.with_name(path.name + ".json").write_text(json.dumps(found))


def facts(compiled: Any, *, usage: dict[str, int], spills: int) -> dict[str, Any]:
    """Facts to launch ``compiled`` with, and what a program of it takes of a multiprocessor."""
    metadata, source, ptx = compiled.metadata, compiled.src, compiled.asm["ptx"]
    for name, allowed in (("num_ctas", 1), ("profile_scratch_size", 0), ("launch_pdl", False)):
        if (value := getattr(metadata, name)) != allowed:
            raise ArtifactError(f"{metadata.name}: {name} is {value}; a bundle has {allowed}")
    if metadata.tensordesc_meta:
        raise ArtifactError(f"{metadata.name} takes tensor maps, which a bundle cannot make")
    return {
        "symbol": metadata.name,
        "target": _only(r"^\.target (\w+)", ptx),
        "threads": int(_only(r"\.reqntid (\d+)", ptx)),
        "arguments": _arguments(source, metadata.name, ptx),
        "constants": {
            outside_name(path): value
            for place, given in sorted(source.constants.items())
            for path, value in leaves({_path(source, place): given}).items()
        },
        "shared_memory": {"static": usage["SHARED"], "dynamic": metadata.shared},
        "scratch": {
            "bytes_per_program": metadata.global_scratch_size,
            "alignment": metadata.global_scratch_align,
        },
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "spill_instructions": spills,
        "tensor_memory_columns": metadata.tmem_size or 0,
    }


def _arguments(source: Any, symbol: str, ptx: str) -> list[dict[str, Any]]:
    """Every parameter of the cubin, in order: of the signature, then scratch."""
    declared = _parameters(symbol, ptx)
    divisible = {_path(source, place) for place, given in source.attrs.items() if _by_16(given)}
    arguments: list[dict[str, Any]] = [
        {
            "name": outside_name(path),
            "from": "caller",
            "type": kind,
            "divisible_by": 16 if path in divisible else 1,
        }
        for path, kind in leaves(source.signature).items()
        if kind != "constexpr"
    ]
    hidden = len(declared) - len(arguments)
    if hidden != len(SCRATCH):
        raise ArtifactError(
            f"{symbol} has {hidden} parameters after those of its signature; known are {SCRATCH}"
        )
    arguments += [
        {"name": name, "from": "loader", "type": "*u8", "divisible_by": 1} for name in SCRATCH
    ]
    offset = 0
    for argument, (size, used) in zip(arguments, declared, strict=True):
        if size != (expected := _size(argument["type"])):
            raise ArtifactError(
                f"{symbol} takes {size} bytes for {argument['name']}, a {argument['type']} "
                f"has {expected}"
            )
        offset = -(-offset // size) * size
        argument |= {"bytes": size, "offset": offset, "used": used}
        offset += size
    return arguments


def _path(source: Any, place: tuple[int, ...]) -> str:
    """The name of an argument, or of a field of one, that Triton calls by its place."""
    name = source.fn.arg_names[place[0]]
    return ".".join((name, *(source.signature[name]._fields[each] for each in place[1:])))


def _size(kind: str) -> int:
    if kind.startswith("*"):
        return 8
    if not re.fullmatch("[iu](8|16|32|64)|fp32", kind):
        raise ArtifactError(f"arguments of type {kind} are not supported in a bundle")
    return int(kind.lstrip("iufp")) // 8


def _by_16(attributes: Any) -> bool:
    return any(name == "tt.divisibility" and value % 16 == 0 for name, value in attributes)


def _parameters(symbol: str, ptx: str) -> list[tuple[int, bool]]:
    """(bytes, whether the kernel reads it) of every parameter that the PTX declares."""
    found = re.findall(rf"\.param \.[usbf](\d+)[^\n]*? {symbol}_param_(\d+)", ptx)
    assert [int(index) for _, index in found] == list(range(len(found))), found
    return [
        (int(bits) // 8, len(re.findall(rf"\b{symbol}_param_{index}\b", ptx)) > 1)
        for bits, index in found
    ]


def _only(pattern: str, ptx: str) -> str:
    (found,) = re.findall(pattern, ptx, re.MULTILINE)
    return str(found)
