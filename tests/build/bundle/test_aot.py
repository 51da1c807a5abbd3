"""The loader of bundles: its use of CuPy, its refusals, and that it needs no Triton.

``cupy_stand_in.py`` records launches without a GPU. ``test_bundle.py`` tests the contents of bundles.
"""

import ast
import copy
import functools
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from cases.bundles import manifest_of
from cases.damage import read_100000_damaged
from interlace import aot
from interlace.kernels import bundle_formulas, launch_formulas
from stand_ins import cupy_stand_in
from tiers import thorough

ROOT = pathlib.Path(__file__).parents[3]
DOCUMENT = ROOT / "docs/how-to/compile/aot.md"
MANIFEST_PAGE = ROOT / "docs/reference/bundle-manifest.md"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "cupy", cupy_stand_in)
    for record in (cupy_stand_in.modules, cupy_stand_in.launches, cupy_stand_in.allocations):
        record.clear()
    return cupy_stand_in


VALUES = {"rank": 1, "world_size": 4, "rows": [4096] * 4, "N": 4096, "K": 8192}


def arguments_of(cupy: Any, **changed: Any) -> dict[str, Any]:
    """Return the arguments of a launch of all_gather_matmul_kernel, with changes; None leaves one out."""
    arguments = {
        "peers_ptr": 1 << 20,
        "slot_offset": 1024,
        "data_offset": 2048,
        "input_ptr": cupy.zeros(64, cupy.uint16),
        "input_stride": 8192,
        "weight_ptr": 1 << 21,
        "weight_stride_k": 4096,
        "output_ptr": 1 << 22,
        "sends_ptr": 1 << 23,
        "chunks_ptr": 1 << 24,
        **changed,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def python_of_document() -> str:
    (text,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


@thorough
def test_document_launches_without_triton(
    bundles: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """The program of docs/how-to/compile/aot.md runs in a separate process, beside a copy of the loader."""
    (tmp_path / "bundle").symlink_to(bundles["all_gather_matmul"])
    shutil.copy(cupy_stand_in.__file__, tmp_path / "cupy.py")
    shutil.copy(tmp_path / "bundle" / "load.py", tmp_path)
    before = "rank, world_size = 1, 4\npeer_addresses = lambda buffer: [1 << 20] * 4\n"
    after = """
import json, sys
shown = [{**one, "args": [(type(a).__name__, int(a)) for a in one["args"]]} for one in cupy.launches]
top = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps([shown, cupy.allocations, top]))
"""
    (tmp_path / "program.py").write_text(before + python_of_document() + after)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    launches, allocations, modules = json.loads(done.stdout)
    assert {"cupy", "load", "numpy"} <= set(modules)
    assert not {"triton", "torch", "interlace"} & set(modules)
    facts = manifest_of(bundles["all_gather_matmul"])["arches"]["90"]["kernels"]
    assert [one["name"] for one in launches] == [*facts] * 3
    for one in launches:
        kernel = facts[one["name"]]
        assert one["path"].endswith(kernel["cubin"]["file"])
        assert one["cooperative"] == kernel["cooperative"] == (one["grid"] != [1, 1, 1])
        assert one["block"] == [kernel["threads"], 1, 1]
        assert one["shared_mem"] == kernel["shared_memory"]["dynamic"]
        kinds = [("uint64" if a["type"][0] == "*" else "int32") for a in kernel["arguments"]]
        assert [kind for kind, _ in one["args"]] == kinds
    fused, finish = launches[:2]
    assert fused["grid"] == [cupy_stand_in.MULTIPROCESSORS, 1, 1]
    names = [a["name"] for a in facts["all_gather_matmul_kernel"]["arguments"]]
    sent = dict(zip(names, (number for _, number in fused["args"]), strict=True))
    # 4096 rows are 32 tiles, so chunks of 8 tiles, each sent to 3 peers; the own shard is one
    assert (sent["num_sends"], sent["num_chunks"], sent["rank"], sent["K"]) == (12, 13, 1, 8192)
    assert (sent["bias_ptr"], sent["profile_scratch"]) == (0, 0)
    assert sent["global_scratch"] and allocations == [132 * 768], "once for all launches"
    assert [number for _, number in finish["args"]] == [sent["peers_ptr"], 1, 4, 0, 0]


def test_loader_is_in_the_bundle(bundles: dict[str, pathlib.Path]) -> None:
    for path in bundles.values():
        text = (path / "load.py").read_text()
        names = {node.name for node in ast.parse(text).body if hasattr(node, "name")}
        for module in (aot, bundle_formulas, launch_formulas):
            own = {name for name, each in vars(module).items() if inspect.isroutine(each)}
            assert own <= names
        assert not re.search(r"^\s*(from|import) interlace", text, re.MULTILINE)
        assert not list(path.glob(".*")), "nothing stays of the build"


def test_arguments_in_order_and_a_given_grid(cupy: Any, bundles: dict[str, pathlib.Path]) -> None:
    bundle = aot.load(bundles["all_gather_matmul"], arch="sm_90")
    bundle.launch("finish_kernel", 1, (4096, 2, 8), stream=17)
    (launch,) = cupy.launches
    assert [int(a) for a in launch["args"]] == [4096, 2, 8, 0, 0]
    assert (launch["grid"], launch["stream"]) == ((1, 1, 1), 17)
    bundle.launch("finish_kernel", (1, 1), (4096, 2, 8), stream=mock.Mock(cuda_stream=18))
    bundle.launch("finish_kernel", 1, (4096, 2, 8))
    assert [one["stream"] for one in cupy.launches[1:]] == [18, cupy.DEFAULT_STREAM]
    assert len(cupy.modules) == 1, "loaded once"


def test_scratch_is_of_a_stream(cupy: Any, bundles: dict[str, pathlib.Path]) -> None:
    bundle = aot.load(bundles["all_gather_matmul"])
    assert bundle.arch == "90"
    for stream, rows in ((17, 4096), (18, 4096), (17, 64), (18, 5000)):
        values = {**VALUES, "rows": [rows] * 4, "resident": 64 if rows <= 4096 else 80}
        arguments = arguments_of(cupy)
        bundle.launch("all_gather_matmul_kernel", values, arguments, stream=stream)
    assert cupy.allocations == [64 * 768, 64 * 768, 80 * 768]
    scratch = [int(launch["args"][-2]) for launch in cupy.launches]
    assert scratch[0] == scratch[2] != scratch[1] != scratch[3]


MISUSES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "missing": ({"weight_ptr": None}, {}, TypeError, "lacks argument 'weight_ptr', a .bf16"),
    "unknown": ({"weigth_ptr": 0}, {}, TypeError, "has no argument 'weigth_ptr'"),
    "no array": ({"weight_ptr": [1, 2]}, {}, TypeError, "weight_ptr is a list, not an array"),
    "of the host": ({"weight_ptr": torch.ones(4)}, {}, TypeError, "weight_ptr is a Tensor, not an"),
    "float": ({"input_stride": 2.0}, {}, TypeError, "input_stride is 2.0, not a whole number"),
    "bool": ({"input_stride": True}, {}, TypeError, "input_stride is True, not a whole number"),
    "too large": ({"data_offset": 1 << 31}, {}, ValueError, "data_offset is 2147483648, .* i32"),
    "odd stride": ({"weight_stride_k": 4100}, {}, ValueError, "weight_stride_k is 4100; .* of 16"),
    "odd address": ({"output_ptr": 4104}, {}, ValueError, "output_ptr is at address 0x1008; .* 16"),
    "odd K": ({}, {"K": 8184}, ValueError, "K is 8184; .* multiples of 16"),
    "short stride": ({"input_stride": 4096}, {}, ValueError, "input_stride >= K; K = 8192, inp"),
    "ranks": ({}, {"rows": [4096] * 3}, ValueError, "len.rows. == world_size; rows = .*size = 4"),
    "no rank": ({}, {"rank": 4}, ValueError, "0 <= rank < world_size; rank = 4"),
    "no columns": ({}, {"N": 0}, ValueError, "needs N > 0; N = 0"),
    "crowded": ({}, {"resident": 8}, ValueError, "resident > COPIERS; COPIERS = 8, resident = 8"),
    "no rows": ({}, {"rows": None}, TypeError, "rows is None, not a whole number"),
    "twice": ({"N": 256}, {}, ValueError, "N is 256 as an argument, 4096 as a value"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_names_the_argument(
    misuse: str, cupy: Any, bundles: dict[str, pathlib.Path]
) -> None:
    arguments, values, error, text = MISUSES[misuse]
    bundle = aot.load(bundles["all_gather_matmul"], arch=90)
    name = "all_gather_matmul_kernel"
    with pytest.raises(error, match=text):
        bundle.launch(name, {**VALUES, **values}, arguments_of(cupy, **arguments))
    assert not cupy.launches
    bundle.launch(name, VALUES, arguments_of(cupy))
    assert len(cupy.launches) == 1, "as it should be, it is launched"


def test_a_grid_in_three_dimensions_and_a_float(
    cupy: Any, bundles: dict[str, pathlib.Path]
) -> None:
    """Each kernel of decoding has its own grid, and its formulas use launch values of another kernel."""
    bundle = aot.load(bundles["distributed_decode"], arch=90)
    names = {name for kernel in bundle.kernels.values() for name in kernel.arguments}
    given: dict[str, Any] = {name: 1 << 20 for name in names if name.endswith("_ptr")}
    given |= {name: 128 for name in names if "stride" in name}
    given |= {"batches": 3, "heads": 2, "most": 1000, "scale": 0.125}
    values = {"rank": 1, "world_size": 4, "query_rows": 4}
    bundle.run(values, given)
    attend, merge, exchange = cupy.launches
    assert attend["grid"] == (1, 6, 16) and merge["grid"] == (6, 1, 1)
    assert exchange["grid"] == (12, 1, 1)
    assert float(attend["args"][-3]) == 0.125 and int(attend["args"][-4]) == 64, "keys of a piece"
    for wrong in ("1", True, None):
        cupy.launches.clear()
        with pytest.raises(TypeError, match="scale"):
            bundle.run(values, {**given, "scale": wrong})
        assert not cupy.launches
    with pytest.raises(ValueError, match="decode_attention_kernel needs 0 < blocks <= 64"):
        bundle.run({**values, "query_rows": 400}, given)


def test_misuse_of_launches(cupy: Any, bundles: dict[str, pathlib.Path]) -> None:
    bundle = aot.load(bundles["all_gather_matmul"], arch=90)
    with pytest.raises(TypeError, match="dtype int64; the kernel takes bfloat16"):
        arguments = arguments_of(cupy, weight_ptr=cupy.zeros(64, cupy.int64))
        bundle.launch("all_gather_matmul_kernel", VALUES, arguments)
    with pytest.raises(TypeError, match="takes 3 arguments, got 2: peers_ptr, rank, world_size"):
        bundle.launch("finish_kernel", 1, (4096, 0))
    with pytest.raises(ValueError, match="kernel is 'start_kernel'; the bundle has all_gather_"):
        bundle.launch("start_kernel", 1, ())
    with pytest.raises(ValueError, match="grid is 0"):
        bundle.launch("finish_kernel", 0, (4096, 0, 4))
    with pytest.raises(TypeError, match="no kernel of all_gather_matmul has an argument 'x'"):
        bundle.run(VALUES, arguments_of(cupy, x=1))
    with pytest.raises(ValueError, match="values lack 'rows'"):
        bundle.workspace({"K": 64})
    assert not cupy.launches


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"world_size": 100}, "world_size is 100, not within 1..64"),
        ({"rank": 5}, "rank is 5, not within 0..1"),
        ({"rows": [4]}, "rows is [4], not a list of 2 lengths"),
        ({"rows": 64}, "rows is 64, not a list of 2 lengths"),
        ({"rows": [4, -4]}, "rows is [4, -4], not a list of 2 lengths"),
    ],
)
def test_values_that_no_group_has(
    cupy: Any, bundles: dict[str, pathlib.Path], wrong: dict[str, Any], said: str
) -> None:
    bundle = aot.load(bundles["all_gather_matmul"], arch=90)
    values = {"rank": 0, "world_size": 2, "rows": [4, 4], "N": 16, "K": 16, **wrong}
    with pytest.raises(ValueError, match=re.escape(said)):
        bundle.workspace(values)


