"""Tools of the tests of ops: payloads, poison, delays, and running on simulated ranks."""

import gc
import os
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.kernels.signal import EPOCH_WORD, HEADER_WORDS
from interlace.runtime.compat import releases
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, Layout, Workspace
from interlace.runtime.places.sim.interpreter.session import program_function
from interlace.runtime.places.sim.place import SimPlace
from interlace.runtime.places.sim.scheduler.scheduler import Program, Scheduler
from interlace.runtime.places.sim.scheduler.strategies import Random, Task

# As a float of any width this is nan, as a signal slot -1, which is smaller than every epoch.
POISON_BYTE = 0xFF


def payload(
    rank: int, call: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return numbers that differ for each rank and call, and are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    whole = torch.randint(-64, 65, tuple(shape), generator=generator)
    if dtype.is_floating_point or dtype.is_complex:
        return (whole / 32).to(dtype)
    return (whole % 2 == 0) if dtype == torch.bool else whole.to(dtype)


def under_torchrun(command: str, *options: str) -> str:
    """Return the output of a ``torchrun`` command with these options; it must succeed."""
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, *options],
        capture_output=True,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shared_names() -> set[str]:
    """Return the names in /dev/shm, except those that foreign processes map."""
    parents: dict[int, int] = {}
    mapped: dict[int, set[str]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        about = Path(f"/proc/{pid}")
        with suppress(OSError):
            parents[pid] = int((about / "stat").read_text().rpartition(")")[2].split()[1])
            mapped[pid] = set(re.findall(r" /dev/shm/(\S+)", (about / "maps").read_text()))

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    foreign = {name for pid, names in mapped.items() if not ours(pid) for name in names}
    return set(os.listdir("/dev/shm")) - foreign


def resources() -> tuple[int, int]:
    """Return open descriptors and mapped segments of this process, after a garbage collection."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:interlace")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with nan, or the largest whole number, in place."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def poisoned() -> Iterator[Counter[str]]:
    """Fill workspaces and outputs with nan before every call, and count this.

    Memory is poisoned while no rank needs it or may write it: after its allocation, and at the
    end of each op before this rank gives its credit. If peers read this rank's region (a pulled op), the
    last rank to finish poisons it for all.
    """
    done: Counter[str] = Counter()
    ended: Counter[Any] = Counter()
    empty, empty_like = torch.empty, torch.empty_like
    meet, enqueue = SimPlace._meet, Communicator.enqueue

    def poisoned_output(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            done["outputs"] += 1
            return poison(make(*args, **kwargs))

        return made

    def poisoned_meet(self: SimPlace, box: dict[int, Any], doing: str) -> None:
        if "allocation" in doing:
            done["allocations"] += 1
            for part in box[self.rank].parts:
                part[HEADER_WORDS * WORD :] = POISON_BYTE
        meet(self, box, doing)

    def wipe(workspace: Workspace, layout: Layout) -> None:
        epoch = int(workspace.header(workspace.rank)[EPOCH_WORD])
        key = (tuple(workspace.buffer.peers.tolist()), epoch)
        ended[key] += 1
        ranks = [workspace.rank]
        if layout.pulled:
            ranks = list(range(workspace.world_size)) if ended[key] == workspace.world_size else []
        for rank in ranks:
            done["workspaces"] += 1
            workspace.buffer.peer_bytes[rank][workspace.data_offset :].fill_(POISON_BYTE)

    def poisoning_enqueue(
        self: Communicator, op: str, layout: Layout, body: Callable[[Workspace], None]
    ) -> Any:
        def with_poison(workspace: Workspace) -> None:
            body(workspace)
            self.compute.wait_event(self.copying.record())
            self.compute.call(lambda: wipe(workspace, layout), "poison")

        return enqueue(self, op, layout, with_poison)

    with (
        mock.patch.object(torch, "empty", poisoned_output(empty)),
        mock.patch.object(torch, "empty_like", poisoned_output(empty_like)),
        mock.patch.object(SimPlace, "_meet", poisoned_meet),
        mock.patch.object(Communicator, "enqueue", poisoning_enqueue),
    ):
        yield done


@contextmanager
def starved(slow: Callable[[Task], bool], *, chance: float = 0.02) -> Iterator[None]:
    """Let the tasks that ``slow`` picks run only now and then, while any other can run.

    This delay reveals a race: data that is only just published in time is late here.
    """
    choose = Random.choose

    def unfair(self: Random, tasks: Sequence[Task]) -> Task | None:
        fast = [task for task in tasks if not slow(task)]
        if fast and self._random.random() >= chance:
            task = choose(self, fast)
            if task is not None:
                return task
        return choose(self, tasks)

    with mock.patch.object(Random, "choose", unfair):
        yield


def slow_rank(rank: int) -> Callable[[Task], bool]:
    """Return a choice for :func:`starved`: everything of one rank but its user code."""
    return lambda task: task.rank == rank and task.who != "user code"


def schedule_digest() -> str:
    """Return the fingerprint of the schedule so far, on a rank."""
    place = default_group().place
    assert isinstance(place, SimPlace)
    return place.world.scheduler.digest()


def failure(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> BaseException:
    """The exception that ``interlace.run`` raises."""
    try:
        interlace.run(fn, world_size, *args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def noise(
    rank: int, call: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return numbers like :func:`payload`, but such that must be rounded."""
    generator = torch.Generator().manual_seed(77 + 1000 * call + rank)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


@contextmanager
def compiled_anew(**options: Any) -> Iterator[None]:
    """Let Inductor make code of known graphs again, but g++ compile only new code.

    ``force_disable_caches`` would start g++ on every rank, for seconds.
    """
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, **options),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same values in other strides; "expanded" repeats the first row."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
        wide = wide.to(tensor.dtype)
        view = wide[..., 1::2]
        return view.copy_(tensor)
    if layout == "offset":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
    return tensor


MENDED = {"published descriptor store": (3, 8), "release without barrier": (3, 9)}
"""By rule of lint, the Triton whose compiler mends kernels that break it; older ones need the rule."""


TRITON, TORCH = (releases.release(releases.installed_release(name)) for name in ("Triton", "torch"))

SCALES_BY_ROW = TORCH >= (2, 12)
"""Whether a CPU multiplies fp8 matrices with a scale for each row, in ``torch._scaled_mm``."""


def mended(rule: str) -> bool:
    """Whether the installed Triton compiles kernels that break ``rule`` so that they do not."""
    return MENDED.get(rule, (99, 0)) <= TRITON


def run_alone(launch: KernelLaunch) -> None:
    """Run the programs of a kernel on rank 0 once more, while the other ranks do nothing."""
    scheduler = Scheduler(0, block_polls=False, timeout=300)

    def programs() -> None:
        body = program_function(launch.kernel, launch.arguments)
        for index in range(launch.extents[0]):
            program = Program(launch.name, launch.op, index, (index, 0, 0), launch.extents)
            scheduler.spawn(0, f"program {index}", body, program=program)

    scheduler.spawn(0, "host", programs)
    scheduler.run()
