"""``interlace.verify.lint``: each rule fires on a kernel that breaks it and names the line that does.

All kernels compile once per session, together; Triton's cache keeps them between sessions.
"""

import dataclasses
import doctest
import importlib.util
import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl

from interlace.kernels import signal
from interlace.kernels.arguments import Peers
from interlace.runtime.compiler.pool import _PROGRAM, compile_all
from interlace.runtime.compiler.request import Compilation, jitted_function
from interlace_verify.lint_check.check import RULES, LintReport, LintRequest, lint, lint_many
from interlace_verify.suite.jobs import running_children
from support import TRITON, mended
from tiers import few, thorough

MUTANTS = pathlib.Path(__file__).parents[1] / "mutant_kernels.py"


def load_mutants() -> ModuleType:
    """By path, under a name that no other process could import."""
    spec = importlib.util.spec_from_file_location("private_mutants", MUTANTS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = load_mutants()
STORE = {"data_ptr": "*i32", "slot_ptr": "*i64", "epoch": "i64"}
MATMUL = {name: "*bf16" for name in ("input_ptr", "weight_ptr", "output_ptr")}
MATMUL |= {"slots_ptr": "*i64", "epoch": "i64", "M": "i32", "N": "i32", "K": "i32"}
ALIGNED = ("input_ptr", "weight_ptr", "output_ptr", "M", "N", "K")
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
PIPELINED = {name: MATMUL[name] for name in MATMUL if name not in ("epoch", "M")}
WINDOW = {"window_ptr": "*fp32", "signals_ptr": "*i32", "output_ptr": "*fp32"}
SCALED = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "scales_ptr": "*u8", "output_ptr": "*fp32"}
PIPELINED_ALIGNED = tuple(name for name in ALIGNED if name != "M")


def request(kernel: str, signature: dict[str, str], **rest: Any) -> LintRequest:
    return LintRequest(getattr(mutants, kernel), signature, **rest)


def matmul(kernel: str, **rest: Any) -> LintRequest:
    return request(kernel, MATMUL, constexprs=TILES, divisible=ALIGNED, **rest)


# What is linted, and which rules must fire.
CASES: dict[str, tuple[LintRequest, set[str]]] = {
    "in a function": (request("helper_kernel", STORE, constexprs={"BLOCK": 1024}),
     set() if mended("release without barrier") else {"release without barrier"}),
    "assembly": (request("assembly_kernel", {"slot_ptr": "*i32", "data_ptr": "*i32"}), {"weak poll"}),
    "relaxed": (request("relaxed_kernel", {"slot_ptr": "*i64", "epoch": "i64"}, arch="sm_80"),
     {"weak poll"}),
    "volatile": (request("wait_kernel", {"slot_ptr": "*i64", "epoch": "i64"}), {"weak poll"}),
    "relaxed, then acquired": (request("fenced_kernel", {"slot_ptr": "*i32", "data_ptr": "*i32"}), set()),
    "relaxed for stores": (request("free_kernel", {"slot_ptr": "*i64", "epoch": "i64", "data_ptr": "*i32"}),
     set()),
    "plain": (request("plain_kernel", {"slot_ptr": "*i32", "epoch": "i32", "data_ptr": "*i32"}),
     {"dropped wait"}),
    "unused": (
        request("unused_kernel", {"slot_ptr": "*i32", "data_ptr": "*i32"}),
        {"dropped wait"} if TRITON < (3, 8) else set(),  # what orders is there in SASS
    ),
    "gpu scope": (request("narrow_kernel", STORE, constexprs={"BLOCK": 1024}, arch=100), {"narrow scope"}),
    "published": (matmul("matmul_reduce_scatter_kernel"),
     set() if mended("published descriptor store") else {"published descriptor store"}),
    "flattened by hand": (matmul("all_gather_matmul_kernel"), {"unfenced descriptor load", "early load"}),
    "flattened by Triton": (matmul("flattened_kernel", ignore=["unfenced descriptor load"]), set()),
    "pipelined": (request("pipelined_kernel", PIPELINED, constexprs={"BLOCK": 64},
     divisible=PIPELINED_ALIGNED, arch=80), {"early load"}),
    "unrolled": (request("unrolled_kernel", {"input_ptr": "*i32", "output_ptr": "*i32", "slots_ptr": "*i32",
     "rank": "i32"}, constexprs={"WORLD_SIZE": 3, "BLOCK": 256}), set()),
    "spills": (request("spilling_kernel", {"input_ptr": "*fp32", "output_ptr": "*fp32"},
     constexprs={"BLOCK": 8192}, num_warps=1), {"spills"}),
    "shared memory": (matmul("flattened_kernel", ignore=["unfenced descriptor load"], num_stages=8),
     {"shared memory"}),
    "refused": (request("refused_kernel", {"data_ptr": "*i32"}), {"does not compile"}),
    "kept by ptxas": (request("window_kernel", WINDOW, constexprs={"SOURCES": 1, "BLOCK": 1024}), set()),
    "weakened by ptxas": (request("window_kernel", WINDOW, constexprs={"SOURCES": 0, "BLOCK": 1024}),
     {"weakened by ptxas"}),
    "scaled on 10.0": (request("scaled_kernel", SCALED, constexprs={"N": 128}, arch=100), set()),
    "scaled on 9.0": (request("scaled_kernel", SCALED, constexprs={"N": 128}), {"no tensor cores"}),
    "shipped": (LintRequest(signal.wait_kernel, {"peers": Peers("*i64", "i32", "i32"), "source": "i32",
     "slot_byte": "i32"}, arch=100), set()),
}  # fmt: skip