def test_a_file_is_no_bundle(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(aot.BundleError, match="is not a bundle"):
        aot.load(tmp_path / "file", arch=90)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch, bundles: dict[str, pathlib.Path]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="install cupy-cuda12x or cupy-cuda13x"):
        aot.load(bundles["all_gather"])
    bundle = aot.load(bundles["all_gather"], arch=90)
    assert bundle.workspace({**VALUES, "rows": [64] * 4})["buffer_bytes"] > 0
    with pytest.raises(ImportError, match="install cupy-cuda12x or cupy-cuda13x"):
        bundle.launch("finish_kernel", 1, (4096, 0, 4))


def edit(path: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = manifest_of(path)
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def kernel_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["arches"]["90"]["kernels"]["all_gather_kernel"]  # type: ignore[no-any-return]


def constants_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["arches"]["90"]["constants"]  # type: ignore[no-any-return]


CUBIN = "all_gather_kernel.sm_90.cubin"
DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    "cut short": (lambda p: (p / "manifest.json").write_text('{"for'), "is damaged"),
    "too deep": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "is damaged"),
    "a pipe": (
        lambda p: (p / "manifest.json").unlink() or os.mkfifo(p / "manifest.json"),
        "manifest.json is not a regular file",
    ),
    "other JSON": (lambda p: (p / "manifest.json").write_text("[]"), "not the manifest of a"),
    "newer": (
        lambda p: edit(p, lambda m: m.update(version=3)),
        "format version 3, this .* reads 2",
    ),
    "older": (
        lambda p: edit(p, lambda m: m.update(version=1)),
        "format version 1, this .* reads 2: build it again with this version",
    ),
    "less": (lambda p: edit(p, lambda m: m.pop("sequence")), "damaged: KeyError: 'sequence'"),
    "an op that is none": (lambda p: edit(p, lambda m: m.update(op="x")), "damaged: .*op is 'x'"),
    "code for a condition": (
        lambda p: edit(p, lambda m: kernel_of(m)["conditions"].append("print(1)")),
        r"damaged: .*conditions is 'print\(1\)'",
    ),
    "code for a constant": (
        lambda p: edit(p, lambda m: constants_of(m).update(BLOCK="print(1)")),
        r"damaged: .*constants.BLOCK is 'print\(1\)'",
    ),
    "chunks without end": (
        lambda p: edit(p, lambda m: constants_of(m).update(CHUNKS=1 << 39)),
        "damaged: .*CHUNKS is '549755813888'",
    ),
    "changed cubin": (
        lambda p: (p / CUBIN).write_bytes(b"no"),
        f"{CUBIN} differs from the file that",
    ),
    "no cubin": (lambda p: (p / CUBIN).unlink(), f"{CUBIN} is missing"),
    "elsewhere": (
        lambda p: edit(p, lambda m: kernel_of(m)["cubin"].update(file="../x.cubin")),
        "a file outside the bundle: ../x.cubin",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_said(
    damage: str, bundles: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundles["all_gather"], path)
    assert aot.load(path, arch=90).op == "all_gather"
    change, text = DAMAGES[damage]
    change(path)
    with pytest.raises(aot.BundleError, match=text):
        aot.load(path, arch=90)


@thorough
def test_100000_damaged_manifests_are_refused(
    bundles: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundles["all_gather"], path)
    load = functools.partial(aot.load, path, arch=90)
    assert read_100000_damaged(path / "manifest.json", load, ValueError, share=0.05) > 50_000


def test_architecture_has_to_be_in_the_bundle(cupy: Any, bundles: dict[str, pathlib.Path]) -> None:
    with pytest.raises(ValueError, match=r"arch is 103; .* was built for (80, )?90(, 100)?$"):
        aot.load(bundles["all_gather_matmul"], arch=103)
    mock_86 = mock.patch.object(cupy.cuda.Device, "compute_capability", "86")
    with mock_86, pytest.raises(ValueError, match=r"arch is 86; .* was built for 90"):
        aot.load(bundles["all_gather"])


# -- computations of the loader ----------------------------------------------------------------


@pytest.mark.parametrize("condition", bundle_formulas.CONDITIONS)
def test_a_condition_is_what_its_text_says(condition: str) -> None:
    source = inspect.getsource(bundle_formulas)
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CONDITIONS"
    )
    assert isinstance(table, ast.Dict)
    said = {
        ast.literal_eval(key): function
        for key, function in zip(table.keys, table.values, strict=True)
    }
    assert ast.unparse(said[condition].body).replace("v.", "") == condition


