"""The cost model: torch's figures by default, equal to torch's own functions; given and measured ones."""

import json
import math
import pathlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._collective_utils as torch_model
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import interlace.tensor as tensor
from interlace.cli.commands.calibrate import CalibrateOptions, calibrate, mesh_of
from interlace.compile import CPU, calibrated
from interlace.output.consoles import PlainConsole
from interlace.runtime.tuning import calibration, files as cache, tuning
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh
from interlace.runtime.tuning.tuning import Problem
from interlace.tensor.calibration import (
    CalibrationRequest,
    NoisyTimesError,
    fit,
    link_of,
    measured_mesh,
    medians,
)
from interlace.tensor.costs import GIB, MeshTopoInfo

SHAPES = ((8,), (2, 4), (4, 2), (2, 2, 2), (1, 8))


@pytest.fixture(autouse=True)
def _fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def devices_per_host(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[int]:
    count: int = request.param
    monkeypatch.setattr(
        type(_mesh_resources), "num_devices_per_host", lambda *_: count, raising=False
    )
    torch_model.MeshTopoInfo.build_from_mesh.cache_clear()
    yield count
    torch_model.MeshTopoInfo.build_from_mesh.cache_clear()


def spec(mesh: DeviceMesh, placements: list[object], shape: tuple[int, ...]) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices_per_host", [1, 2, 4, 8], indirect=True)
def test_as_torchs_functions(devices_per_host: int) -> None:
    """Meshes, shapes and placements are random, and figures must be equal in their last bit."""
    draw, finite = random.Random(devices_per_host), 0
    kinds = [Replicate(), Shard(0), Shard(1), Shard(2), Partial(), Partial("max")]
    for _ in range(150):
        mesh = init_device_mesh("cpu", draw.choice(SHAPES))
        shape = tuple(draw.randint(1, 40) for _ in range(3))
        one, other = (
            spec(mesh, [draw.choice(kinds) for _ in range(mesh.ndim)], shape) for _ in range(2)
        )
        try:
            expected = torch_model.redistribute_cost(one, other)
        except Exception as error:  # a layout that torch cannot go to
            with pytest.raises(type(error)):
                tensor.redistribute_cost(one, other)
            continue
        topo, theirs = (
            MeshTopoInfo.build_from_mesh(mesh),
            torch_model.MeshTopoInfo.build_from_mesh(mesh),
        )
        for given in (None, topo, theirs):
            found = tensor.redistribute_cost(one, other, mesh_topo=given)
            assert found == expected, (one, other, given)
        finite += 0 < found < math.inf
        assert topo.source == "torch"
        for name in ("mesh_dim_devices", "mesh_dim_bandwidth", "mesh_dim_latency"):
            assert getattr(topo, name) == getattr(theirs, name)
        dim, gib = draw.randrange(mesh.ndim), draw.random()
        for name in ("allgather_cost", "allreduce_cost", "reduce_scatter_cost", "alltoall_cost"):
            of_torch = name.replace("alltoall", "allgather")  # torch has no other formula for it
            expected = getattr(torch_model, of_torch)(gib, theirs, dim)
            for each in (topo, theirs):
                assert getattr(tensor, name)(gib, each, dim) == expected
    assert finite > 30


def test_one_step() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    shape = (16, 16, 16)
    for current in (Shard(0), Partial(), Replicate()):
        for target in (Shard(1), Replicate(), Partial()):
            one, other = (spec(mesh, [Replicate(), each], shape) for each in (current, target))
            expected = torch_model.one_step_redistribute_cost(one, other)
            theirs = torch_model.MeshTopoInfo.build_from_mesh(mesh)
            for given in (None, theirs):
                assert tensor.one_step_redistribute_cost(one, other, mesh_topo=given) == expected
    with pytest.raises(ValueError, match="must differ in one placement"):
        tensor.one_step_redistribute_cost(
            spec(mesh, [Shard(0), Shard(0)], shape), spec(mesh, [Replicate()] * 2, shape)
        )


def test_no_topology() -> None:
    with pytest.raises(TypeError, match=r"mesh_topo must be a MeshTopoInfo, .*, got DeviceMesh"):
        tensor.allgather_cost(1.0, init_device_mesh("cpu", (8,)), 0)  # type: ignore[arg-type]


def test_other_meshes_and_missing_metadata() -> None:
    one, two = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 4))
    whole = spec(one, [Shard(0)], (8, 8, 8))
    assert tensor.redistribute_cost(whole, spec(two, [Replicate()] * 2, (8, 8, 8))) == math.inf
    assert tensor.redistribute_cost(whole, whole) == 0.0
    with pytest.raises(ValueError, match="has no tensor_meta"):
        tensor.spec_to_bytes(DTensorSpec(one, (Shard(0),)))


