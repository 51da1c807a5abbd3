"""interlace's place ``hosts`` against gloo: ranks on two hosts, network namespaces of this machine.

``measurements`` starts this module in a separate process. It makes the namespaces (``two_networks.py`` in
``tests/multi/hosts``), joined by a pair of virtual cables, and forks the ranks: the first half of them on
one host, the others on the second. Every op is called as a user calls it, on two groups of the same
processes, and timed as in ``torch_backend.py``. ``bytes`` is the size of the input tensor on each rank.
``exchange`` is a message to the rank of the same number on the other host, and one from it.

Both hosts share this machine's cores: without a limit on the cable its speed is that of the processors.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cpu.measure import Candidates, Case, Measurement, Shape, measure

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
RATES = {"veth": "", "1 Gbit/s": "1gbit"}
TESTS = Path(__file__).parents[2] / "tests"
REFUSED = 3  # exit status: no namespaces here

Op = Callable[[Any], object]


def ops(nbytes: int, rank: int, world_size: int) -> dict[str, Op]:
    import torch
    import torch.distributed as dist
    from cpu import torch_backend

    n, peer = nbytes // 4, (rank + world_size // 2) % world_size
    tensor, other, part = (torch.full((size,), 0.0) for size in (n, n, n // world_size))
    parts = [torch.full((n // world_size,), 0.0) for _ in range(world_size)]
    gathered = parts if rank == 0 else None

    def exchange(group: Any) -> None:
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
        ):
            work.wait()

    return {
        **torch_backend.ops(nbytes, world_size),
        "reduce": lambda group: dist.reduce(tensor, 0, group=group),
        "gather": lambda group: dist.gather(part, gathered, 0, group=group),
        "scatter": lambda group: dist.scatter(part, gathered, 0, group=group),
        "exchange": exchange,
    }


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    found: list[Measurement] = []
    for rate in RATES if world_size > 1 else ():
        found += in_namespaces(rate, world_size, repetitions, SIZES)
    return found


def in_namespaces(
    rate: str, world_size: int, repetitions: int, sizes: tuple[int, ...], *only: str
) -> list[Measurement]:
    """Those over a cable of this rate, of these sizes, and of the ops named ``only``, or of all."""
    folders = [str(TESTS), str(TESTS.parent / "benchmarks"), *sys.path]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, rate, str(world_size), str(repetitions), ",".join(map(str, sizes))]
        answer = subprocess.run(
            [sys.executable, "-m", "cpu.hosts", *arguments, *only],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
            stdout=subprocess.PIPE,
            text=True,
        )
        if answer.returncode == REFUSED:
            raise SystemExit(f"no benchmark of hosts here: {answer.stdout.strip()}")
        answer.check_returncode()
        found = json.loads(Path(folder, "found").read_text())
    return [Measurement(**fields) for fields in found]


def main() -> int:
    folder, rate, ranks, repetitions, sizes, *only = sys.argv[1:]
    world_size = int(ranks)
    from multi.hosts import two_networks

    try:
        holder = two_networks.two_networks(RATES[rate])
    except OSError as error:
        print(f"this machine gives out no network namespaces ({error})")
        return REFUSED
    two_networks.die_with_parent()
    import torch.distributed.tensor  # noqa: F401  (once, for all ranks)

    os.environ["INTERLACE_SECRET"] = "of a benchmark"
    os.environ["MASTER_ADDR"] = two_networks.ADDRESSES[0]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            two_networks.die_with_parent()
            host = rank * 2 // world_size
            if host:
                two_networks.enter(holder)
            os.environ["GLOO_SOCKET_IFNAME"] = two_networks.CABLES[host]
            every = [int(size) for size in sizes.split(",")]
            found = on_rank(folder, rank, world_size, int(repetitions), rate, every, only)
            if rank == 0:
                Path(folder, "found").write_text(json.dumps([asdict(each) for each in found]))
            return 0
        children.append(child)
    return int(any([os.waitpid(child, 0)[1] for child in children]))


def on_rank(
    folder: str, rank: int, world_size: int, repetitions: int, rate: str, sizes: list[int],
    only: list[str],
) -> list[Measurement]:  # fmt: skip
    import torch
    import torch.distributed as dist

    import interlace

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    bound = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=bound
    )
    interlace.init(device="cpu")
    gloo: Any = dist.group.WORLD
    ours = dist.new_group(backend="interlace")
    found = []
    for nbytes in sizes:
        for name, op in ops(nbytes, rank, world_size).items():
            if not only or name in only:
                both: Candidates = {"gloo": partial(op, gloo), "interlace": partial(op, ours)}
                shape: Shape = {"bytes": nbytes, "dtype": "float32"}
                case = Case(f"{name}, {rate}, hosts", shape, "gloo", both)
                found.append(measure(case, repetitions, calls=None, warm_up=0))
    dist.barrier()
    interlace.shutdown()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.exit(main())
