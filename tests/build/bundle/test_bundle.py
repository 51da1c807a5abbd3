"""Bundles of ``build --op``: the manifest is true of the cubin, and what the loader computes is the host's.

SASS is looked at with cuobjdump. The launch side is the real one, on tensors without
memory. Both comparisons are shown manifests that they must refuse.
"""

import json
import pathlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.bundles import (
    ARCHES,
    EXTRA,
    INNER,
    LIMIT,
    ONE_OF_EACH,
    SHAPES,
    Shape,
    launched_on_host,
    manifest_of,
    splits_of,
)
from interlace import aot
from interlace.cli.main import run
from interlace.kernels import bundle_formulas, launch_formulas
from interlace.kernels.bundle_formulas import LaunchValues
from interlace.runtime.core.launch import outside
from interlace.runtime.tuning.configuration import gpu_default
from interlace.tools import bundle
from interlace.tools.bundle import OPS, kernels
from interlace.tools.catalogue.build import BuildReport
from interlace.tools.catalogue.catalogue import Entry
from tiers import few, thorough

# -- the manifest and the cubin ----------------------------------------------------------------

KERNELS = [
    (op, arch, kernel)
    for op, arches in ARCHES.items()
    for arch in map(str, arches)
    for kernel in (*kernels(op), *(["finish_kernel"] if OPS[op].finished else []))
]
SHARED_MEMORY = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}


def cuobjdump(option: str, cubin: pathlib.Path) -> str:
    import triton

    command = [triton.knobs.nvidia.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def differences(facts: dict[str, Any], cubin: pathlib.Path) -> list[str]:
    elf, usage = cuobjdump("-elf", cubin), cuobjdump("-res-usage", cubin)
    info = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", elf)
    in_cubin = sorted(tuple(int(number, 16) for number in line) for line in info)
    in_manifest = [(i, a["offset"], a["bytes"]) for i, a in enumerate(facts["arguments"])]
    (symbol,) = re.findall(r"^ Function (\w+):", usage, re.MULTILINE)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    threads = re.search(r"EIATTR_REQNTID\n.*\n\s*Value:\s*0x(\w+) 0x1 0x1", elf)
    sizes = {"SHARED": facts["shared_memory"]["static"], "STACK": facts["stack_bytes"]}
    pairs = {
        "arguments": (in_manifest, in_cubin),
        "symbol": (facts["symbol"], symbol),
        "target": (facts["target"], "sm_" + re.findall(r"\bsm=(\w+)", elf)[0]),
        "resources": ({"REG": facts["registers"], **sizes}, used),
        "threads": (facts["threads"], int(threads[1], 16) if threads else None),
    }
    return [f"{name}: {a} is not {b}" for name, (a, b) in pairs.items() if a != b]


@pytest.mark.parametrize(
    ("op", "arch", "kernel"), few(KERNELS, *(each for each in KERNELS if each[:2] in ONE_OF_EACH))
)
def test_manifest_is_true_of_the_cubin(
    op: str, arch: str, kernel: str, bundles: dict[str, pathlib.Path]
) -> None:
    facts = manifest_of(bundles[op])["arches"][arch]["kernels"][kernel]
    assert differences(facts, bundles[op] / facts["cubin"]["file"]) == []
    assert sum(facts["shared_memory"].values()) <= SHARED_MEMORY[arch]
    assert facts["symbol"] in (bundles[op] / facts["ptx"]["file"]).read_text()
    assert facts["registers"] * facts["threads"] <= 65536, "one program has to fit"


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["arguments"].pop(3),
        lambda facts: facts["arguments"][2].update(bytes=2),  # no argument has 2
        lambda facts: facts.update(symbol="all_gather_kernel"),
        lambda facts: facts.update(target="sm_80"),
        lambda facts: facts.update(threads=128),
        lambda facts: facts["shared_memory"].update(static=0),
    ],
)
def test_control_a_false_manifest_is_seen(
    change: Callable[[dict[str, Any]], None], bundles: dict[str, pathlib.Path]
) -> None:
    path = bundles["all_gather_matmul"]
    facts = manifest_of(path)["arches"]["90"]["kernels"]["all_gather_matmul_kernel"]
    change(facts)
    assert len(differences(facts, path / facts["cubin"]["file"])) == 1