# -- given and measured figures ------------------------------------------------------------------------


def measurement(mesh: tuple[int, ...], backend: str = "fake") -> MeasuredMesh:
    links = []
    for dim, ranks in enumerate(mesh):
        for number, op in enumerate(calibration.OPS):
            small = LinkProtocol(0, 10.0 * (number + 1) + dim, 1.0)
            large = LinkProtocol(1 << 16, 50.0 * (number + 1) + dim, 4.0)
            links.append(Link(dim, ranks, op, (small, large)))
    return MeasuredMesh(backend, mesh, "2026-11-22", "2.13", "0.1.0", "shm", tuple(links))


def test_who_says_what_it_costs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, file = init_device_mesh("cpu", (2, 4)), tmp_path / "calibration.json"
    calibration.add(measurement((2, 4)), file)
    assert MeshTopoInfo.build_from_mesh(mesh).source == "torch"
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    topo = MeshTopoInfo.build_from_mesh(mesh)
    assert topo.source == f"measured 2026-11-22 ({file})" and topo.source in topo.explain()
    small, large = 1000 / GIB, 1e6 / GIB
    assert tensor.allgather_cost(small, topo, 1) == pytest.approx(11 + 1)
    assert tensor.allgather_cost(small, topo, -1) == tensor.allgather_cost(small, topo, 1)
    assert tensor.reduce_scatter_cost(large, topo, 0) == pytest.approx(100 + 250)
    assert tensor.allreduce_cost(large, topo, 0) == pytest.approx(150 + 250)
    assert tensor.alltoall_cost(large, topo, 0) == pytest.approx(200 + 250)
    shards, others = (spec(mesh, [Replicate(), Shard(d)], (100, 10, 64)) for d in (0, 1))
    assert tensor.redistribute_cost(shards, others) == pytest.approx(41 + 64e3 / 1e3)
    assert MeshTopoInfo.build_from_mesh(mesh, calibrated=False).source == "torch"
    given = MeshTopoInfo.build_from_mesh(mesh, bandwidth=[10, 20], latency=3)
    assert given.source == "given" and given.mesh_dim_bandwidth == [10.0, 20.0]
    assert tensor.redistribute_cost(shards, others, mesh_topo=given) != 41
    assert MeshTopoInfo.build_from_mesh(init_device_mesh("cpu", (4, 2))).source == "torch"
    assert MeshTopoInfo.build_from_mesh(mesh, calibrated=measurement((2, 4))).links