NUMBERS = {"rank": 1, "world_size": 3, "rows": [50, 30, 41], "splits": [5, 0, 7, 9] * 9, "N": 96}
NUMBERS |= {"resident": 40, "heads": 8, "key_heads": 2, "num_experts": 3, "CHUNKS": 3, "GATHERS": 2}
NUMBERS |= {"WIDTH": 2, "BLOCK_M": 16, "BLOCK": 16, "DATA_ALIGNMENT": 256, "COPIERS": 4}


def computed(op: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Compute all values of an op from some numbers; a name without a number gets one from its letters."""
    names, found = {*bundle_formulas.OPS[op], *bundle_formulas.SHARED}, dict[str, Any]()
    given = {name: value for name, value in {**NUMBERS, **changed}.items() if name not in names}
    while names:
        name = min(names)
        try:
            found[name] = bundle_formulas.LaunchValues(op, given).value(name)
        except bundle_formulas.LackingValueError as error:
            lacking = str(error).split("'")[1]
            given[lacking] = 8 + zlib.crc32(lacking.encode()) % 90
        except aot.BundleError:
            assert changed
            names.remove(name)
        else:
            names.remove(name)
    return found


def test_numbers_have_64_bits() -> None:
    for rows in ([1 << 62] * 4, [1 << 64] * 4):
        with pytest.raises(aot.BundleError, match="comes to no number of 64 bits"):
            given = {**NUMBERS, "ITEMSIZE": 2, "rows": rows}
            bundle_formulas.LaunchValues("all_gather", given).value("data_bytes")
    given = {**NUMBERS, "ITEMSIZE": 2, "rows": [1 << 20] * 4}
    assert bundle_formulas.LaunchValues("all_gather", given).value("data_bytes") > 4 << 20


def test_another_result_is_another_version() -> None:
    """A loader must not launch bundles that were built for other sizes: raise VERSION, and change this
    number.
    """
    found = json.dumps({op: computed(op, {}) for op in bundle_formulas.OPS}, sort_keys=True)
    assert (aot.VERSION, zlib.crc32(found.encode())) == (2, 2188210519)


@pytest.mark.parametrize("op", bundle_formulas.OPS)
@pytest.mark.parametrize("name", ["BLOCK_M", "BLOCK", "BLOCK_N", "CHUNKS", "DATA_ALIGNMENT"])
def test_no_constant_takes_long(op: str, name: str) -> None:
    for number in (0, 1, 256 if name == "CHUNKS" else (1 << 40) - 1):
        changed = {"rows": [900] * 3, "CHUNKS": 256, name: number}
        for table in computed(op, changed).values():
            assert not isinstance(table, list) or len(table) <= max(3 * 900, 3 * 9 * 256)


# -- the document ------------------------------------------------------------------------------


# Numbers that another release of Triton may change.
VOLATILE = ("static", "dynamic", "bytes_per_program", "alignment")


def missing(shown: Any, real: Any, where: str) -> list[str]:
    """Where ``shown``, of which parts may be left out, is not in ``real``."""
    if where.endswith(VOLATILE):
        return [] if type(shown) is type(real) else [f"{where}: {shown} is not like {real}"]
    if isinstance(shown, dict) and isinstance(real, dict):
        return [
            text
            for key, value in shown.items()
            for text in missing(value, real.get(key), f"{where}.{key}")
        ]
    if isinstance(shown, list) and isinstance(real, list):
        return [f"{where}: {one}" for one in shown if one not in real]
    return [] if shown == real else [f"{where}: {shown} is not {real}"]


def test_document_shows_the_manifest(bundles: dict[str, pathlib.Path]) -> None:
    manifest = manifest_of(bundles["all_gather_matmul"])
    text = MANIFEST_PAGE.read_text()
    examples = re.findall(r"`([\w.]+)`[^`]*```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [path for path, _ in examples] == ["arches.90.kernels.all_gather_matmul_kernel"]
    for path, example in examples:
        real: Any = manifest
        for key in path.split("."):
            real = real[key]
        assert missing(json.loads(example), real, path) == []
        for key in real:
            assert key in example or f"`{key}`" in text, f"{path}.{key} is not explained"
    for key in manifest:
        assert f"`{key}`" in text, f"{key} is not explained"
    changed = copy.deepcopy(real) | {"symbol": "0"}
    assert missing(json.loads(examples[0][1]), changed, "control") != []