@thorough
@pytest.mark.parametrize("arch", ["80"])
@pytest.mark.parametrize(("op", "inner"), [("all_gather_matmul", 16), ("matmul_all_reduce", 1)])
def test_divisibility_is_that_of_the_build(
    op: str, inner: int, arch: str, bundles: dict[str, pathlib.Path]
) -> None:
    facts = manifest_of(bundles[op])["arches"][arch]["kernels"][f"{op}_kernel"]
    divisible = {a["name"]: a["divisible_by"] for a in facts["arguments"]}
    assert {divisible[name] for name in ("K", "input_stride")} == {inner}
    assert {divisible[name] for name in ("N", "weight_stride_k", "input_ptr")} == {16}
    assert divisible["rank"] == 1


def test_contracts_are_the_docstrings(bundles: dict[str, pathlib.Path]) -> None:
    from interlace.kernels import slots
    from interlace.kernels.collectives import reduction

    contracts = manifest_of(bundles["all_reduce"])["contracts"]
    # "as reduce_scatter_kernel": what a text refers to is there too
    assert set(contracts) == {"all_reduce_kernel", "reduce_scatter_kernel", "finish_kernel"}
    for kernel, module in (("reduce_scatter_kernel", reduction), ("finish_kernel", slots)):
        text = " ".join(getattr(module, kernel).fn.__doc__.split())
        assert f"Ordering: {contracts[kernel]['ordering']} Example:" in text


def quick_or_not(op: str) -> Any:
    return () if (op, "90") in ONE_OF_EACH else thorough


# -- the loader and the host -------------------------------------------------------------------

CASES = [
    pytest.param(
        op, str(arches[-1]), shape, id=f"{op} {len(shape.rows)} ranks", marks=quick_or_not(op)
    )
    for op, arches in ARCHES.items()
    for shape in SHAPES
    # every rank takes something of every other where all have some
    if min(shape.rows) or not ("attention" in op or op == "all_to_all_matmul")
]


def host_differences(manifest: dict[str, Any], arch: str, shape: Shape) -> list[str]:
    op, facts = manifest["op"], manifest["arches"][arch]
    dtype = getattr(torch, manifest["options"]["dtype"])
    default = gpu_default(int(arch), dtype, 4096, shape.columns, INNER.get(op, 4096))
    configuration = replace(default, **manifest["options"]["overrides"])
    for rank in range(len(shape.rows)):
        group = launched_on_host(op, shape, rank, configuration)
        assert tuple(launch.name for launch in group.launches) == kernels(op)
        given = [outside(launch.arguments) for launch in group.launches]
        # the host takes fewer copiers where there is little to send
        sent = {"COPIERS": given[0].get("COPIERS")}
        constants = {name: sent.get(name, value) for name, value in facts["constants"].items()}
        values: dict[str, Any] = {"rank": rank, "world_size": len(shape.rows), "resident": LIMIT}
        values |= {"rows": shape.rows} if "rows" in manifest["values"] else {}
        values |= {"splits": splits_of(op, shape.rows)} if "splits" in manifest["values"] else {}
        values |= {name: value for name, value in EXTRA.items() if name in manifest["values"]}
        for arguments in given:
            numbers = {name: value for name, value in arguments.items() if type(value) is int}
            known = {*manifest["quantities"], *constants}
            values |= {name: each for name, each in numbers.items() if name not in known}
        computed = LaunchValues(op, values, constants)
        pairs: dict[str, tuple[Any, Any]] = {}
        for layout in group.layouts:
            pairs["slots"] = computed.slots, layout.slots
            pairs["data_bytes"] = computed.data_bytes, layout.nbytes
        for launch, arguments in zip(group.launches, given, strict=True):
            kernel = facts["kernels"][launch.name]
            baked = {**kernel["constants"], **(sent if "COPIERS" in kernel["constants"] else {})}
            pairs["threads"] = kernel["threads"], 32 * launch.num_warps
            pairs |= {name: (baked[name], arguments.get(name)) for name in baked}
            grid = list(launch.grid) if isinstance(launch.grid, tuple) else [launch.grid]
            found = computed.value(launch.name)
            pairs["grid"] = (found if isinstance(found, list) else [found]), grid
            for argument, table in manifest["tables"].items():
                if argument in arguments:
                    flat = [value for line in computed.value(table) for value in line]
                    pairs[argument] = flat, arguments[argument].view(-1).tolist()
            there = {name for name, value in arguments.items() if value is not None}
            for argument in {*manifest["quantities"], *OPS[op].constants} & there:
                pairs[argument] = computed.value(argument), arguments[argument]
            if wrong := [f"{name}: {a} is not {b}" for name, (a, b) in pairs.items() if a != b]:
                return wrong
    return []


