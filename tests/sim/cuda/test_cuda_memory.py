"""Sharing of GPU memory by processes, without a GPU: torch's rendezvous, CUDA IPC, their refusals."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d

from interlace.runtime.compat.torch_groups import tensor_over
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.places.gpu import memory as cuda_memory
from interlace.runtime.places.gpu.memory import (
    ExchangeStore,
    IpcMemory,
    MemoryRefused,
    TorchMemory,
)
from interlace.runtime.places.gpu.process_place import CudaPlace
from stand_ins.fake_host import ThreadHost, on_hosts
from stand_ins.replaced import replaced
from tiers import thorough

CPU = torch.device("cpu")
HANDLE_BYTES = 64  # the length of a cudaIpcMemHandle_t
_c10d: Any = c10d


# -- torch's rendezvous --------------------------------------------------------------------------


def torch_all_gather(store: Any, prefix: int, rank: int, world_size: int, value: bytes) -> Any:
    """``c10d::symmetric_memory::StoreExchange::all_gather`` of torch 2.11, key by key."""
    keys = [f"CUDASymmetricMemory/{prefix}/{r}" for r in range(world_size)]
    store.set(keys[rank], value)
    values = []
    for peer in range(world_size):
        if peer == rank:
            values.append(value)
        else:
            store.wait([keys[peer]])
            values.append(store.get(keys[peer]))
    return values


def torch_213_all_gather(store: Any, prefix: int, rank: int, world_size: int, value: bytes) -> Any:
    """The same in torch 2.13."""
    keys = [f"CUDASymmetricMemory/{prefix}/{r}" for r in range(world_size)]
    store.set(keys[rank], value)
    return store.multi_get(keys)


@pytest.mark.parametrize("all_gather", [torch_all_gather, torch_213_all_gather])
def test_the_store_does_what_torch_asks_of_one(all_gather: Any) -> None:
    """The calls go through a C++ store, and ranks count their rounds differently."""

    def on_rank(host: ThreadHost) -> Any:
        rank, world_size = host.rank, host.world_size
        own = ExchangeStore(host.exchange)
        store = c10d.PrefixStore("", own)
        seen = []
        for number in range(3):
            value = f"{number} of {rank}".encode()
            seen.append(all_gather(store, 10 * rank + number, rank, world_size, value))
        if hasattr(store, "barrier"):
            store.barrier(f"CUDASymmetricMemory/{rank}", world_size)
        host.exchange(b"", "in step")
        return seen

    expected = [[f"{number} of {r}".encode() for r in range(3)] for number in range(3)]
    assert on_hosts(on_rank, 3) == [expected] * 3


class FakeSymmetricMemory:
    """torch's symmetric memory for threads: the rounds of its rendezvous, and shared memory."""

    def __init__(self) -> None:
        self.stores: dict[int, Any] = {}
        self.failing: set[int] = set()
        self.environment: set[str | None] = set()

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        group = _c10d._resolve_process_group(name)
        rank, size = group.rank(), group.size()
        self.environment.add(os.environ.get(cuda_memory.OVERLAPPING))
        store = self.stores[rank]
        addresses = torch_213_all_gather(store, 7, rank, size, str(tensor.data_ptr()).encode())
        if rank in self.failing:
            raise RuntimeError("CUDA driver error: operation not supported")
        torch_213_all_gather(store, 8, rank, size, b"barrier")

        def buffer(peer: int, shape: Any, dtype: Any) -> torch.Tensor:
            return tensor_over(int(addresses[peer]), shape[0], CPU)

        return SimpleNamespace(get_buffer=buffer, multicast_ptr=4096)


@pytest.fixture
def symmetric() -> Iterator[FakeSymmetricMemory]:
    fake, make = FakeSymmetricMemory(), TorchMemory.__init__

    def making(self: TorchMemory, rank: int, *rest: Any, **options: Any) -> None:
        make(self, rank, *rest, **options)
        fake.stores[rank] = self._store

    stream = SimpleNamespace(synchronize=lambda: None)
    with replaced(
        (torch.cuda, "current_stream", lambda: stream),
        (_c10d, "_SymmetricMemory", fake),
        (TorchMemory, "__init__", making),
        # the lock is for threads of a process, of which these play several; so is the environment
        (cuda_memory, "_lock", threading.Semaphore(64)),
    ):
        yield fake
    os.environ.pop(cuda_memory.OVERLAPPING, None)


def write_to_peers(buffer: Any, host: ThreadHost) -> list[list[int]]:
    """Write every rank's number to every rank; return this rank's memory."""
    for peer in range(host.world_size):
        buffer.peer_bytes[peer][host.rank] = 10 + host.rank
    host.exchange(b"", "written")
    return buffer.peer_bytes[host.rank][: host.world_size + 1].tolist()


