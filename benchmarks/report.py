"""Tables and plots for people, from result files only: ``python benchmarks/report.py [--plots]``.

In ``README.md`` and ``docs/performance.md`` a table stands between ``<!-- table KIND FILE -->`` and
``<!-- end -->``; this rewrites all of them. Kinds::

    backend   torch_backend: interlace, gloo, OpenMPI and copies, by op and size
    dispatch  torch_backend in a world of one
    fused     all_gather_matmul, matmul_reduce_scatter against gloo + torch.mm
    gpu       the records of gpu.py
    loops     loop_counts.py: what a round of some loops does, before and now

``--plots`` draws bandwidth over size for each backend table, and overlap for each gpu table, into
``docs/images``. ``--check`` writes nothing and fails if a table is not what its file says.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
IMAGES = ROOT / "docs" / "images"
MARK = re.compile(r"(<!-- table (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BACKEND_OPS = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SHOWN_BYTES = (0, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

Document = dict[str, Any]
Rows = Iterator[list[str]]


def size_text(nbytes: int) -> str:
    """4096 is "4 KiB"; nothing for 0."""
    if not nbytes:
        return ""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def backend(document: Document) -> str:
    """One line per world size, op and size."""

    def rows() -> Rows:
        found = [m for m in document["measurements"] if m["op"] in BACKEND_OPS]
        found.sort(key=lambda m: (m["world_size"], BACKEND_OPS.index(m["op"]), m["shape"]["bytes"]))
        for m in found:
            nbytes, times = m["shape"]["bytes"], m["microseconds"]
            if nbytes not in SHOWN_BYTES:
                continue
            ours, mpi = times["interlace"], times.get("OpenMPI")
            rates = [
                f"{nbytes / times[name] / 1e3:.1f}" if nbytes >= 1 << 20 and name in times else ""
                for name in ("interlace", "copy_", "streamed copy")
            ]
            yield [
                str(m["world_size"]), m["op"], size_text(nbytes), _microseconds(ours),
                f"{times['gloo'] / ours:.1f}",
                "" if mpi is None else _microseconds(mpi),
                "" if mpi is None else f"{ours / mpi:.2f}",
                *rates,
            ]  # fmt: skip

    head = [
        "ranks", "op", "bytes", "interlace, us", "times as fast as gloo", "OpenMPI, us",
        "time relative to OpenMPI", "GB/s", "`copy_` GB/s",
        "streamed copy GB/s",
    ]  # fmt: skip
    return _table(head, rows())


def dispatch(document: Document) -> str:
    """One line per op in a world of one."""
    found = [m for m in document["measurements"] if m["world_size"] == 1]
    rows = (
        [
            m["op"].split(": ")[1],
            f"{m['microseconds']['interlace']:.1f}",
            f"{m['microseconds']['gloo']:.1f}",
        ]
        for m in found
    )
    return _table(["op", "interlace, us", "gloo, us"], rows)


def fused(document: Document) -> str:
    """One line per op, world size and shape; milliseconds, in brackets times as fast as gloo."""
    own = ("pipelined", "unfused", "torch.mm alone")

    def rows() -> Rows:
        for m in document["measurements"]:
            times = m["microseconds"]
            if not set(own) <= set(times):
                continue
            gloo = times[m["baseline"]]
            cells = [f"{each / 1e3:.1f}" for each in (gloo, *(times[name] for name in own))]
            for index, name in enumerate(own[:2], start=1):
                cells[index] += f" ({gloo / times[name]:.2f})"
            shape = " x ".join(str(m["shape"][each]) for each in "mnk")
            yield [f"`{m['op']}`", str(m["world_size"]), shape, *cells]

    head = [
        "op", "ranks", "M x N x K", "gloo and `torch.mm`", "pipelined", "unfused",
        "`torch.mm` alone",
    ]  # fmt: skip
    return _table(head, rows())


def gpu(document: Document) -> str:
    """One line per record: medians in microseconds, and what follows from them."""
    rows = (
        [
            record["part"],
            record["case"],
            ", ".join(
                f"{name} {_microseconds(t['median'])}" for name, t in record["microseconds"].items()
            )
            or record.get("error", "wrong result"),
            ", ".join(f"{name} {value:.3f}" for name, value in record["derived"].items()),
        ]
        for record in document["records"]
    )
    return _table(["part", "case", "us", "derived"], rows)


def loops(document: Document) -> str:
    """A line per loop and architecture, of the kernels as they were and as they are."""
    counts = ("instructions", "tensor_maps", "barriers", "wgmma_waits", "loads_in_flight")

    def rows() -> Rows:
        old, new = document["before"]["loops"], document["loops"]
        both = [("both" if loop in new else "before", loop) for loop in old]
        both += [("now", loop) for loop in new if loop not in old]
        kernels = list(dict.fromkeys(loop["kernel"] for _, loop in both))
        both.sort(key=lambda pair: (kernels.index(pair[1]["kernel"]), pair[1]["arch"]))
        for when, loop in both:
            name = loop["where"].split(" in ")[-1]
            numbers = [loop["registers"], *(loop[each] for each in counts), loop["loaded_bytes"]]
            yield [loop["kernel"], f"sm_{loop['arch']}", when, f"`{name}`", *map(str, numbers)]

    head = [
        "kernel", "chip", "", "loop of", "registers", "instructions", "tensor maps", "barriers",
        "wgmma waits", "loads in flight", "bytes loaded",
    ]  # fmt: skip
    return _table(head, rows())


KINDS: dict[str, Callable[[Document], str]] = {
    "backend": backend,
    "dispatch": dispatch,
    "fused": fused,
    "gpu": gpu,
    "loops": loops,
}


def rewritten(text: str) -> str:
    """``text`` with every table made again from its file. Raises ValueError for an unknown kind."""

    def table(match: re.Match[str]) -> str:
        mark, kind, name, _, end = match.groups()
        if kind not in KINDS:
            raise ValueError(f"table kind must be one of {', '.join(KINDS)}, got {kind!r}")
        document = json.loads((RESULTS / name).read_text())
        return f"{mark}\n{KINDS[kind](document)}\n{end}"

    return MARK.sub(table, text)


def plots(page: str) -> list[Path]:
    """One image for each table of ``page`` that has one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for _, kind, name, _, _ in MARK.findall(page):
        document = json.loads((RESULTS / name).read_text())
        path = IMAGES / f"{kind}-{Path(name).stem}.png"
        if kind == "backend":
            figure = _bandwidths(pyplot, document)
        elif kind == "gpu":
            figure = _overlaps(pyplot, document)
        else:
            continue
        IMAGES.mkdir(exist_ok=True)
        figure.savefig(path, dpi=110)
        made.append(path)
    return made