@pytest.mark.parametrize(("op", "arch", "shape"), CASES)
def test_the_loader_computes_what_the_host_launches(
    op: str, arch: str, shape: Shape, bundles: dict[str, pathlib.Path]
) -> None:
    assert host_differences(manifest_of(bundles[op]), arch, shape) == []


FALSE: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("all_gather_matmul", "slots"): lambda v: v.num_chunks + 1,
    ("all_gather_matmul", "data_bytes"): lambda v: sum(v.rows) * v.K,
    ("all_gather_matmul", "tiles"): lambda v: v.tiles_n,
    ("all_gather_matmul", "num_sends"): lambda v: len(v.sends) + 1,
    ("all_gather_matmul", "sends"): lambda v: launch_formulas.send_lines(
        0, v.world_size, v.rows, v.chunk_size
    ),
    ("all_gather_matmul", "chunks"): lambda v: launch_formulas.chunk_lines(
        v.rank, v.world_size, v.rows, v.chunk_size, v.BLOCK_M, 1
    ),
    ("dispatch", "facts_byte"): lambda v: v.x_byte,
    ("context_parallel_attention", "parts"): lambda v: launch_formulas.key_part_lines(
        0, v.world_size, v.rows, v.chunk_size
    ),
    ("low_latency_norm", "low_latency_norm_kernel"): lambda v: v.tokens + 1,
}


@pytest.mark.parametrize(
    ("op", "name"), [pytest.param(*each, marks=quick_or_not(each[0])) for each in FALSE]
)
def test_control_a_false_function_is_seen(
    op: str, name: str, bundles: dict[str, pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bundle_formulas.OPS[op], name, FALSE[op, name])
    shape = Shape((700, 0, 129), 272) if op == "all_gather_matmul" else SHAPES[0]
    assert host_differences(manifest_of(bundles[op]), str(ARCHES[op][-1]), shape) != []


@thorough
def test_control_a_false_constant_is_seen(bundles: dict[str, pathlib.Path]) -> None:
    manifest = manifest_of(bundles["low_latency_norm"])
    manifest["arches"]["90"]["constants"]["words_offset"] += 8
    assert host_differences(manifest, "90", SHAPES[0]) != []


# -- the command -------------------------------------------------------------------------------


def test_a_format_packs_the_columns_of_the_weight(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def no_reports(entries: list[Entry], **options: Any) -> list[BuildReport]:
        names.extend(entry.name for entry in entries)
        return [BuildReport(name="not compiled", arch=80, default=True, error="RuntimeError: no")]

    monkeypatch.setattr(bundle, "build", no_reports)
    options = ["--op", "matmul_all_reduce", "--format", "mxfp8", "--arch", "80"]
    assert run(["build", *options, "--out", str(tmp_path)]) == 1
    assert any(" nk" in name and "mxfp8" in name for name in names), names


def test_one_kernel_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "--arch", "90", "--kernel", "publish", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["name"].split()[0] == "publish" and facts["arch"] == 90


def test_command_builds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "bundle"
    options = ["--op", "all_reduce", "--arch", "90,90", "--dtype", "float16", "--json"]
    assert run(["build", *options, "--out", str(out)]) == 0
    assert [one["arch"] for one in json.loads(capsys.readouterr().out)] == [90, 90]
    assert aot.load(out, arch=90).manifest["options"]["dtype"] == "float16"
    names = {"manifest.json", "load.py"}
    for kernel in ("all_reduce_kernel", "finish_kernel"):
        names |= {f"{kernel}.sm_90.cubin", f"{kernel}.sm_90.ptx"}
    assert {path.name for path in out.iterdir()} == names


def test_nothing_is_written_of_a_bad_kernel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = BuildReport(name="all_reduce fp32", arch=90, default=True, error="RuntimeError: no")
    monkeypatch.setattr(bundle, "build", lambda entries, **options: [report])
    assert run(["build", "--op", "all_reduce", "--arch", "90", "--out", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())