@pytest.mark.parametrize("overlapping", [False, True])
def test_torch_memory_is_zeroed_and_shared(
    symmetric: FakeSymmetricMemory, overlapping: bool
) -> None:
    def on_rank(host: ThreadHost) -> Any:
        memory = TorchMemory(host.rank, host.world_size, CPU, host.exchange)
        buffer = memory.allocate(256, overlapping=overlapping)
        assert buffer.multicast == 4096 and buffer.owner is not None
        assert buffer.addresses == [part.data_ptr() for part in buffer.peer_bytes]
        written = write_to_peers(buffer, host)
        memory.close()
        memory.close()
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            _c10d._resolve_process_group(memory._name)
        return written

    assert on_hosts(on_rank, 3) == [[10, 11, 12, 0]] * 3
    assert symmetric.environment == ({"1"} if overlapping else {None})


def test_the_environment_is_as_before() -> None:
    name = cuda_memory.OVERLAPPING
    with pytest.raises(KeyError), cuda_memory._environment(name, "1"):
        with cuda_memory._environment(name, "0"):
            assert os.environ[name] == "0"
        assert os.environ[name] == "1"
        raise KeyError
    assert name not in os.environ


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1, 2}])
def test_what_one_rank_cannot_have_nobody_has(
    symmetric: FakeSymmetricMemory, failing: set[int]
) -> None:
    symmetric.failing = failing

    def on_rank(host: ThreadHost) -> bool:
        memory = TorchMemory(host.rank, host.world_size, CPU, host.exchange)
        with pytest.raises(MemoryRefused, match="operation not supported"):
            memory.allocate(256, overlapping=False)
        host.exchange(b"", "in step")
        return True

    assert on_hosts(on_rank, 3) == [True] * 3


# -- CUDA IPC ------------------------------------------------------------------------------------


class FakeCupy:
    """``cupy.cuda.runtime`` with addresses as handles; it lists allocated, open and freed memory."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.opened: list[int] = []
        self.freed: list[int] = []
        self.closed_late: list[int] = []
        self.refuses = False
        runtime = SimpleNamespace(
            malloc=self.malloc,
            memset=lambda address, value, size: ctypes.memset(address, value, size),
            free=self.free,
            deviceSynchronize=lambda: None,
            ipcGetMemHandle=self.export,
            ipcOpenMemHandle=self.open,
            ipcCloseMemHandle=self.close,
        )
        self.cuda = SimpleNamespace(runtime=runtime, Device=FakeDevice)

    def malloc(self, size: int) -> int:
        block = ctypes.create_string_buffer(b"\x77" * size, size)
        address = ctypes.addressof(block)
        self.memory[address] = block
        return address

    def export(self, address: int) -> bytes:
        if self.refuses:
            raise RuntimeError("cudaErrorNotSupported")
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, flags: int) -> int:
        assert flags == cuda_memory.LAZY_PEER_ACCESS and len(handle) == HANDLE_BYTES
        self.opened.append(int.from_bytes(handle[:8], "little"))
        return self.opened[-1]

    def close(self, address: int) -> None:
        if address in self.freed:
            self.closed_late.append(address)
        self.opened.remove(address)

    def free(self, address: int) -> None:
        self.freed.append(address)


class FakeDevice:
    def __init__(self, index: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    fake = FakeCupy()
    with replaced((sys.modules, "cupy", fake), (cuda_memory, "_given_up", [])):
        yield fake


def ipc_memory(host: ThreadHost) -> IpcMemory:
    return IpcMemory(host, CPU, host.exchange)  # type: ignore[arg-type]


def test_memory_is_freed_after_the_last_peer_has_closed_it(cupy: FakeCupy) -> None:
    def on_rank(host: ThreadHost) -> None:
        memory = ipc_memory(host)
        for _ in range(2):
            memory.allocate(64, overlapping=True)
        for rank in range(host.world_size):  # one after another, as processes leave
            if rank == host.rank:
                memory.close()
                memory.close()
                assert not cupy.freed or rank == host.world_size - 1
            host.exchange(b"", "left")

    on_hosts(on_rank, 3)
    cuda_memory.sweep()
    assert not cupy.opened and not cupy.closed_late
    assert sorted(cupy.freed) == sorted(cupy.memory)


def test_what_a_killed_rank_had_open_is_not_freed(cupy: FakeCupy) -> None:
    def on_rank(host: ThreadHost) -> None:
        memory = ipc_memory(host)
        memory.allocate(64, overlapping=True)
        if host.rank:
            memory.close()

    on_hosts(on_rank, 2)
    cuda_memory.sweep()
    assert not cupy.freed and len(cuda_memory._given_up) == 1


def test_without_cupy_the_error_says_what_to_install() -> None:
    def on_rank(host: ThreadHost) -> None:
        ipc_memory(host).allocate(64, overlapping=True)

    message = "install cupy-cuda13x, or cupy-cuda12x"
    with replaced((sys.modules, "cupy", None)), pytest.raises(MemoryRefused, match=message):
        on_hosts(on_rank, 2)


# -- which of them -------------------------------------------------------------------------------


@pytest.fixture
def devices() -> Iterator[list[str]]:
    """Return the GPU of each rank."""
    uuids = ["a", "b"]

    def properties(device: Any) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[int(threading.current_thread().name[-1])])

    with replaced((torch.cuda, "get_device_properties", properties)):
        yield uuids


def allocation(host: ThreadHost) -> tuple[str, bool, list[list[int]]]:
    place = CudaPlace(host, CPU, timeout=300.0)  # type: ignore[arg-type]
    buffer = place._allocate(256)
    answer = place._memory.kind, place._overlapping, write_to_peers(buffer, host)
    place.close()
    assert host.closed
    return answer


def test_the_first_memory_that_all_can_have(
    symmetric: FakeSymmetricMemory, cupy: FakeCupy, devices: list[str]
) -> None:
    assert on_hosts(allocation, 2) == [("torch symmetric memory", False, [10, 11, 0])] * 2
    devices[1] = "a"
    assert on_hosts(allocation, 2) == [("torch symmetric memory", True, [10, 11, 0])] * 2
    symmetric.failing |= {1}
    assert on_hosts(allocation, 2) == [("CUDA IPC", True, [10, 11, 0])] * 2


def test_no_memory_at_all_says_why_on_every_rank(
    symmetric: FakeSymmetricMemory, cupy: FakeCupy, devices: list[str]
) -> None:
    symmetric.failing |= {0}
    cupy.refuses = True

    def on_rank(host: ThreadHost) -> str:
        with pytest.raises(PlaceUnavailableError) as caught:
            allocation(host)
        host.exchange(b"", "in step")
        return str(caught.value)

    for text in on_hosts(on_rank, 2):
        assert "torch symmetric memory: " in text and "operation not supported" in text
        assert "CUDA IPC: " in text and "cudaErrorNotSupported" in text


# -- a rendezvous that does not end --------------------------------------------------------------


BLOCKED = """
import ctypes, errno, os, signal, socket, sys, time
import torch
import torch._C._distributed_c10d as c10d
from types import SimpleNamespace
from interlace.runtime.places.gpu import memory as cuda_memory
from interlace.runtime.core.errors import PeerDiedError