def _bandwidths(pyplot: Any, document: Document) -> Any:
    worlds = sorted({m["world_size"] for m in document["measurements"]} - {1})
    ops = BACKEND_OPS[1:]
    figure, axes = pyplot.subplots(
        len(worlds), len(ops), figsize=(15, 6), sharex=True, sharey=True, layout="constrained"
    )
    for row, world_size in zip(axes, worlds, strict=True):
        for axis, op in zip(row, ops, strict=True):
            found = [
                m
                for m in document["measurements"]
                if m["op"] == op and m["world_size"] == world_size
            ]
            sizes = [m["shape"]["bytes"] for m in found]
            for name in ("interlace", "gloo", "OpenMPI", "copy_", "streamed copy"):
                if all(name in m["microseconds"] for m in found):
                    rates = [m["shape"]["bytes"] / m["microseconds"][name] / 1e3 for m in found]
                    axis.loglog(sizes, rates, label=name, marker="o", markersize=3)
            axis.set_title(f"{op}, {world_size} ranks", fontsize=9)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("bytes of a rank's input")
    figure.supylabel("GB/s: bytes over time")
    return figure


def _overlaps(pyplot: Any, document: Document) -> Any:
    found = [r for r in document["records"] if "overlap" in r["derived"]]
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.3 * len(found)), layout="constrained")
    axis.barh([r["case"] for r in found], [r["derived"]["overlap"] for r in found])
    axis.set_xlabel("fraction of overlap: (matmul + transfer - fused) / shorter one")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check all pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plots", action="store_true", help="draw as well; needs matplotlib")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args(arguments)
    stale = []
    for page in PAGES:
        old = page.read_text()
        new = rewritten(old)
        if new != old:
            stale.append(page.name)
            if not options.check:
                page.write_text(new)
        if options.plots:
            for path in plots(new):
                print(f"drawn: {path.relative_to(ROOT)}")
    if options.check and stale:
        print(f"not what the result files say: {', '.join(stale)}; run python benchmarks/report.py")
        return 1
    print(f"rewritten: {', '.join(stale) or 'nothing, all tables are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
