"""Names that the tools have: targets, cases, the catalogue, ops; and commands that are refused.

``lists.txt`` has the names; what is gone from a line is no longer checked, built or measured.

    python tests/sim/cli/test_lists.py      writes the file anew
"""

import contextlib
import pathlib
import shlex
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import interlace
from interlace.benchmark.fused import ByRows
from interlace.benchmark.requests import FUSED, OPS, TUNED
from interlace.benchmark.tune import by_name
from interlace.cli import main
from interlace.cli.commands.check import WORLDS, cases
from interlace.tools.catalogue.catalogue import ARCHES, entries
from interlace.tools.targets import TARGETS

FILE = pathlib.Path(__file__).with_name("lists.txt")


def of_verify() -> Iterator[str]:
    for name, target in TARGETS.items():
        quick = "all" if target.quick is None else ", ".join(target.quick) or "none"
        yield f"{name}: {', '.join(target.variants)}; quick: {quick}; {' '.join(target.kernels)}"


def of_catalogue() -> Iterator[str]:
    """Return entries by kernel, dtype and architectures, with a star if they are not default ones."""
    found: dict[str, list[str]] = {}
    for arch in ARCHES:
        for each in entries(arch):
            found.setdefault(each.name, []).append(f"{arch}{'' if each.default else '*'}")
    alike: dict[str, list[str]] = {}
    for name, arches in found.items():
        words = name.split()
        first, rest = " ".join(words[:2]), " ".join(words[2:])
        alike.setdefault(f"{first}: {' '.join(arches)}", []).append(rest or "plain")
    for about, rests in alike.items():
        yield f"{about}; {', '.join(rests)}"


def of_check(device: str) -> Iterator[str]:
    """Return cases without their dtypes and ranks, and then these."""
    found: dict[str, dict[str, list[str]]] = {}
    for case in cases(device):
        about = f"{case.op}, {case.variant}, {case.shape}"
        how = " ".join(f"{name}={value}" for name, value in sorted(case.overrides.items()))
        line = f"{about}; {case.branch}; {how}; {' '.join(case.kernels)}"
        ranks = found.setdefault(line, {}).setdefault(case.dtype, [])
        ranks.append(str(case.world_size))
    for line, by_dtype in sorted(found.items()):
        each = [f"{dtype} {' '.join(sorted(ranks))}" for dtype, ranks in sorted(by_dtype.items())]
        yield f"{line}; {', '.join(each)} of {len(WORLDS[device])}"


def of_bench() -> Iterator[str]:
    for name, kind in OPS.items():
        facts = [", ".join(kind.algorithms), " ".join(kind.sizes), str(kind.defaults)]
        facts += [" ".join(kind.settings)] if issubclass(kind, ByRows) else []
        yield "; ".join([f"{name}: {facts[0]}", *facts[1:]])


def of_tune() -> Iterator[str]:
    yield f"if none is named: {', '.join(FUSED)}"
    for name, kind in TUNED.items():
        for place in ("sim", "shm", "cuda") if name not in FUSED else ():
            tried = "; ".join(each.describe() for each in by_name(place, kind))
            yield f"{name}, {place}: {tried}"


LISTS = {
    "verify": of_verify,
    "catalogue": of_catalogue,
    "check, cpu": lambda: of_check("cpu"),
    "check, cuda": lambda: of_check("cuda"),
    "bench": of_bench,
    "tune": of_tune,
}


def written() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in FILE.read_text("ascii").splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            next(reversed(found.values())).append(line)
    return found


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_that_of_the_file(name: str) -> None:
    assert list(LISTS[name]()) == written()[name]


if __name__ == "__main__":
    texts = [line for name, made in LISTS.items() for line in (f"# {name}", *made())]
    FILE.write_text("\n".join(texts) + "\n", encoding="ascii")


TESTS = pathlib.Path(__file__).parents[2]
PLACES = {
    "KERNELS": TESTS / "multi/cli/bench_kernels.py",
    "FOLDER": TESTS / "multi/cli",
    "EXAMPLE": TESTS.parent / "docs/examples/one_shot_all_reduce.py",
}
LINES = pathlib.Path(__file__).with_name("refusals.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_it_is_refused_before_anything_begins(
    line: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, text = line.partition(" => ")
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    for name, path in PLACES.items():
        command = command.replace(name, str(path))
    with (
        contextlib.chdir(tmp_path),
        mock.patch.object(interlace, "run", side_effect=AssertionError("a rank has started")),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(main, "need_interpreter"),
    ):
        try:
            assert main.run(shlex.split(command)) == 2
        except SystemExit as ended:
            assert ended.code == 2
    printed = capsys.readouterr()
    assert text and text in " ".join(printed.err.split()) and not printed.out
    assert not [*tmp_path.iterdir()]
