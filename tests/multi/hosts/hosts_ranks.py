"""Ranks of test_hosts.py, on two hosts (``two_networks.py``).

Run as a script it starts ranks in both network namespaces and prints what every rank reports as JSON.
Where the kernel refuses namespaces, ranks are given names of hosts instead, and the report says why. Ranks
are forked from this process, for torch takes seconds to import.
"""

import contextlib
import gc
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from multi.hosts.two_networks import ADDRESSES, die_with_parent, enter, two_networks

HOSTS = (0, 0, 0, 1, 1)
"""The host of each rank."""

SECRET = "of the ranks of test_hosts.py"


def main() -> None:
    """Make the hosts, run :func:`rank_main` on every rank, print all reports."""
    holder, problem = 0, "not asked for" if "--pretend" in sys.argv else ""
    try:
        holder = 0 if problem else two_networks()
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    die_with_parent()
    os.environ["INTERLACE_SECRET"] = SECRET
    import torch.distributed.tensor  # noqa: F401  (once, for all ranks)

    from multi.hosts import failing_scenarios, hosts_scenarios  # noqa: F401

    gc.freeze()  # what all ranks share need not be looked through, and copied, at the end of each
    folder = pathlib.Path(tempfile.mkdtemp())
    children = []
    for rank, host in enumerate(HOSTS):
        child = os.fork()
        if child == 0:
            die_with_parent()
            if holder and host:
                enter(holder)
            rank_main(rank, not problem, folder)
            return  # to the end of the interpreter, with the default group still open
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    shutil.rmtree(folder)
    if holder:
        os.kill(holder, signal.SIGKILL)
    print(json.dumps({"problem": problem, "codes": codes, "reports": reports}))


# -- what ranks do -----------------------------------------------------------------------------


class Report:
    """What one rank has to say, by scenario; written at once, because ranks are killed."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._said = path, {}

    def __setitem__(self, scenario: str, value: Any) -> None:
        self._said[scenario] = value
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._said))
        partial.rename(self._path)


def rank_main(rank: int, separated: bool, folder: pathlib.Path) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from interlace.groups import groups
    from interlace.runtime.core.communicator import Communicator
    from interlace.runtime.places.connect import connect_place
    from interlace.runtime.places.hosts import host_map
    from multi.hosts import failing_scenarios, hosts_scenarios as scenarios

    torch.set_num_threads(1)
    report = Report(folder / f"{rank}.json")
    world_size = len(HOSTS)
    address = ADDRESSES[0] if separated else "127.0.0.1"
    chosen = folder / "port"
    if rank == 0:
        store = TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)
        chosen.with_suffix(".partial").write_text(str(store.port))
        chosen.with_suffix(".partial").rename(chosen)
    else:
        while not chosen.exists():
            time.sleep(0.01)
        store = TCPStore(address, int(chosen.read_text()), world_size, is_master=False)

    def connected(name: str, ranks: Sequence[int], host: str | None = None) -> Any:
        return connect_place(
            store,
            ranks.index(rank),
            len(ranks),
            timeout=300.0,
            name=name,
            host=host or (None if separated else f"host {HOSTS[rank]}"),
        )

    def join(name: str, ranks: Sequence[int], host: str | None = None) -> Communicator:
        return Communicator(connected(name, ranks, host), ranks)

    report["host"] = host_map.this_host()
    everyone = list(range(world_size))
    world = groups.install(connected("world", everyone))  # by which a backward finds its group
    report["place"] = [world.place.name, str(getattr(world.place, "map", ""))]
    for name, ranks in scenarios.GROUPS.items():
        group = world.split(ranks)
        if group is not None:
            for scenario in scenarios.ON_EACH_GROUP:
                with told(report, f"{scenario.__name__}/{name}"):
                    report[f"{scenario.__name__}/{name}"] = scenario(group)
            group.close()
        world.barrier()
    for scenario in scenarios.ON_WORLD:
        with told(report, scenario.__name__):
            report[scenario.__name__] = scenario(world)
    # the order of a sum of two cannot be told, so one rank says that it is on a third host
    third = join("three hosts", everyone, host="a third host" if rank == 1 else None)
    for scenario in scenarios.ON_THREE_HOSTS:
        with told(report, f"{scenario.__name__}/three hosts"):
            report[f"{scenario.__name__}/three hosts"] = scenario(third)
    third.close()
    for failing in failing_scenarios.FAILING:
        if rank in failing.ranks:
            group = join(failing.__name__, failing.ranks)
            group.place.set_timeout(failing.timeout)
            with told(report, failing.__name__):
                report[failing.__name__] = failing(group)
            group.close()
    report["end"] = True
    # the store's server must outlive its clients
    survivors = [r for r in everyone if r not in failing_scenarios.KILLED]
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < len(survivors):
        time.sleep(0.01)


@contextlib.contextmanager
def told(report: Report, scenario: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        report[scenario] = traceback.format_exc()
        raise


if __name__ == "__main__":
    main()