own, other = socket.socketpair()
libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock, as torch does

class Symmetric:
    @staticmethod
    def empty_strided_p2p(size, stride, dtype, device):
        return torch.ones(size, dtype=dtype)

    @staticmethod
    def rendezvous(memory, name):
        print("blocked", flush=True)
        got = libc.recv(own.fileno(), ctypes.create_string_buffer(8), 8, 0)  # a peer died: nothing comes
        if got <= 0:
            raise RuntimeError("Failed to receive fd: " + os.strerror(ctypes.get_errno()))

c10d._SymmetricMemory = Symmetric
torch.cuda.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
said = []

def exchange(message, doing):
    said.append(message)
    if len(said) > 1:  # the ranks have met before the rendezvous, and not after it
        raise PeerDiedError(1, 4711, doing)
    return [message] * 2

ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.3)
memory = cuda_memory.TorchMemory(0, 2, torch.device("cpu"), exchange, seconds=float(sys.argv[1]))
try:
    memory.allocate(64, overlapping=False)
except PeerDiedError as error:
    assert said[0] == cuda_memory.VALUE and said[1].startswith(b"FTimeoutError: torch's rendezvous")
    while not ticks:  # the user's own timer goes on
        time.sleep(0.01)
    print("named:", error)
"""


@thorough
def test_a_rendezvous_that_a_peer_died_in_ends_and_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, "1.0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "named:" in done.stdout and "rank 1" in done.stdout


@thorough
def test_without_the_bound_it_would_not_end() -> None:
    unbounded = BLOCKED.replace(
        "class Symmetric:",
        "import contextlib\ncuda_memory.interrupted_after = lambda s: contextlib.nullcontext()\n"
        "signal.setitimer = lambda *_: None\nclass Symmetric:",
    )
    command = [sys.executable, "-c", unbounded, "1.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "blocked\n"
        try:
            with pytest.raises(subprocess.TimeoutExpired):  # however slow it is: it has no end
                process.wait(2)
        finally:
            process.kill()