BY_NAME = (
    "flattened by hand",
    "gpu scope",
    "in a function",
    "refused",
    "relaxed",
    "spills",
    "unrolled",
)
"""The cases that tests name; the others are thorough."""


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> dict[str, LintReport]:
    here = [item for item in request.session.items if item.path == pathlib.Path(__file__)]
    asked = [item.callspec.params.get("case") for item in here if hasattr(item, "callspec")]
    cases = {name: case[0] for name, case in CASES.items() if name in (*BY_NAME, *asked)}
    seen: list[LintReport] = []
    made = lint_many(list(cases.values()), on_report=seen.append)
    assert sorted(map(str, seen)) == sorted(map(str, made))
    return dict(zip(cases, made, strict=True))


def line_of(mark: str, kernel: str) -> int:
    lines = MUTANTS.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"def {kernel}("))
    return next(i + 1 for i, line in enumerate(lines) if i > first and mark in line)


@pytest.mark.parametrize("case", few(CASES, *BY_NAME))
def test_rules_fire_where_they_must(case: str, reports: dict[str, LintReport]) -> None:
    asked, rules = CASES[case]
    report = reports[case]
    assert {fault.rule for fault in report.findings} == rules, str(report)
    assert report.clean == (not rules)
    assert report.kernel == jitted_function(asked.kernel).__name__ and str(report.arch) in str(
        asked.arch
    )
    for rule in rules - {"spills", "shared memory"}:
        places = [fault.where for fault in report.findings if fault.rule == rule]
        function = "_signal" if case == "in a function" else report.kernel
        faulty = f"{MUTANTS.name}:{line_of('# faulty: ', function)}"
        assert any(place.startswith(faulty) for place in places), str(report)


def test_every_rule_has_a_kernel_that_breaks_it() -> None:
    fired = {rule for _, rules in CASES.values() for rule in rules}
    assert fired | {rule for rule in RULES if mended(rule)} == set(RULES)


@pytest.mark.skipif(mended("release without barrier"), reason="this Triton mends the mutant")
def test_inlined_function_and_kernel_are_both_named(reports: dict[str, LintReport]) -> None:
    (fault,) = reports["in a function"].findings
    inner = line_of("# faulty: inlined", "_signal")
    outer = line_of("# faulty: calls", "helper_kernel")
    name = MUTANTS.name
    assert fault.where == f"{name}:{inner} in _signal, called at {name}:{outer}"


