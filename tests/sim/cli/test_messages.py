"""The words of the command line: help, errors before anything begins, lines of progress."""

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest

from interlace.benchmark.figures import Spread
from interlace.benchmark.kernel import ALGORITHM
from interlace.benchmark.requests import BenchRow, MeasuredSize, SizeResult
from interlace.cli import main
from interlace.cli.commands import doctor
from interlace.cli.commands.bench import notes as notes_of
from interlace.output import consoles, files
from interlace.output.options import arches
from interlace_verify.suite import jobs


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    printed = capsys.readouterr()
    assert printed.out == main.parser().format_help() and not printed.err


# exit statuses of commands that run to the end, besides 0
RETURNED = {"check": [1, 3]} | {
    name: [1] for name in ("demo", "doctor", "build", "verify", "bench", "tune")
}


def test_the_help_of_a_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for name, line in main.COMMANDS.items():
        with pytest.raises(SystemExit) as ended:
            main.run([name, "--help"])
        printed = capsys.readouterr().out
        first = (main.options_of(name).__doc__ or "").splitlines()[0]
        assert ended.value.code == 0 and first in printed and line == first.rstrip(".")
        after = printed.partition("exit status:\n")[2]
        numbers = [int(text.split()[0]) for text in after.splitlines()]
        expected = {0, 2, 130, 143, *RETURNED.get(name, [])}
        assert numbers == sorted(expected), name


SCRIPT = str(pathlib.Path(sysconfig.get_path("scripts"), "interlace"))
RIGHT = ["", "--help", "--version", "inspect --help"]
WRONG = ["inspect nothing", "inspct", "-v"]


@pytest.mark.parametrize(
    ("called", "given"),
    [*(("-minterlace", each) for each in [*RIGHT, *WRONG]), (SCRIPT, "--help")],
)
def test_help_and_inspect_import_neither_torch_nor_triton(called: str, given: str) -> None:
    command = [sys.executable, "-X", "importtime", called, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    imported = set(re.findall(r"\|\s+(\w+)(?:\.[\w.]+)?$", done.stderr, re.MULTILINE))
    heavy = {"torch", "triton"} if given.startswith("inspect") else {"torch", "triton", "numpy"}
    assert "interlace" in imported and not imported & heavy
    assert done.returncode == (2 if given in WRONG else 0), done.stderr[-300:]


INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
"""


@pytest.mark.parametrize("called", ["inspect", "doctor"])
def test_ctrl_c_while_a_command_imports_prints_nothing(called: str, tmp_path: pathlib.Path) -> None:
    module = "interlace.cli.main" if called == "inspect" else "torch"
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED.replace("MODULE", repr(module)))
    command = [sys.executable, "-m", "interlace", called]
    there = dict(os.environ, PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, env=there)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_command_behind_an_option_is_one_too() -> None:
    assert main.needs_torch(["-v", "bench"]) and not main.needs_torch(["inspect", "bench"])


def test_brackets_of_an_error_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    broken = ValueError("pip install 'interlace[plot]'\n[red]more[/red]")
    with mock.patch.object(doctor, "collect", side_effect=broken):
        assert main.run(["doctor"]) == 2
    printed = capsys.readouterr().err
    assert printed == "error: pip install 'interlace[plot]'\n[red]more[/red]\n"


@pytest.mark.parametrize("command", ["demo", "bench all_reduce", "tune", "calibrate"])
def test_ranks_and_world_size_are_two_names_of_one_option(command: str) -> None:
    both = [
        main.parser().parse_args([*command.split(), f"--{name}", "3"])
        for name in ("ranks", "world-size")
    ]
    assert vars(both[0]) == vars(both[1])
    assert 3 in vars(both[0]).values()


def test_architectures_have_two_spellings() -> None:
    assert arches("sm_86,90") == [86, 90]


def test_files_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    """Devices may have one name. ``refusals.txt`` has the options of commands."""
    (tmp_path / "file.svg").touch()
    (tmp_path / "link.svg").symlink_to("file.svg")
    with contextlib.chdir(tmp_path):
        files.refuse_outputs({"--json": "/dev/null", "--html": "/dev/null", "--plot": "other.svg"})
        with pytest.raises(ValueError, match="--html and --sarif name the same file"):
            files.refuse_outputs({"--html": "./file.svg", "--sarif": "link.svg"})


def test_arguments_that_functools_gives_are_not_missed() -> None:
    assert jobs.parameters_without_default(round) == ["number"]
    assert not jobs.parameters_without_default(functools.partial(round, 4))


@pytest.mark.parametrize("shown", [0.25, -1.95])
def test_an_overlap_below_0_is_explained(shown: float) -> None:
    row = BenchRow("fused", ALGORITHM, 1, Spread.of([1.0]), [1.0], 0.0, "", 0, overlap=shown)
    measured = MeasuredSize(
        op="all_gather_matmul",
        shape={"m": 64},
        nbytes=64,
        bus_factor=None,
        flops=0.0,
        place="shm",
        device="cpu",
        world_size=2,
        dtype="float32",
        format="",
        cache_bytes=0,
        left_out=[],
        rows=[row],
    )
    notes = notes_of([SizeResult(measured)])
    assert any("one after the other" in note for note in notes) is (shown < 0)


# -- progress --------------------------------------------------------------------------------------


def test_lines_say_how_far_it_is_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    clock = 0.0
    step = consoles.lines("compiling", 40, now=lambda: clock)
    for _ in range(40):
        clock += 3.0
        step()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling: 0 of 40, 0 s"
    assert lines[1] == "compiling: 4 of 40, 12 s, about 108 s left"
    assert lines[-1] == "compiling: 40 of 40, 120 s" and len(lines) == 11


def test_where_the_count_is_not_known_there_is_no_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = 0.0
    step = consoles.lines("compiling", None, now=lambda: clock)
    clock = consoles.LINE_PERIOD
    step("a report")
    assert capsys.readouterr().err.splitlines()[1] == "compiling: 1, 10 s"


def test_commands_print_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with consoles.count_in_bar() as begin:
        begin("running", 2)
    with consoles.Progress("bench", 2) as shown:
        shown.begin(1, "all_reduce")
    assert capsys.readouterr().err.splitlines() == ["running: 0 of 2, 0 s", "2 of 2: all_reduce"]


def test_on_a_terminal_they_draw_bars(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = mock.patch.dict(os.environ, {"FORCE_COLOR": "1", "TERM": "xterm"})
    with terminal, consoles.count_in_bar() as begin:
        begin("running", 2)
    printed = capsys.readouterr().err
    assert "0/2" in printed and "running: 0 of 2" not in printed
