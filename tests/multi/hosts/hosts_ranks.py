"""Ranks of test_hosts.py, on two hosts (``two_networks.py``).

A process of its own starts ranks in both network namespaces. Where the kernel refuses namespaces, ranks are
given names of hosts instead, and it says why.
"""

import atexit
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multi.hosts.two_networks import ADDRESSES, die_with_parent, enter, two_networks

HOSTS = (0, 0, 0, 1, 1)
"""The host of each rank."""

RANKS = range(len(HOSTS))
SECRET = "of the ranks of test_hosts.py"

GROUPS = {
    "five ranks": ("gradients moving reducing rounding agreeing leaving_nothing refused sending answering "
                   "no_symmetric_memory", RANKS),
    "two and two, interleaved": ("agreeing sending fitting", [3, 0, 4, 1]),
    "three and one": ("agreeing sending", [0, 1, 2, 3]),
    "one and two": ("every_op moving agreeing", [4, 2, 1]),
    "one host": ("moving agreeing sending", [2, 0]),
    # the order of a sum of two cannot be told, so rank 1 says here that it is on a third host
    "three hosts": ("moving rounding agreeing", RANKS),
}  # fmt: skip
"""Scenarios (``hosts_scenarios.py``), by group."""

FAILING = ("aborting", "leaving", "dying")
"""Each in a group of its own, of all ranks. Rank 4 dies in the last."""

DIES = 4


def main(_: int, __: int, folder: str, end: Any) -> None:
    """Make the hosts, run :func:`rank_main` on every rank, say how all ended, and what went wrong."""
    holder, problem = 0, ""
    try:
        holder = two_networks()
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    die_with_parent()
    os.environ["INTERLACE_SECRET"] = SECRET
    from multi.hosts import hosts_scenarios  # noqa: F401  (once, for all ranks)

    gc.freeze()  # what all ranks share need not be looked through, and copied, at the end of each
    children = []
    for rank, host in enumerate(HOSTS):
        child = os.fork()
        if child == 0:
            die_with_parent()
            if holder and host:
                enter(holder)
            try:
                rank_main(rank, not problem, Path(folder))
            except BaseException:
                Path(folder, f"failed {rank}").write_text(traceback.format_exc())
                os._exit(1)
            atexit._run_exitfuncs()  # with the default group still open
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if holder:
        os.kill(holder, signal.SIGKILL)
    hosts = [Path(folder, f"host {rank}").read_text() for rank in RANKS]
    end.send((problem, hosts, codes, [path.read_text() for path in Path(folder).glob("failed *")]))


def rank_main(rank: int, separated: bool, folder: Path) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from interlace.groups import groups
    from interlace.runtime.core.communicator import Communicator
    from interlace.runtime.places.connect import connect_place
    from interlace.runtime.places.hosts import host_map
    from multi.hosts import hosts_scenarios

    torch.set_num_threads(1)
    (folder / f"host {rank}").write_text(host_map.this_host())
    address = ADDRESSES[0] if separated else "127.0.0.1"
    chosen = folder / "port"
    if rank == 0:
        store = TCPStore(address, 0, len(RANKS), is_master=True, wait_for_workers=False)
        chosen.with_suffix(".new").write_text(str(store.port))
        chosen.with_suffix(".new").rename(chosen)
    else:
        while not chosen.exists():
            time.sleep(0.01)
        store = TCPStore(address, int(chosen.read_text()), len(RANKS), is_master=False)

    def connected(name: str, ranks: Sequence[int], host: str | None = None) -> Any:
        host = host or (None if separated else f"host {HOSTS[rank]}")
        own = ranks.index(rank)
        return connect_place(store, own, len(ranks), timeout=300.0, name=name, host=host)

    def run(scenario: Callable[[Any], None], group: Any, name: str) -> None:
        try:
            scenario(group)
        except BaseException as error:
            raise AssertionError(f"rank {rank}: {scenario.__name__} of {name}") from error

    world = groups.install(connected("world", RANKS))  # by which a backward finds its group
    assert str(world.place.map) == "host 0: ranks [0, 1, 2]; host 1: ranks [3, 4]"
    third = "a third host" if rank == 1 else None
    three_hosts = Communicator(connected("three hosts", RANKS, third), RANKS)
    for name, (scenarios, ranks) in GROUPS.items():
        group = {"five ranks": world, "three hosts": three_hosts}.get(name) or world.split(ranks)
        if group is not None:
            for scenario in scenarios.split():
                run(getattr(hosts_scenarios, scenario), group, name)
        if group is not None and group is not world:
            group.close()
        world.barrier()
    for scenario in FAILING:
        group = Communicator(connected(scenario, RANKS), RANKS)
        run(getattr(hosts_scenarios, scenario), group, "five ranks")
        group.close()
    # the store's server must outlive its clients
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < DIES:
        time.sleep(0.01)
