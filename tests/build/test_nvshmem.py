"""Kernels with puts are linked with NVSHMEM's device library, for GPUs that this machine does not have.

The library comes with the test extra, so a test without it fails. INTERLACE_WITHOUT_NVSHMEM=1 skips these
tests, and so does a machine for which the library is not made. The tests without the library still run.
"""

import ast
import io
import json
import os
import pathlib
import platform
import re
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from cases.builds import compiled
from interlace.cli.commands import build as command
from interlace.runtime.compiler import nvshmem_library
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.tools.catalogue.build import BuildReport
from interlace.tools.catalogue.catalogue import ARCHES, Entry, between_nodes, linked_entries
from mutants.mutations import importable
from tiers import thorough

WITHOUT = "INTERLACE_WITHOUT_NVSHMEM"
SERVED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
HERE = pathlib.Path(__file__).parent
JSON = command.BuildOptions((90,), full=True, json=True)
TABLE = HERE.parents[1] / "kernels/node_puts.py"
EVERYTHING = Entry(
    "nvshmem_kernels",
    "every_function_kernel",
    "",
    90,
    {"address_ptr": "*i64", "nbytes": "i32", "pe": "i32", "LINKED": "constexpr"},
    {"LINKED": True},
    num_warps=1,
    default=False,
)
MISSING = Entry(
    "nvshmem_kernels",
    "missing_function_kernel",
    "",
    90,
    {"address_ptr": "*i64", "LINKED": "constexpr"},
    {"LINKED": True},
)
DRIVER = {"vprintf", "__assertfail"}  # every CUDA driver resolves these when it loads a module


def library(arch: int) -> Any:
    try:
        return linked_entries(arch)[0].libraries
    except PlaceUnavailableError as error:
        if os.environ.get(WITHOUT) == "1" or not SERVED:
            pytest.skip(f"NOTHING IS LINKED: {error}")
        pytest.fail(f"{error}\nThe test extra brings it; {WITHOUT}=1 skips what needs it.")


def built(entries: list[Entry], tmp_path: pathlib.Path) -> tuple[list[BuildReport], list[str]]:
    with importable(HERE):
        return compiled(entries, tmp_path)


@thorough
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_that_put_link(arch: int, tmp_path: pathlib.Path) -> None:
    """All declared symbols are defined, and the host finds the place for the state of NVSHMEM."""
    library(arch)
    entries = linked_entries(arch)
    reports, texts = built(entries, tmp_path)
    assert {entry.kernel for entry in entries} == {each.kernel for each in between_nodes(arch)}
    for report, ptx in zip(reports, texts, strict=True):
        assert report.problems() == [], report.name
        assert set(re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.MULTILINE)) <= DRIVER
        assert not re.search(r"^\.extern \.(global|const)", ptx, re.MULTILINE)
        assert re.search(r"^\.visible \.(const|global) .*\bnvshmemi_device_state_d\[", ptx, re.M)


@thorough
def test_every_function_of_the_table_links(tmp_path: pathlib.Path) -> None:
    (report,), (ptx,) = built([replace(EVERYTHING, libraries=library(90))], tmp_path)
    assert report.problems() == []
    assert "nvshmemi_device_state_d" in ptx
    named = {
        node.name for node in ast.parse(TABLE.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    called = (HERE / "nvshmem_kernels.py").read_text()
    assert all(f"nvshmem.{name}(" in called for name in named if not name.startswith("_"))


def test_a_symbol_that_is_left_over_fails_the_build(tmp_path: pathlib.Path) -> None:
    entries = [MISSING, replace(EVERYTHING, libraries=())]
    reports, _ = built(entries, tmp_path)
    for report in reports:
        (problem,) = report.problems()
        assert problem.startswith("does not compile: ") and "nresolved" in problem, problem


# -- finding the library -------------------------------------------------------------------------------


def folder_with(tmp_path: pathlib.Path, *names: str) -> str:
    for name in names:
        (tmp_path / name).write_bytes(b"BC")
    return str(tmp_path)


def test_a_file_for_all_or_one_for_each(tmp_path: pathlib.Path) -> None:
    folder = folder_with(tmp_path, "libnvshmem_device_sm_90.bc")
    assert nvshmem_library.device_library(90, folder).endswith("libnvshmem_device_sm_90.bc")
    with pytest.raises(PlaceUnavailableError, match=r"for sm_80 .* is not in .*name its folder"):
        nvshmem_library.device_library(80, folder)
    folder_with(tmp_path, "libnvshmem_device_sm_75.bc")
    for arch, nearest in ((80, 75), (90, 90), (100, 90)):
        assert nvshmem_library.device_library(arch, folder).endswith(f"_sm_{nearest}.bc")
    folder_with(tmp_path, "libnvshmem_device.bc")
    assert nvshmem_library.device_library(80, folder).endswith("libnvshmem_device.bc")


def looked_for_in(folder: str) -> Any:
    return mock.patch.dict(os.environ, {"NVSHMEM_LIB_DIR": folder})


def test_the_variable_that_torch_reads(tmp_path: pathlib.Path) -> None:
    with looked_for_in(folder_with(tmp_path, "libnvshmem_device.bc")):
        assert nvshmem_library.device_library(90) == str(tmp_path / "libnvshmem_device.bc")
    with (
        looked_for_in(str(tmp_path / "elsewhere")),
        pytest.raises(PlaceUnavailableError, match="elsewhere"),
    ):
        nvshmem_library.device_library(90)


def test_the_command_links_what_it_finds_and_says_what_it_does_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Entry] = []

    def collect(wanted: list[Entry], on_report: object) -> list[BuildReport]:
        seen.extend(wanted)
        return []

    monkeypatch.setattr(command, "build_entries", collect)
    out = io.StringIO()
    folder = folder_with(tmp_path, "libnvshmem_device.bc")
    assert command.build(Console(file=out), replace(JSON, nvshmem=folder)) == 0
    names = {entry.name for entry in seen if entry.libraries}
    assert names == {entry.name for entry in between_nodes(90, "nvshmem")}
    seen.clear()
    out = io.StringIO()
    with looked_for_in(str(tmp_path / "elsewhere")):
        assert command.build(Console(file=out), JSON) == 0
    assert not [entry for entry in seen if entry.libraries] and json.loads(out.getvalue()) == []
    assert "not linked with NVSHMEM" in capsys.readouterr().err
    with pytest.raises(PlaceUnavailableError):
        command.build(Console(file=out), replace(JSON, nvshmem=str(tmp_path / "elsewhere")))
