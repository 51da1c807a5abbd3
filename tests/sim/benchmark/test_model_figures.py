"""The model of the fused ops against published figures, measured ones and docs/explanation/model.md."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.benchmark.model_support import machine, module
from stand_ins.replaced import replaced


@pytest.fixture(scope="module")
def compared() -> list[Any]:
    found: list[Any] = module("model.published").compare_all()
    return found


# -- published and measured figures ------------------------------------------------------------------


def test_every_parameter_has_a_source() -> None:
    machines = module("model.simulation.machines")
    for each in machines.MACHINES.values():
        assert set(each.sources) == set(machines.PARAMETERS)
        for name, source in each.sources.items():
            assert source.split(":")[0] in machines.KINDS, (each.name, name, source)
            if not source.startswith("assumed"):
                assert len(source) > 15, (each.name, name, source)


def test_fitted_parameters_are_fitted() -> None:
    """Other values of the parameter are hardly better."""
    fits = module("model.fit").FITS
    for fit in fits:
        machines = module("model.simulation.machines").MACHINES
        assert machines[fit.machine].sources[fit.parameter].startswith("fitted: ")
        per_figure = 1e-3 * len(fit.errors(machines[fit.machine]))
        assert fit.loss(fit.stored()) <= fit.loss(fit.best(12)) + 2 * per_figure, fit.parameter
        assert fit.loss(1.5 * fit.stored()) > fit.loss(fit.stored()), fit.parameter
    named = {(fit.machine, fit.parameter) for fit in fits}
    for name, each in module("model.simulation.machines").MACHINES.items():
        for parameter, source in each.sources.items():
            if source.startswith("fitted: ") and "taken over" not in source:
                base = name if (name, parameter) in named else "h100x8"
                assert (base, parameter) in named, (name, parameter)


def test_published_speedups_are_met_as_the_page_says(compared: list[Any]) -> None:
    assert len(compared) == 67
    for each in compared:
        case = each.published
        if case.machine == "h800x8":
            assert each.within, (case, each.predicted)
        if not each.within:
            assert each.why not in ("", "not known"), case
            assert case.shape.m <= 4096 and case.machine == "h100x8-500w", case
    large = [each for each in compared if each.published.shape.m >= 4096]
    assert sum(not each.within for each in large) == 1
    held_out = [each for each in compared if each.published.held_out]
    assert sum(each.within for each in held_out) > 0.75 * len(held_out)
    assert len(compared) - len(held_out) < 6


def test_the_page_shows_what_the_script_prints(compared: list[Any]) -> None:
    tables, model = module("model.tables"), module("predict")
    texts, here = [page.read_text() for page in model.PAGES], model.calibrated(machine())
    made = [
        tables.parameters(here),
        tables.published(compared),
        tables.summary(compared),
        tables.outside(compared),
        tables.not_modelled(),
        tables.one_node(here, lambda said: None),
    ]
    for text in texts:
        assert model.page_with(text, made) == text, "run benchmarks/predict.py --docs"
    names = [match[1] for text in texts for match in model.MARK.findall(text)]
    assert set(names) > {table.name for table in made} and len(names) == len(set(names))
    for image in ("published", "rows", "chunks", "timeline", "nodes"):
        assert (model.IMAGES / f"model-{image}.png").exists()


def result_file(folder: Path, device: str, power: float, link: float, correct: bool = True) -> None:
    """Write the results of gpu.py on a machine with this power and PCIe bandwidth."""
    real = machine("h200-pcie").with_values("assumed: test", power_tflops=power)
    library = module("model.simulation.kernels").library_us
    records = []
    for m in (2048, 8192):
        times = {"torch.mm": {"median": library(real, m, 7168, 8192)}}
        case = f"Llama-70B up, {m} x 7168 x 8192"
        records.append({"part": "matmul", "case": case, "microseconds": times, "correct": correct})
    moved = 8192 * 8192 * 2 // 2
    times = {"transfer": {"median": moved / link / 1e3}, "fused": {"median": 1500.0}}
    case = "copy engine, W=2, 8192 x 7168 x 8192"
    records.append({"part": "slow-link", "case": case, "microseconds": times, "correct": correct})
    document = {"device": device, "date": "2026-11-22", "records": records}
    (folder / "gpu-test.json").write_text(json.dumps(document))


def test_right_measured_figures_replace_published_ones(tmp_path: Path) -> None:
    calibration = module("model.fit")
    assert calibration.calibrated(machine("h200-pcie"), tmp_path) is machine("h200-pcie")
    assert list(calibration.compare_measured(machine("h200-pcie"), tmp_path)) == []
    result_file(tmp_path, "NVIDIA H200", 640.0, 48.0)
    found = calibration.calibrated(machine("h200-pcie"), tmp_path)
    assert found.power_tflops == pytest.approx(640.0, rel=0.01)
    assert found.link_gbs == pytest.approx(48.0)
    assert found.sources["link_gbs"] == "measured: benchmarks/results/gpu-test.json"
    ((_, _, measured_us, predicted_us),) = calibration.compare_measured(found, tmp_path)
    assert measured_us == 1500.0 and predicted_us > 1000
    assert calibration.calibrated(machine("h100x8"), tmp_path) is machine("h100x8")
    result_file(tmp_path, "NVIDIA H200", 640.0, 48.0, correct=False)
    known = machine("h200x8")
    assert calibration.calibrated(known, tmp_path).power_tflops == known.power_tflops


# -- the command -------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "model.json"
    arguments = ["--machine", "h200-pcie", "--json", str(written)]
    assert module("predict").main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Predicted microseconds on h200-pcie" in printed and "held out" in printed
    document = json.loads(written.read_text())
    assert document["what"].startswith("predicted")
    assert document["parameters"]["link_gbs"]["source"].startswith("assumed")
    assert {table["name"] for table in document["tables"]} >= {"published", "one-gpu"}


def test_one_table_and_the_plot_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--table", "nodes", "--nodes", "2", "--plot", str(tmp_path)]
    assert module("predict").main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Predicted microseconds on nodes of h100x8")
    assert "Parameters of" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["model-nodes.png"]


def test_without_matplotlib_it_says_what_to_install() -> None:
    missing = replaced((sys.modules, "matplotlib.figure", None))
    with missing, pytest.raises(ValueError, match=r"pip install 'interlace\[plot\]'"):
        module("predict").main(["--plot", "nowhere"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "/no/such/model.json"], "the folder does not exist"),
        (["--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["--table", "hat"], "h100x8 has no table 'hat'; it has parameters, published"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_computed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module("predict").main(arguments)
    found = capsys.readouterr()
    assert said in found.err and not found.out