def test_early_load_names_its_wait(reports: dict[str, LintReport]) -> None:
    fault = reports["flattened by hand"].findings[-1]
    wait = line_of("# waits", "all_gather_matmul_kernel")
    assert f"before the wait at {MUTANTS.name}:{wait}" in fault.message


def test_numbers(reports: dict[str, LintReport]) -> None:
    report = reports["flattened by hand"]
    assert 0 < report.registers <= 255 and report.shared > 2 * 128 * 64 * 2
    assert report.tensor_cores and (report.stack, report.spills) == (0, 0)
    assert reports["spills"].spills > 0 and reports["spills"].stack > 0
    assert reports["relaxed"].tensor_cores is None


def test_text_and_json(reports: dict[str, LintReport]) -> None:
    report = reports["gpu scope"]
    head, finding = str(report).splitlines()
    assert head.startswith("narrow_kernel for sm_100: ") and "registers" in head
    assert finding == f"  {report.findings[0]}" and ": narrow scope: atom" in finding
    assert str(reports["unrolled"]).splitlines()[1:] == ["  clean"]
    refused = str(reports["refused"])
    assert (
        "does not compile" in refused and "undefined_name" in refused and "registers" not in refused
    )
    assert (
        json.loads(json.dumps(dataclasses.asdict(report)))["findings"][0]["rule"] == "narrow scope"
    )


@thorough
def test_example() -> None:
    results = doctest.testmod(importlib.import_module("interlace_verify.lint_check.check"))
    assert results.attempted and not results.failed


# -- misuse ------------------------------------------------------------------------------------


@triton.jit
def small_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


