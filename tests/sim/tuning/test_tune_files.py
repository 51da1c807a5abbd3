"""Files of ``interlace tune``: never somebody else's, and found out before it measures."""

import functools
import io
import json
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from cases.damage import read_100000_damaged
from interlace.cli import main
from interlace.cli.commands import tune as command
from interlace.cli.commands.tune import TuneOptions
from interlace.runtime.tuning import calibration, files, files as cache
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh
from interlace.runtime.tuning.files import FILE, CacheRow, MeasuredFile, NotOursError, TunedMachine
from stand_ins.replaced import replaced
from tiers import thorough

HERE = TunedMachine("a GPU", "cuda", "3.7.1", "0.1.0")
ROW = CacheRow(
    "all_gather_matmul", "float32", "even", 2, 8, 16, 16, "fused", {"fused": {"chunks": 3}}
)
GOOD = {"format": cache.FORMAT, "version": cache.VERSION, "machines": []}


def with_row(**changes: Any) -> str:
    """Return a file whose one row is changed."""
    return with_machine(rows=[{**cache.asdict(ROW), **changes}])


def with_machine(**changes: Any) -> str:
    return json.dumps({**GOOD, "machines": [{**vars(HERE), "rows": [], **changes}]})


FOREIGN = {
    "empty": "",
    "text": "hello",
    "text with the name of the format": 'see "interlace tuning" in the docs',
    "JSON of somebody else": json.dumps({"format": "other"}),
    "no object": "[1, 2]",
    "an older version": json.dumps({**GOOD, "version": 0}),
    "a newer version": json.dumps({**GOOD, "version": 99}),
    "no machines": json.dumps({"format": cache.FORMAT, "version": cache.VERSION}),
    "machines are a number": json.dumps({**GOOD, "machines": 3}),
    "cut off": json.dumps(GOOD)[:-3],
    "deep": "[" * 100_000,
    "no text": "\udcff\udcfe",
    "a device that is a list": with_machine(device=["a"]),
    "unknown column": with_row(colour="red"),
    "unknown algorithm": with_row(algorithm="magic"),
    **{
        f"{name} is {wrong}": with_row(**{name: wrong})
        for name, wrong in {
            "rows": 0, "op": 3, "dtype": None, "extents": ["even"], "date": 2026, "world": 3,
            "columns": 1 << 70, "inner": True, "algorithm": ["fused"], "shape": [1, "2"],
            "ranks": -1, "default_us": float("nan"), "microseconds": {"fused": "1"},
        }.items()
    },
    **{
        f"{name} is {wrong}": with_row(values={"fused": {name: wrong}})
        for name, wrong in {"block_q": 3, "chunks": "3", "num_stages": -1, "block_m": 48}.items()
    },
}  # fmt: skip


def tune(file: pathlib.Path, out: io.StringIO | None = None) -> int:
    options = TuneOptions(
        op=("all_gather_matmul",), m="16", n="16", k="16", place="sim", budget=0.2, cache=str(file)
    )
    return command.tune(Console(file=out or io.StringIO(), width=250), options)


