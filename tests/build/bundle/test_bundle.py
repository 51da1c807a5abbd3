"""Bundles of ``build --op``: the manifest is true of the cubin, and its formulas are the host's.

SASS is looked at with cuobjdump. The launch side is the real one, on tensors without
memory. Both comparisons are shown manifests that they must refuse.
"""

import json
import pathlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from cases.bundles import ARCHES, manifest_of
from interlace import aot
from interlace.cli.main import run
from interlace.runtime.algorithms import gather_matmul, matmul_reduce, plain
from interlace.runtime.algorithms import norms as normed
from interlace.runtime.algorithms.operands import Linear
from interlace.runtime.compiler.build import BuildReport
from interlace.runtime.compiler.bundle import bundle
from interlace.runtime.core.kernel_arguments import outside
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import HEADER_WORDS, WORD, Layout, SymmetricBuffer, Workspace
from interlace.runtime.numerics import norms
from interlace.runtime.tuning.configuration import Configuration, gpu_default

# -- the manifest and the cubin ----------------------------------------------------------------

KERNELS = [
    (op, arch, kernel)
    for op, arches in ARCHES.items()
    for arch in map(str, arches)
    for kernel in (f"{op}_kernel", "finish_kernel")
]
SHARED_MEMORY = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}


def cuobjdump(option: str, cubin: pathlib.Path) -> str:
    import triton

    command = [triton.knobs.nvidia.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def differences(facts: dict[str, Any], cubin: pathlib.Path) -> list[str]:
    """Where a kernel's entry in the manifest differs from what is in ``cubin``."""
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


@pytest.mark.parametrize(("op", "arch", "kernel"), KERNELS)
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


def test_descriptors_have_scratch(bundles: dict[str, pathlib.Path]) -> None:
    arches = manifest_of(bundles["all_gather_matmul"])["arches"]
    for arch, descriptors in (("80", False), ("90", True), ("100", True)):
        facts = arches[arch]["kernels"]["all_gather_matmul_kernel"]
        assert bool(facts["constants"]["DESCRIPTORS"]) == descriptors
        assert bool(facts["scratch"]["bytes_per_program"]) == descriptors
        (scratch,) = (a for a in facts["arguments"] if a["name"] == "global_scratch")
        assert scratch["used"] == descriptors and scratch["from"] == "loader"
        assert ("input_stride >= K" in facts["conditions"]) == descriptors


def test_divisibility_is_that_of_the_build(bundles: dict[str, pathlib.Path]) -> None:
    def divisible(op: str, arch: str) -> dict[str, int]:
        facts = manifest_of(bundles[op])["arches"][arch]["kernels"][f"{op}_kernel"]
        return {a["name"]: a["divisible_by"] for a in facts["arguments"]}

    even, odd = divisible("all_gather_matmul", "80"), divisible("matmul_all_reduce", "80")
    for name in ("K", "input_stride"):
        assert (even[name], odd[name]) == (16, 1)
    for name in ("N", "weight_stride_k", "input_ptr"):
        assert (even[name], odd[name]) == (16, 16)
    assert even["rank"] == 1


def test_contracts_are_the_docstrings(bundles: dict[str, pathlib.Path]) -> None:
    from interlace.kernels import signal
    from interlace.kernels.collectives import reduction

    contracts = manifest_of(bundles["all_reduce"])["contracts"]
    # "as reduce_scatter_kernel": what a text refers to is there too
    assert set(contracts) == {"all_reduce_kernel", "reduce_scatter_kernel", "finish_kernel"}
    for kernel, module in (("reduce_scatter_kernel", reduction), ("finish_kernel", signal)):
        text = " ".join(getattr(module, kernel).fn.__doc__.split())
        assert f"Ordering: {contracts[kernel]['ordering']} Example:" in text


# -- the formulas and the host -----------------------------------------------------------------

LIMIT = 132


class FakeCommunicator:
    """Just enough of a communicator on a GPU to let an algorithm lay out its workspace and launch."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.place = mock.Mock(compiled=True, interpreted=False, direct_access=False, nodes=None)
        self.place.program_limit = LIMIT
        self.compute = self.copying = mock.Mock()
        self.launches: list[KernelLaunch] = []
        self.derived: dict[Any, Any] = {}
        self.layouts: list[Layout] = []
        self.compute.launch = self.launches.append

    def table(self, key: Any, rows: Callable[[], Any]) -> torch.Tensor:
        return torch.tensor([value for row in rows() for value in row], dtype=torch.int64)

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> None:
        self.layouts.append(layout)
        slot_offset = HEADER_WORDS * WORD
        buffer = SymmetricBuffer(self.rank, 0, torch.zeros(self.world_size), [])
        body(Workspace(0, buffer, slot_offset, slot_offset + 1024, self.world_size, op))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Shape:
    rows: tuple[int, ...]
    columns: int = 4096


SHAPES = [
    Shape((5000, 4096, 4000, 3000)),
    Shape((8192,) * 8, 1024),
    Shape((700, 0, 129), 272),
    Shape((4096,)),
]
INNER = {"matmul_all_reduce": 4095}


def launch_on_host(op: str, shape: Shape, rank: int, configuration: Configuration) -> Any:
    """What the launch side of ``op`` launches and leases for ``shape``."""
    communicator: Any = FakeCommunicator(rank, len(shape.rows))
    rows, columns, inner = list(shape.rows), shape.columns, INNER.get(op, 4096)
    columns = 4096 if op.endswith("_norm") else columns  # slices are cut for the columns
    first = [sum(rows[:owner]) for owner in range(len(rows))]
    segments = list(zip(first, rows, strict=True))
    if op == "all_gather_matmul":
        linear = Linear(meta(inner, columns), None, meta(sum(rows), columns))
        gather_matmul.all_gather_matmul_fused(
            communicator, meta(rows[rank], inner), [linear], rows, None, configuration
        )
    elif op == "matmul_reduce_scatter":
        half = torch.float16
        bias = meta(columns, dtype=half)
        output = meta(rows[rank], columns, dtype=half)
        linear = Linear(meta(columns, inner, dtype=half).t(), bias, output)
        matmul_reduce.matmul_reduce_scatter_fused(
            communicator,
            meta(sum(rows), inner, dtype=half),
            linear,
            segments,
            configuration,
        )
    elif op == "matmul_all_reduce":
        single = torch.float32
        weight = meta(inner, columns, dtype=single)
        linear = Linear(weight, None, meta(max(rows), columns, dtype=single), average=True)
        input = meta(max(rows), inner, dtype=single)
        matmul_reduce.matmul_all_reduce_fused(communicator, input, linear, configuration)
    elif op.endswith("_norm"):
        dtype = torch.float16 if op == "reduce_norm" else torch.bfloat16
        own = max(rows) if op == "matmul_all_reduce_norm" else rows[rank]
        kind = "layer" if op == "matmul_reduce_scatter_norm" else "rms"
        vector, matrix = meta(columns, dtype=dtype), meta(own, columns, dtype=dtype)
        norm = norms.RowNorm(kind, 1e-6, vector, vector if kind == "layer" else None)
        fp8 = op == "matmul_all_reduce_norm"
        made = meta(own, columns, dtype=norms.QUANTIZED) if fp8 else matrix
        scale = meta(own, 1, dtype=torch.float32) if fp8 else None
        tail = norms.NormTail(norm, matrix, made, scale)
        weight = meta(0 if op == "reduce_norm" else inner, columns, dtype=dtype)
        bias = vector if kind == "layer" else None
        linear = Linear(weight, bias, matrix, average=op == "reduce_norm", tail=tail)
        if op == "matmul_all_reduce_norm":
            input = meta(own, inner, dtype=dtype)
            normed.matmul_all_reduce_fused(communicator, input, linear, configuration)
        elif op == "matmul_reduce_scatter_norm":
            input = meta(sum(rows), inner, dtype=dtype)
            call = communicator, input, linear, segments, configuration
            normed.matmul_reduce_scatter_fused(*call)
        else:
            input = meta(sum(rows), columns, dtype=dtype)
            normed.reduce_fused(communicator, op, input, linear, segments, configuration)
    elif op == "all_gather":
        plain.all_gather_kernel(
            communicator, meta(rows[rank]), apart(sum(rows)), rows, configuration
        )
    elif op == "reduce_scatter":
        plain.reduce_scatter_kernel(
            communicator, meta(sum(rows)), meta(rows[rank]), rows, configuration, average=True
        )
    else:
        flat = meta(max(rows))
        plain.all_reduce_kernel(communicator, flat, flat, configuration, average=False)
    (launch,), (layout,) = communicator.launches, communicator.layouts
    return launch, layout


def apart(elements: int) -> Any:
    """A flat output that is not where the input is; tensors without memory are all at 0."""
    tensor = mock.MagicMock(dtype=torch.bfloat16, numel=lambda: elements)
    tensor.__getitem__.return_value.data_ptr.return_value = 16
    return tensor


CASES = [
    pytest.param(op, str(arches[-1]), shape, id=f"{op} {len(shape.rows)} ranks")
    for op, arches in ARCHES.items()
    for shape in SHAPES
]


def host_differences(manifest: dict[str, Any], arch: str, shape: Shape) -> list[str]:
    """Where the formulas of a manifest come to something else than the host launches, on any rank."""
    op, facts = manifest["op"], manifest["arches"][arch]
    kernel = facts["kernels"][f"{op}_kernel"]
    dtype = getattr(torch, manifest["options"]["dtype"])
    default = gpu_default(int(arch), dtype, 4096, shape.columns, INNER.get(op, 4096))
    configuration = replace(default, **manifest["options"]["overrides"])
    pairs: dict[str, tuple[Any, Any]] = {}
    for rank in range(len(shape.rows)):
        launch, layout = launch_on_host(op, shape, rank, configuration)
        arguments = outside(launch.arguments)
        # the host takes fewer copiers where there is little to send
        baked = {**kernel["constants"], "COPIERS": arguments.get("COPIERS")}
        constants = {name: baked.get(name, value) for name, value in facts["constants"].items()}
        formulas = aot.Formulas(manifest["functions"], manifest["quantities"], constants)
        values = {"rank": rank, "world_size": len(shape.rows), "rows": shape.rows}
        values |= {name: arguments.get(name) for name in ("N", "K", "M", "elements")}
        values |= {"resident": LIMIT}
        pairs["threads"] = kernel["threads"], 32 * launch.num_warps
        pairs |= {name: (baked[name], arguments.get(name)) for name in baked}
        pairs["grid"] = formulas.value(kernel["grid"], values), launch.grid
        pairs["slots"] = formulas.value("slots", values), layout.slots
        pairs["data_bytes"] = formulas.value("data_bytes", values), layout.nbytes
        for argument, table in manifest["tables"].items():
            flat = [value for line in formulas.value(table, values) for value in line]
            pairs[argument] = flat, arguments[argument].tolist()
        for argument in manifest["quantities"].keys() & arguments.keys():
            pairs[argument] = formulas.value(argument, values), arguments[argument]
        if found := [f"{name}: {a} is not {b}" for name, (a, b) in pairs.items() if a != b]:
            return found
    return []


@pytest.mark.parametrize(("op", "arch", "shape"), CASES)
def test_formulas_are_what_the_host_launches(
    op: str, arch: str, shape: Shape, bundles: dict[str, pathlib.Path]
) -> None:
    assert host_differences(manifest_of(bundles[op]), arch, shape) == []


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("slots", "chunk_slots(rows, chunk_size) + 1"),
        ("data_bytes", "gathered_bytes(rows, K)"),
        ("tiles", "tiles_n"),
        ("num_sends", "len(sends) + 1"),
        ("sends", "send_lines(0, world_size, rows, chunk_size)"),
        ("chunks", "chunk_lines(rank, world_size, rows, chunk_size, BLOCK_M, 1)"),
    ],
)
def test_control_a_false_formula_is_seen(
    name: str, formula: str, bundles: dict[str, pathlib.Path]
) -> None:
    manifest = manifest_of(bundles["all_gather_matmul"])
    manifest["quantities"][name] = formula
    assert host_differences(manifest, "90", Shape((700, 0, 129), 272)) != []


# -- the command -------------------------------------------------------------------------------

ERRORS = {
    "--op needs --out": ["--op", "all_reduce"],
    "--dtype is for one op": ["--dtype", "float32"],
    "--kernel is for the catalogue": [
        "--op",
        "all_reduce",
        "--out",
        "{out}",
        "--kernel",
        "x",
    ],
    "file is a file; name a folder": ["--op", "all_reduce", "--out", "{file}/bundle"],
    "--dtype is 'int8'": ["--op", "all_reduce", "--out", "{out}", "--dtype", "int8"],
    "weight is no option of all_reduce": ["--op=all_reduce", "--out", "{out}", "--weight", "nk"],
    "average is no option of all_gather": ["--op=all_gather", "--out", "{out}", "--average"],
    "--set is 'block_m'": ["--op=all_reduce", "--out", "{out}", "--set", "block_m"],
    "--set tiles=1: 'tiles' is no field": ["--op=all_reduce", "--out", "{out}", "--set", "tiles=1"],
    "--set block_m=3: block_m is 3;": ["--op=all_reduce", "--out", "{out}", "--set", "block_m=3"],
    "path is 'tma': sm_80": ["--op=matmul_all_reduce", "--out={out}", "--arch=80", "--path=tma"],
}


@pytest.mark.parametrize("error", ERRORS)
def test_command_says_what_is_wrong(
    error: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    places = {"out": tmp_path / "out", "file": tmp_path / "file"}
    assert run(["build", *(option.format(**places) for option in ERRORS[error])]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("error: ") and error in said  # before anything is compiled
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--arch", "70", "known are 80, 86, 87, 89, 90, 100, 103, 120, 121, got 70"),
        ("--op", "all", "invalid choice: 'all' (choose from"),
    ],
)
def test_command_refuses_what_is_not_known(
    option: str, value: str, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        run(["build", "--op", "all_reduce", option, value])
    assert exit.value.code == 2
    assert f"argument {option}: {known}" in capsys.readouterr().err


def test_one_kernel_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "--arch", "90", "--kernel", "hat"]) == 2
    assert "--kernel hat: is none of publish, wait," in capsys.readouterr().err
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
