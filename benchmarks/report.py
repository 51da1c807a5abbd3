"""Tables and plots for people, from result files only: ``python benchmarks/report.py [--plots]``.

In ``README.md`` and in four pages of docs/reference (see ``PAGES``), a table is between ``<!-- table KIND
FILE -->`` and ``<!-- end -->``. This command rewrites all of them; ``KINDS`` has the kinds.

``--plots`` draws time over size for each table of the backend and of messages, and overlap for each gpu
table, into ``docs/images``. ``--check`` writes nothing and fails if a table is not what its file says.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.benchmark.figures import format_size

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    *(ROOT / f"docs/reference/{name}.md" for name in ("measurements", "measurements-hosts")),
    *(ROOT / f"docs/reference/{name}.md" for name in ("loop-counts", "rows-in-flight")),
)
IMAGES = ROOT / "docs" / "images"
MARK = re.compile(r"(<!-- table (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BACKEND_OPS = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MESSAGE_OPS = ("exchange", "exchange, 8 in flight", "exchange, computing", "send", "batch", "ring")
SHOWN_BYTES = (0, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

Document = dict[str, Any]
Rows = Iterator[list[str]]


def size_text(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else ""


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _pivot(
    head: list[str], cells: Mapping[tuple[Any, ...], Mapping[Any, str]], columns: Any
) -> str:
    """A line per key of ``cells``, with a column for each of ``columns``, by its title."""
    rows = (
        [*map(str, key), *(line.get(column, "") for column in columns)]
        for key, line in cells.items()
    )
    return _table([*head, *columns.values()], rows)


def backend(document: Document) -> str:
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


def messages(document: Document) -> str:
    """One line per world size and op, of all sizes: times as fast as gloo, time relative to OpenMPI."""
    found: dict[tuple[Any, ...], dict[int, str]] = {}
    for m in document["measurements"]:
        if "in flight" in m["shape"]:
            times = m["microseconds"]
            ours, mpi = times["interlace"], times.get("OpenMPI")
            beside = f"{times['gloo'] / ours:.2f}" + ("" if mpi is None else f", {ours / mpi:.2f}")
            cells = found.setdefault((m["world_size"], m["op"]), {})
            cells[m["shape"]["bytes"]] = f"{_microseconds(ours)} ({beside})"
    sizes = sorted({size for cells in found.values() for size in cells})
    return _pivot(["ranks", "op"], found, {size: size_text(size) for size in sizes})


def crowds(document: Document) -> str:
    """One line per world size, threads and busy loops: milliseconds of a step."""

    def rows() -> Rows:
        found = [m for m in document["measurements"] if "busy loops" in m["shape"]]
        for m in sorted(found, key=lambda m: (m["world_size"], m["shape"]["threads"])):
            times, shape = m["microseconds"], m["shape"]
            numbers = (m["world_size"], shape["threads"], shape["busy loops"])
            yield [
                *map(str, numbers), size_text(shape["bytes"]),
                *(f"{times[name] / 1e3:.1f}" for name in ("interlace", "gloo")),
                f"{times['gloo'] / times['interlace']:.2f}",
            ]  # fmt: skip

    head = ["ranks", "threads", "busy loops", "bytes", "interlace, ms", "gloo, ms", "times as fast"]
    return _table(head, rows())


def hosts(document: Document) -> str:
    """One line per op and size, of all cables and world sizes; times as fast as gloo."""
    found: dict[str, dict[tuple[Any, ...], dict[str, str]]] = {}
    for m in document["measurements"]:
        op, cable, _ = m["op"].split(", ")
        times, column = m["microseconds"], f"{m['world_size']} ranks, {cable}"
        ratio = f"{_microseconds(times['interlace'])} ({times['gloo'] / times['interlace']:.2f})"
        key = op, size_text(m["shape"]["bytes"])
        found.setdefault(op, {}).setdefault(key, {})[column] = ratio
    cells = {key: line for lines in found.values() for key, line in lines.items()}
    columns = dict.fromkeys(name for line in cells.values() for name in line)
    return _pivot(["op", "bytes"], cells, {name: name for name in columns})


def dispatch(document: Document) -> str:
    names = "interlace", "gloo"
    found = [m for m in document["measurements"] if m["world_size"] == 1]
    rows = (
        [m["op"].split(": ")[1], *(f"{m['microseconds'][name]:.1f}" for name in names)]
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
    counts = ("instructions", "tensor_maps", "barriers", "fences", "wgmma_waits", "loads_in_flight")

    def shown(loop: dict[str, Any]) -> tuple[Any, ...]:
        # counts from before fences were counted have no fences
        numbers = [
            loop["registers"],
            *(loop.get(count, 0) for count in counts),
            loop["loaded_bytes"],
        ]
        return loop["kernel"], loop["arch"], loop["where"].split(" in ")[-1], *numbers

    def rows() -> Rows:
        old, new = (
            [shown(loop) for loop in each["loops"]] for each in (document["before"], document)
        )
        both = [("both" if loop in new else "before", loop) for loop in old]
        both += [("now", loop) for loop in new if loop not in old]
        kernels = list(dict.fromkeys(loop[0] for _, loop in both))
        both.sort(key=lambda pair: (kernels.index(pair[1][0]), pair[1][1]))
        for when, (kernel, arch, function, *numbers) in both:
            yield [kernel, f"sm_{arch}", when, f"`{function}`", *map(str, numbers)]

    head = [
        "kernel", "chip", "", "loop of", "registers", "instructions", "tensor maps", "barriers",
        "fences", "wgmma waits", "loads in flight", "bytes loaded",
    ]  # fmt: skip
    return _table(head, rows())


PACKED_STEP = 128  # numbers along k


def packed(document: Document) -> str:
    """A line per format and chip: of all-gather + matmul, and registers and spills of all four ops."""

    def rows() -> Rows:
        by_format: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for loop in document["loops"]:
            by_format.setdefault((loop["kernel"].split()[1], loop["arch"]), []).append(loop)
        for (name, arch), found in by_format.items():
            first = next(each for each in found if each["kernel"].startswith("all_gather_matmul "))
            rounds = PACKED_STEP // first["tile"][-1]
            counts = (
                "instructions", "products", "conversions", "loads", "loaded_bytes", "barriers",
            )  # fmt: skip
            numbers = [rounds * first[count] for count in counts]
            most = [max(each[of] for each in found) for of in ("registers", "spills")]
            tile = f"{' x '.join(map(str, first['tile']))}, {first['warps']} warps"
            yield [name, f"sm_{arch}", tile, *map(str, numbers), *map(str, most)]

    head = [
        "format", "chip", "tile", "instructions", "products", "conversions", "loads", "bytes loaded",
        "barriers", "registers", "spills",
    ]  # fmt: skip
    return _table(head, rows())


def rows_in_flight(document: Document) -> str:
    """A line per kernel, of the first of its variants, and loop, as it was and as it is."""

    def rows() -> Rows:
        both = [("before", row) for row in document["before"]["rows"]]
        both += [("now", row) for row in document["rows"]]
        first: dict[str, str] = {}  # variant of each kernel
        for _, row in both:
            first.setdefault(row["kernel"].split()[0], row["kernel"])
        shown = [pair for pair in both if pair[1]["kernel"] in first.values()]
        shown.sort(key=lambda pair: list(first.values()).index(pair[1]["kernel"]))
        for when, row in shown:
            numbers = ("registers", "threads", "programs", "bytes_of_thread")
            yield [
                row["kernel"], when, f"`{row['function']}`", *(str(row[number]) for number in numbers),
                f"{row['bytes'] / 1024:.0f}", str(row["barriers"]), f"{row['barriers_per_row']:.2f}",
            ]  # fmt: skip

    head = [
        "kernel", "", "loop of", "registers", "threads", "programs of a multiprocessor",
        "bytes on their way, of a thread", "KiB of a multiprocessor", "barriers", "per row",
    ]  # fmt: skip
    return _table(head, rows())


KINDS: dict[str, Callable[[Document], str]] = {
    "backend": backend,  # cpu/torch_backend.py; so is "dispatch"
    "dispatch": dispatch,
    "fused": fused,
    "gpu": gpu,
    "loops": loops,
    "messages": messages,
    "packed": packed,  # loop_counts.py --packed
    "rows": rows_in_flight,
    "crowds": crowds,
    "hosts": hosts,
}
OPS_DRAWN = {"backend": BACKEND_OPS[1:], "messages": MESSAGE_OPS}


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for _, kind, name, _, _ in MARK.findall(page):
        document = json.loads((RESULTS / name).read_text())
        figures = {}
        if kind in OPS_DRAWN:
            figures[kind] = _times(pyplot, document, OPS_DRAWN[kind])
        if kind == "backend":
            figures["bandwidth"] = _times(pyplot, document, OPS_DRAWN[kind], bandwidth=True)
        if kind == "gpu":
            figures[kind] = _overlaps(pyplot, document)
        for title, figure in figures.items():
            path = IMAGES / f"{title}-{Path(name).stem}.png"
            IMAGES.mkdir(exist_ok=True)
            figure.savefig(path, dpi=110)
            made.append(path)
    return made


def _times(pyplot: Any, document: Document, ops: Sequence[str], *, bandwidth: bool = False) -> Any:
    """Time or bandwidth over size, both logarithmic: a row of plots per world size, a column per op."""
    every = [m for m in document["measurements"] if m["op"] in ops]
    worlds = sorted({m["world_size"] for m in every} - {1})
    figure, axes = pyplot.subplots(
        len(worlds), len(ops), figsize=(2.3 * len(ops), 2.2 * len(worlds) + 0.8), sharex=True,
        sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    lines: dict[str, Any] = {}
    for row, world_size in zip(axes, worlds, strict=True):
        for axis, op in zip(row, ops, strict=True):
            found = [m for m in every if m["op"] == op and m["world_size"] == world_size]
            for name in ("interlace", "gloo", "OpenMPI", "copy_", "streamed copy"):
                points = []
                for m in found:
                    nbytes, time = m["shape"]["bytes"], m["microseconds"].get(name)
                    if time is not None:
                        points.append((nbytes, nbytes / time / 1e3 if bandwidth else time))
                style = {"linestyle": ":"} if "copy" in name else {"marker": "o", "markersize": 3}
                if points:
                    (lines[name],) = axis.loglog(
                        *zip(*points, strict=True), label=name, linewidth=1.2, **style
                    )
            axis.set_visible(bool(found))
            axis.set_title(f"{op}, {world_size} ranks", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
    figure.legend(handles=lines.values(), loc="outside upper right", ncols=len(lines), fontsize=8)
    figure.supxlabel("bytes", fontsize=9)
    figure.supylabel("GB/s" if bandwidth else "microseconds", fontsize=9)
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