GOOD: dict[str, Any] = {
    "kernel": small_kernel,
    "signature": {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    "constexprs": {"BLOCK": 16},
}


def nested() -> Any:
    @triton.jit
    def inner(x_ptr):
        tl.store(x_ptr, 1)

    return inner


def typed() -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def typed_kernel(x_ptr):\n    pass\n", "<stdin>", "exec"), namespace)

    return SimpleNamespace(fn=namespace["typed_kernel"])


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"kernel": print}, TypeError, "print"),
        ({"kernel": load_mutants}, TypeError, "@triton.jit"),
        ({"kernel": nested()}, ValueError, "top level"),
        ({"kernel": typed()}, ValueError, "<stdin>"),
        ({"arch": 70}, ValueError, "70"),
        ({"arch": "sm_90a"}, ValueError, "sm_90a"),
        ({"signature": {"x_ptr": "*fp32"}}, ValueError, "no type for n "),
        ({"signature": {"x_ptr": "*fp32", "n": "i32", "m": "i32"}}, ValueError, "'m'"),
        ({"signature": {"x_ptr": "*float", "n": "i32"}}, ValueError, r"x_ptr .*'\*float'"),
        ({"signature": {"x_ptr": 3, "n": "i32"}}, TypeError, "x_ptr"),
        ({"signature": {"x_ptr": "*fp32", "n": "constexpr"}}, ValueError, "value for n "),
        ({"signature": {"x_ptr": "*fp32", "n": "i32", "BLOCK": "i32"}}, ValueError, "BLOCK"),
        ({"constexprs": {}}, ValueError, "BLOCK"),
        ({"constexprs": {"BLOCK": 16, "TYPO": 1}}, ValueError, "TYPO"),
        ({"constexprs": {"BLOCK": [16]}}, TypeError, "BLOCK"),
        ({"constexprs": {"BLOCK": 16, "n": 1}}, ValueError, "n .*too"),
        ({"divisible": ["BLOCK"]}, ValueError, "BLOCK"),
        ({"num_warps": 3}, ValueError, "3"),
        ({"num_stages": 0}, ValueError, "num_stages"),
        ({"ignore": ["spill"]}, ValueError, "'spill'"),
    ],
)
def test_misuse_is_named_before_anything_compiles(
    change: dict[str, Any], error: type[Exception], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiles")

    monkeypatch.setattr(sys.modules["interlace_verify.lint_check.check"], "compile_all", refuse)
    with pytest.raises(error, match=names):
        lint(**(GOOD | change))


def test_constants_travel() -> None:
    constants = {"i": 3, "f": float("inf"), "s": "x", "b": True, "n": None, "t": tl.float8e4nv}
    sent = Compilation("m", "k", "k.py", 90, {}, constants, ("x",), ignore=("spills",))
    assert pickle.loads(pickle.dumps(sent)) == sent


# -- processes ---------------------------------------------------------------------------------

SCRIPT = """
    import os
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl
    from interlace_verify.lint_check.check import lint

    @triton.jit
    def script_kernel(x_ptr, BLOCK: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, BLOCK), 1)

    print(__name__ == "__main__", lint(script_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 16}).clean)
"""


@thorough
def test_script_that_lints_at_its_top_level(tmp_path: pathlib.Path) -> None:
    """Loaded by path in the worker, it must not start another worker there."""
    script = tmp_path / "linted"
    script.write_text(textwrap.dedent(SCRIPT))
    paths = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert run.stdout.split() == ["True", "True"], run.stderr


KERNEL = """
@triton.jit
def filed_kernel(x_ptr):
    tl.store(x_ptr, 1)
"""
ALONE = "import sys, triton, triton.language as tl\nassert 'torch' not in sys.modules\n"
WITH_MORE = (
    "import triton, triton.language as tl, interlace\nassert interlace.run and interlace.Work\n"
)


@thorough
def test_a_compiling_process_brings_no_torch_and_all_of_interlace_if_asked(
    tmp_path: pathlib.Path,
) -> None:
    requests = []
    for name, head in (("alone", ALONE), ("with_more", WITH_MORE)):
        file = tmp_path / f"{name}.py"
        file.write_text(head + KERNEL)
        requests.append(
            Compilation("no_such_module", "filed_kernel", str(file), 90, {"x_ptr": "*i32"}, {})
        )
    assert [made.error for made in compile_all(requests, workers=1)] == [None, None]


CRASHES = """
import os, pathlib, triton, triton.language as tl

with pathlib.Path(__file__).with_suffix(".loaded").open("a") as file:
    file.write("once ")

@tl.core.builtin
def crash(_semantic=None):
    os._exit(9)

@triton.jit
def crashing_kernel(x_ptr):
    tl.store(x_ptr, crash())
"""


def test_a_file_is_loaded_once_and_a_crash_is_of_its_kernel_alone(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "crashes.py"
    file.write_text(CRASHES + KERNEL)
    asked = [
        Compilation("no_such_module", kernel, str(file), arch, {"x_ptr": "*i32"}, {})
        for kernel, arch in (("filed_kernel", 80), ("crashing_kernel", 90), ("filed_kernel", 90))
    ]
    made = compile_all(asked)
    assert [each.error for each in made] == [None, "the compiler ended with code 9: ", None]
    assert file.with_suffix(".loaded").read_text() == "once "


def children() -> set[str]:
    return set(running_children())


def test_no_worker_outlives_a_call_that_fails() -> None:
    before = children()
    requests = [
        Compilation(
            "private_mutants", "helper_kernel", str(MUTANTS), 90, STORE | {}, {"BLOCK": block}
        )
        for block in (1024, 2048, 512)
    ]

    def interrupt(index: int, measurement: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all(requests, workers=1, on_result=interrupt)
    assert children() <= before


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_compiling_process_starts_whatever_is_on_the_path(safe_path: str) -> None:
    """In front is the program's own folder, or, with a safe path, the first of the caller's."""
    home = str(pathlib.Path(signal.__file__).parents[2])  # as PYTHONPATH=python has it
    paths = os.pathsep.join([home, *(path for path in sys.path if path not in ("", home))])
    settings = {"PYTHONSAFEPATH": safe_path, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(_PROGRAM)],
        input="",
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
