"""What is built ahead of a GPU of the collectives by the switch, and of those whose words carry flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from interlace.runtime.compiler.entry import Constant, Entry

_SHARED = ("rank", "world_size")
UNITS = {4: "", 2: "by 2 bytes", 1: "by bytes"}
"""What a low-latency kernel's unit, in bytes, is called in the name of an entry."""


def by_the_switch(arch: int, dtype: str, block: int, num_warps: int) -> Iterator[Entry]:
    """The kernels of ``kernels/collectives/multimem.py`` for ``dtype``, from 9.0 on."""
    if arch < 90:
        return
    pointers = {"peers_ptr": "*i64", "input_ptr": f"*{dtype}", "output_ptr": f"*{dtype}"}
    integers = dict.fromkeys((*_SHARED, "blocks", "slot_offset", "data_offset"), "i32")
    own: dict[str, dict[str, str]] = {
        "all_gather": {"parts_ptr": "*i64"},
        "reduce_scatter": {"parts_ptr": "*i64", "sums_offset": "i32"},
        "all_reduce": {"elements": "i32", "sums_offset": "i32"},
    }
    for op, more in own.items():
        aligned = [*pointers, "data_offset", *(name for name in more if name != "elements")]
        yield Entry(
            "interlace.kernels.collectives.multimem",
            f"multimem_{op}_kernel",
            dtype,
            arch,
            {**pointers, **integers, "multicast": "i64", **more},
            {"BLOCK": block, "MULTIMEM": True},
            tuple(aligned),
            num_warps,
        )


def low_latency(arch: int, dtypes: Sequence[str]) -> Iterator[Entry]:
    """The kernels of ``kernels/collectives/low_latency.py``.

    Their polls are relaxed, because what they look at is the data itself: nothing has to be acquired.
    """
    integers = (*_SHARED, "units", "epochs_offset", "words_offset")
    types = {"peers_ptr": "*i64", **dict.fromkeys(integers, "i32")}

    def entry(op: str, variant: str, unit: int, **more: Constant) -> Entry:
        pointers = ("tensor_ptr",) if op == "broadcast" else ("input_ptr", "output_ptr")
        own = dict.fromkeys(pointers, f"*i{8 * unit}") | (
            {"root": "i32"} if op == "broadcast" else {}
        )
        return Entry(
            "interlace.kernels.collectives.low_latency",
            f"low_latency_{op}_kernel",
            " ".join(filter(None, (variant, UNITS[unit]))),
            arch,
            {**types, **own},
            {"UNIT": unit, "WORDS": 256, "COMPILED": True, **more},
            ("peers_ptr", "epochs_offset", "words_offset", *(pointers if unit == 4 else ())),
            num_warps=8,
            ignore=("weak poll",),
            max_registers=96,
        )

    for unit in UNITS:
        yield entry("all_gather", "", unit)
        yield entry("broadcast", "", unit)
    for dtype in dtypes:
        yield entry("all_reduce", dtype, 4, DTYPE=dtype, AVERAGE=False)
    yield entry("all_reduce", "bf16 average", 4, DTYPE="bf16", AVERAGE=True)
    yield entry("all_reduce", "bf16", 2, DTYPE="bf16", AVERAGE=False)