def test_a_mesh_that_was_cut_from_the_one_measured(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "calibration.json"
    calibration.add(measurement((2, 4)), file)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    topo = MeshTopoInfo.build_from_mesh(mesh["tp"], calibrated=str(file))
    assert tensor.allgather_cost(1000 / GIB, topo, 0) == pytest.approx(11 + 1)
    with pytest.raises(ValueError, match=r"has no measurement of a mesh \[8\] on backend 'fake'"):
        MeshTopoInfo.build_from_mesh(init_device_mesh("cpu", (8,)), calibrated=str(file))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"bandwidth": [1.0]}, "bandwidth has 1 figures, but the mesh has 2 dimensions"),
        ({"bandwidth": [1.0, 0.0]}, "bandwidth must be positive and finite, got 0.0"),
        ({"latency": math.nan}, "latency must be positive and finite, got nan"),
        ({"latency": "fast"}, "latency has 4 figures"),
    ],
)
def test_figures_that_cannot_be(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MeshTopoInfo.build_from_mesh(init_device_mesh("cpu", (2, 4)), **options)  # type: ignore[arg-type]


# -- the file ------------------------------------------------------------------------------------------


def test_the_file_keeps_other_meshes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "new" / "calibration.json"
    one, two = measurement((2,)), measurement((2, 2))
    newer = replace(one, date="2026-11-23")
    for each in (one, two, newer):
        calibration.add(each, file)
    assert calibration.read(file=file) == (two, newer)
    assert calibration.find(calibration.read(file=file), "fake", [2]) == newer
    assert calibration.find(calibration.read(file=file), "gloo", [2]) is None


FIGURES = ("meshes", 0, "links", 1, "protocols", 0)


@pytest.mark.parametrize(
    "at, field, value, text",
    [
        ((), "format", "other", "is not a file of interlace calibrate"),
        ((), "version", 7, "has version 7"),
        ((), "device", "another", "was measured on 'another'"),
        ((), "meshes", [{}], "is damaged"),
        ((), "meshes", None, "is damaged"),
        (FIGURES, "latency_us", -1, "is damaged"),
        (FIGURES, "gb_per_s", 0, "is damaged"),
        (FIGURES, "gb_per_s", 1e-320, "is damaged"),
        (FIGURES, "from_bytes", 0.5, "is damaged"),
    ],
)
def test_what_is_no_such_file_is_left_alone(
    tmp_path: pathlib.Path, at: tuple[object, ...], field: str, value: object, text: str
) -> None:
    file = tmp_path / "calibration.json"
    calibration.add(measurement((2,)), file)
    whole = part = json.loads(file.read_text())
    for key in at:
        part = part[key]
    part[field] = value
    before = json.dumps(whole)
    file.write_text(before)
    with pytest.warns(RuntimeWarning, match=f"calibration not used: .*{text}"):
        assert calibration.read(file=file) == ()
    with pytest.raises(ValueError, match=text):
        calibration.add(measurement((2,)), file)
    assert file.read_text() == before


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert calibration.path() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration.read(file=tmp_path / "none.json") == ()
        for module in (calibration, cache):
            monkeypatch.setenv(module.VARIABLE, "~no-such-user/file.json")
            assert str(module.path()) == "~no-such-user/file.json"
        assert calibration.read() == ()
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibration.path()
    assert found is not None and found.parent == tmp_path / "interlace"
    assert found.name.startswith("calibration-") and found.suffix == ".json"


# -- fitting and choosing ------------------------------------------------------------------------------


def test_fits_ignore_outliers() -> None:
    points = {size: 20.0 + size / 500 for size in (1000, 4000, 16000, 64000, 128000)}
    for wild in points:
        latency, slope = fit({**points, wild: 5 * points[wild]})
        assert latency == pytest.approx(20.0) and slope == pytest.approx(1 / 500)


def test_the_large_protocol_begins_where_the_lines_cross() -> None:
    small = {size: 10.0 + size / 1e3 for size in (1000, 2000, 4000)}
    large = {size: 100.0 + size / 1e4 for size in (1_000_000, 2_000_000)}
    link = link_of(0, 2, "all_gather", small, large)
    assert link.protocols[1].from_bytes == 100_000
    assert link.us(99_000) == pytest.approx(109, rel=1e-4)
    assert link.us(200_000) == pytest.approx(120, rel=1e-4)
    parallel = link_of(0, 2, "all_gather", small, {k: v + k / 1e3 for k, v in large.items()})
    assert parallel.protocols[1].from_bytes == round(math.sqrt(4000 * 1_000_000))


def test_noise_is_no_bandwidth() -> None:
    """If small messages give only noise, the bandwidth of large messages counts."""
    falling = {size: 20.0 - size / 1e3 for size in (1000, 2000, 4000)}
    large = {size: 100.0 + size / 1e4 for size in (1_000_000, 2_000_000)}
    for protocol in link_of(0, 2, "all_gather", falling, large).protocols:
        assert protocol.gb_per_s == pytest.approx(10.0)
    with pytest.raises(NoisyTimesError, match=r"4,000 bytes took 16 us, 1,000 bytes 19 us"):
        link_of(0, 2, "all_gather", falling, falling)
    with pytest.raises(NoisyTimesError, match="1,000 bytes 1 us, which leaves no latency"):
        link_of(0, 2, "all_gather", {size: size / 1e3 for size in falling}, large)
    with pytest.raises(NoisyTimesError, match="1,000,000 bytes took 200 us, 8,000 bytes 9000 us"):
        link_of(0, 2, "all_gather", {1000: 20.0, 2000: 21.0, 4000: 23.0, 8000: 9e3}, large)
    request = CalibrationRequest((2,))
    times = {(dim, op, size): [50.0 + size / 1e4] for dim, op, size in request.cases}
    measured_mesh(request, [times], "interlace", "shm")
    times[0, "all_to_all", 8 << 20] = [9e4]
    with pytest.raises(NoisyTimesError, match=r"all_to_all .* 90000 us, in other ops 889 us"):
        measured_mesh(request, [times], "interlace", "shm")


def test_the_slowest_rank_counts() -> None:
    key = (0, "all_gather", 1024)
    assert medians([{key: [1.0, 9.0, 2.0]}, {key: [5.0, 1.0, 3.0]}]) == {key: 5.0}


def test_the_longer_a_shard_takes_the_sooner_it_is_hidden() -> None:
    problem = Problem("all_gather_matmul", torch.float32, 256, 64, 1024, 2)  # 1 MiB of a rank
    edge = tuning.SMALLEST_PIPELINED_SHARD_US
    for gb_per_s, expected in ((0.5, "pipelined"), (2.0, "unfused")):
        link = Link(0, 2, "all_gather", (LinkProtocol(0, 0.0, gb_per_s),))
        named, source = tuning.by_calibration(problem, tuning.GatherTime(link, "2026-11-22"))
        assert (named, "2026-11-22" in source) == (expected, True)
        assert (link.us(2 << 20) >= edge) is (expected == "pipelined")


def test_requests_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    request = CalibrationRequest((2, 1, 2))
    assert {dim for dim, _, _ in request.cases} == {0, 2}
    assert mesh_of(CalibrateOptions()) == (2,)
    assert mesh_of(CalibrateOptions(mesh="2x3", world_size=6)) == (2, 3)
    for options, text in (
        (CalibrateOptions(mesh="2x3", world_size=4), "has 6 ranks, --world-size is 4"),
        (CalibrateOptions(mesh="2xb"), "--mesh must be like"),
        (CalibrateOptions(world_size=1), "a mesh must have 2 to"),
        (CalibrateOptions(backend="gloo"), "--backend needs ranks of torchrun"),
        (CalibrateOptions(repetitions=1), "--repetitions must be within"),
        (CalibrateOptions(), "there is no file to write"),
    ):
        with pytest.raises(ValueError, match=text):
            calibrate(PlainConsole(), options)
    assert calibrate(PlainConsole(), CalibrateOptions(dry_run=True, cache="x.json")) == 0
    said = capsys.readouterr().out
    assert "would measure 28 cases" in said and "x.json" in said
    options = CalibrateOptions(dry_run=True, json=True, cache="x.json")
    assert calibrate(PlainConsole(), options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cases"] == 28 and plan["mesh"] == [2] and plan["file"].endswith("x.json")


def test_the_compilers_model_takes_calibrated_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GB/s count the whole gathered tensor, of which a rank receives three quarters."""
    file = tmp_path / "calibration.json"
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    with pytest.raises(
        LookupError, match=r"no calibration of 4 ranks for cpu in .*calibrate --mesh 4"
    ):
        calibrated(4)
    calibration.add(measurement((4,), calibration.OWN), file)
    machine = calibrated(4)
    assert machine.name == "cpu, calibrated 2026-11-22" and machine.latency == pytest.approx(50e-6)
    assert machine.bandwidth == pytest.approx(3e9) and machine.flops == CPU.flops
    assert machine.fused_bandwidth / machine.bandwidth == CPU.fused_bandwidth / CPU.bandwidth