@pytest.fixture
def unmeasured() -> Iterator[None]:
    def fail(*arguments: Any) -> Any:
        pytest.fail("measured, though nothing can be written")

    with replaced((command, "_measure", fail)):
        yield


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.usefixtures("unmeasured")
def test_what_is_no_cache_of_this_format_is_named_once_and_stays(
    what: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "notes.json"
    held = FOREIGN[what].encode(errors="surrogateescape")
    file.write_bytes(held)
    with pytest.warns(RuntimeWarning, match="tuning cache not used") as warned:
        assert cache.rows_for(HERE, file) == ()
    assert len(warned) == 1 and str(file) in str(warned[0].message)
    for write in (lambda: cache.add(HERE, [ROW], file), lambda: tune(file)):
        with pytest.raises(NotOursError, match="left as it is") as said:
            write()
        assert str(file) in str(said.value)
    assert file.read_bytes() == held


def test_the_row_that_damage_is_done_to_is_good(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    file.write_text(with_row())
    assert list(cache.rows_for(HERE, file)) == [ROW]


def is_refused(file: pathlib.Path, why: str) -> None:
    with pytest.raises(NotOursError, match=why):
        tune(file)
    with pytest.warns(RuntimeWarning, match=why):
        assert cache.rows_for(HERE, file) == ()


@pytest.mark.usefixtures("unmeasured")
def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (tmp_path, pipe, pathlib.Path("/dev/full")):
        is_refused(file, "is not a regular file")
    large = tmp_path / "large.json"
    cache.add(HERE, [ROW], large)
    with replaced((files, "MOST_BYTES", 100)):
        is_refused(large, "more than 100")


@pytest.mark.usefixtures("unmeasured")
def test_a_place_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for file in ("/proc/interlace/tune.json", f"{tmp_path}/file/tune.json", f"{tmp_path}/loop"):
        with pytest.raises(OSError, match=file):
            tune(pathlib.Path(file))


@pytest.mark.usefixtures("unmeasured")
def test_a_file_or_folder_without_permission(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's answer counts, because root may write everywhere."""
    file = tmp_path / "tune.json"
    cache.add(HERE, [ROW], file)
    read_only = replaced((os, "access", lambda path, mode: False))
    with read_only, pytest.raises(OSError, match="cannot be written: it is read-only"):
        tune(file)

    def refuse(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with replaced((os, "open", refuse)):
        arguments = ["tune", "all_gather_matmul", "--place", "sim", "--cache", str(file)]
        assert main.run(arguments) == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


def test_figures_are_printed_though_they_cannot_be_written(tmp_path: pathlib.Path) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    out = io.StringIO()
    with replaced((cache, "add", full)), pytest.raises(OSError, match="No space left"):
        tune(tmp_path / "tune.json", out)
    assert "default" in out.getvalue() and "candidates tried" in out.getvalue()
    assert "written" not in out.getvalue()


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def test_the_mode_of_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    with umask(0o022):
        cache.add(HERE, [ROW], file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        file.chmod(0o664)
        cache.add(HERE, [ROW], file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o664


def test_a_link_stays_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.json", tmp_path / "tune.json"
    link.symlink_to(target)
    for _ in range(2):  # to a file that is not there yet, then to one that is
        FILE.refuse_unwritable(link)
        cache.add(HERE, [ROW], link)
        assert link.is_symlink() and not target.is_symlink()
        assert list(cache.rows_for(HERE, target)) == [ROW]
    assert sorted(path.name for path in target.parent.iterdir()) == ["real.json", "real.json.lock"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tune.json"]


def test_shapes_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "shapes"
    file.write_text("# Llama\n1K 3584 8192\n\n2048x1792x4096  # small\n")
    shapes = [(1024, 3584, 8192), (2048, 1792, 4096)]
    given = TuneOptions(("all_gather_matmul", "all_reduce_norm"), shapes=str(file), place="shm")
    jobs = [(op, shape[:end]) for op, end in zip(given.op, (3, 2), strict=True) for shape in shapes]
    assert command.jobs_of(given) == jobs, "each takes the sizes that it has"
    file.write_text("1 2 3\n4 5\n")
    with pytest.raises(ValueError, match=r"line 2: '4 5' must be three numbers"):
        command.jobs_of(TuneOptions(shapes=str(file), place="sim"))


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: pathlib.Path) -> None:
    precious, file = tmp_path / "precious", tmp_path / "tune.json"
    precious.write_text("all of it")
    (tmp_path / "tune.json.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), files._hold_lock(file):
        pass
    assert precious.read_text() == "all of it"


def calibrated(file: pathlib.Path) -> MeasuredFile[Any]:
    protocols = (LinkProtocol(0, 31.0, 1.9), LinkProtocol(1 << 16, 50.0, 3.5))
    links = tuple(Link(0, 2, op, protocols) for op in calibration.OPS)
    mesh = MeasuredMesh("interlace", (2,), "2026-11-22", "2.13.0", "0.1.0", "shm", links)
    calibration.add(mesh, file)
    return calibration.file_of("cpu")


def tuned(file: pathlib.Path) -> MeasuredFile[Any]:
    cache.add(HERE, [ROW], file)
    return FILE


@thorough
@pytest.mark.parametrize("made", [tuned, calibrated])
def test_100000_damaged_ones_are_refused(
    made: Callable[[pathlib.Path], MeasuredFile[Any]], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "file.json"
    content = functools.partial(made(file).content, file)
    assert content()
    assert read_100000_damaged(file, content, NotOursError) > 50_000
