"""``@ranks(2)``: a test whose body runs on every rank, in processes, in threads, or simulated.

The body asserts on its rank, so what fails names the rank. A test of processes is found by its module's
name there: it is imported, not sent, so it must be at the top level of its file. A test that needs ranks
several times calls functions that are decorated like this, with keywords.
"""

import functools
import importlib
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore

import interlace
from guard import MOST
from interlace.groups import groups
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.connect import connect_place
from interlace.runtime.processes import control
from processes import started

SECRET = {"INTERLACE_SECRET": "of this test"}  # variables of the environment
LONG = 2 * MOST  # no test lasts so long: a wait that has ended in one has not ended by this


def ranks(
    world_size: int = 2,
    *,
    place: str = "shm",
    hosts: int = 1,
    backend: str = "",
    gone: Collection[int] = (),
) -> Callable[..., Any]:
    """Run a test's body on ``world_size`` ranks.

    place : "shm", processes that tests of as many ranks share, "threads" of this process, which are ranks
        as processes are, or another place of ``interlace.run``.
    hosts : on so many hosts the default group counts its ranks.
    backend : the body has a default group of torch.distributed with this one.
    gone : ranks whose process is to end, or to become another program; processes are the test's own then.

    A parameter of the test that has the name of one of these counts instead, and so does the ``seed`` of
    "sim". Parameters and fixtures are sent to processes.
    """
    default = {"world_size": world_size, "place": place, "hosts": hosts, "backend": backend}

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            how = {name: given.get(name, value) for name, value in default.items()}
            size, where = how.pop("world_size"), how.pop("place")
            with tempfile.TemporaryDirectory() as folder:
                on_rank = functools.partial(
                    _on_rank, body.__module__, body.__qualname__, given, folder, **how
                )
                if gone:
                    _in_own_processes(on_rank, size, gone)
                elif where == "threads":
                    _in_threads(functools.partial(body, **given), size, how["hosts"])
                else:
                    interlace.run(on_rank, size, place=where, seed=given.get("seed", 0))

        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _on_rank(
    module: str, name: str, given: dict[str, Any], folder: str, hosts: int, backend: str
) -> None:
    with ExitStack() as around:
        if hosts > 1:
            around.enter_context(_on_hosts(folder, hosts))
        if backend:
            around.enter_context(world(f"{folder}/store", backend))
        getattr(importlib.import_module(module), name).body(**given)


@contextmanager
def world(path: Path | str, backend: str = "interlace") -> Iterator[Any]:
    """Make the default group of torch.distributed over all ranks, which meet in the file ``path``."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = FileStore(str(path), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# -- ranks of another group than interlace.run's ---------------------------------------------------


def of_rank_0(rank: int, folder: Path | str, address: str = "127.0.0.1") -> TCPStore:
    """Return a store that rank 0 serves, on a port that it writes to a file."""
    chosen = Path(folder) / "port"
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        chosen.with_suffix(".new").write_text(str(store.port))
        chosen.with_suffix(".new").rename(chosen)
        return store
    while not chosen.exists():
        time.sleep(1e-3)
    return TCPStore(address, int(chosen.read_text()), is_master=False)


def joined(
    rank: int, world_size: int, folder: Path | str, *, hosts: int = 2, timeout: float = LONG
) -> Communicator:
    """Join a process's group on this many hosts; with several hosts the store ends with rank 0."""
    store = of_rank_0(rank, folder) if hosts > 1 else FileStore(f"{folder}/ranks", world_size)
    with mock.patch.dict(os.environ, SECRET):
        group = _connected(store, rank, world_size, hosts)
    group.set_timeout(timeout)
    return group


def _connected(
    store: Store, rank: int, world_size: int, hosts: int, name: str = "joined"
) -> Communicator:
    host = f"host {rank * hosts // world_size}"
    place = connect_place(store, rank, world_size, timeout=LONG, name=name, host=host)
    assert place.name == ("hosts" if hosts > 1 else "shm")
    return Communicator(place, range(world_size))


@contextmanager
def _on_hosts(folder: str, hosts: int) -> Iterator[None]:
    """Make another default group of these ranks, on several hosts."""
    known = groups.default_group()
    with (
        mock.patch.dict(os.environ, SECRET),
        closing(joined(known.rank, known.world_size, folder, hosts=hosts)) as group,
    ):
        groups._default.set(group)
        try:
            yield
        finally:
            groups._default.set(known)


GONE = "its process is gone"


def _in_own_processes(on_rank: Callable[..., None], world_size: int, gone: Collection[int]) -> None:
    """Run it in new processes; only processes of the ranks ``gone`` may end without a report."""
    folder = on_rank.args[-1]  # type: ignore[attr-defined]
    with started(_as_process, world_size, folder, on_rank) as (_, ends):
        late: dict[Any, int] = dict(zip(ends, range(world_size), strict=True))
        while late:
            for end in multiprocessing.connection.wait([*late]):
                rank = late.pop(end)
                try:
                    said = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    said = GONE
                assert said == (GONE if rank in gone else ""), f"rank {rank}: {said}"


def _as_process(rank: int, world_size: int, folder: str, end: Any, on_rank: Any) -> None:
    """Run one of these processes; an error of its body goes through ``end``."""
    torch.set_num_threads(1)
    os.environ.update(SECRET)
    os.set_inheritable(end.fileno(), False)  # by another program, which may take this one's place
    said = ""
    try:
        group = joined(rank, world_size, folder, hosts=on_rank.keywords["hosts"])
        groups.install(group.place, all_threads=True)
        on_rank(hosts=1)
    except BaseException:
        said = traceback.format_exc()
    end.send(said)


# -- ranks that are threads ------------------------------------------------------------------------


def run(ranks: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Return the result or error of ``function(rank)`` by rank; ranks are threads."""

    def caught(rank: Any) -> Any:
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(caught, ranks))


def members(count: int, hosts: int = 1, name: str = "threads") -> list[Communicator]:
    """Return a group of threads, by rank."""
    store = HashStore()
    with mock.patch.dict(os.environ, SECRET):
        made = run(range(count), lambda rank: _connected(store, rank, count, hosts, name))
    for group in made:
        assert isinstance(group, Communicator), made
        # its words of the join would count like later ones
        group.place.group.control.own_view[control._WAITS // 8] = 0
    return made


def close(groups: Sequence[Communicator]) -> None:
    run(groups, Communicator.close)


def _in_threads(body: Callable[[], None], world_size: int, hosts: int) -> None:
    made = members(world_size, hosts)
    failed: list[BaseException] = []

    def main(group: Communicator) -> None:
        groups._default.set(group)
        try:
            body()
        except BaseException as error:
            failed.append(error)
            group.place.abort("a rank has failed")

    with mock.patch.dict(os.environ, SECRET):
        run(made, main)
        close(made)
    if failed:
        raise failed[0]
