"""The host's part of the place ``nvshmem``, without a GPU: memory, nodes, modules, linking, refusals."""

import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.ops.collectives import node_moves
from interlace.runtime.compat import torch_groups as symmetric
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.place import Nodes
from interlace.runtime.places.gpu.memory import VALUE, agree_on
from interlace.runtime.places.gpu.nvshmem import NvshmemMemory, NvshmemPlace, nodes_of
from interlace.runtime.tuning.configuration import Configuration
from interlace.tools.catalogue.absent_group import AbsentGroup, meta
from stand_ins.fake_host import ThreadHost, on_hosts
from stand_ins.replaced import replaced

CPU = torch.device("cpu")


class FakeGroup:
    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class FakeTorch:
    """torch's bindings for the processes, which are threads here."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self.available: Callable[[], bool] | None = lambda: True
        self.backend = "CUDA"
        self.fixed = False
        self.failing: set[int] = set()
        self.initialised: list[int] = []
        self.everyone: Callable[[int], FakeGroup] | None = None
        self._process = threading.local()
        self._SymmetricMemory = self
        self.ProcessGroup = self.made

    def __getattr__(self, name: str) -> Any:
        if name == "_is_nvshmem_available" and self.__dict__.get("available") is not None:
            return self.__dict__["available"]
        raise AttributeError(name)

    @property
    def groups(self) -> dict[str, FakeGroup]:
        if not hasattr(self._process, "groups"):
            self._process.groups = {}
        groups: dict[str, FakeGroup] = self._process.groups
        return groups

    def made(self, store: Any, rank: int, size: int) -> FakeGroup:
        self._process.rank = rank
        if self.everyone is not None:
            self.groups.setdefault("0", self.everyone(rank))
        return FakeGroup(store, rank, size)

    def _register_process_group(self, name: str, group: FakeGroup) -> None:
        assert name not in self.groups
        self.groups[name] = group

    def _unregister_process_group(self, name: str) -> None:
        self.groups.pop(name)

    def _resolve_process_group(self, name: str) -> FakeGroup:
        if name not in self.groups:
            raise RuntimeError(f"Could not resolve the process group registered under {name}")
        return self.groups[name]

    def get_backend(self, device: torch.device) -> str:
        return self.backend

    def set_backend(self, name: str) -> None:
        if self.fixed:
            raise RuntimeError("Backend can not be changed after use\nat some line")
        self.backend = name

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        assert "0" in self.groups and self.backend == "NVSHMEM"
        return torch.ones(size, dtype=dtype)

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        group = self.groups[name]
        rank = group.rank()
        exchange = group.store._exchange
        if rank in self.failing:
            raise RuntimeError("nvshmem_malloc failed")
        answers = agree_on(exchange, VALUE + str(tensor.data_ptr()).encode())
        near = [self.nodes[peer] == self.nodes[rank] for peer in range(group.size())]
        addresses = [int(each) if here else None for each, here in zip(answers, near, strict=True)]

        def buffer(peer: int, shape: Any, dtype: Any) -> torch.Tensor:
            assert addresses[peer], "a tensor over nothing"
            return symmetric.tensor_over(addresses[peer], shape[0], CPU)

        return SimpleNamespace(
            buffer_ptrs=addresses, get_buffer=buffer, multicast_ptr=4096, memory=tensor
        )

    def _nvshmemx_cumodule_init(self, module: int) -> None:
        self.initialised.append(module)


@pytest.fixture
def fake(tmp_path: pathlib.Path) -> Iterator[FakeTorch]:
    bindings, stream = FakeTorch([0, 0, 1, 1]), SimpleNamespace(synchronize=lambda: None)
    (tmp_path / "libnvshmem_device.bc").write_bytes(b"BC")
    with replaced(
        (symmetric, "c10d", bindings),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "current_stream", lambda: stream),
        (os.environ, "NVSHMEM_LIB_DIR", str(tmp_path)),
    ):
        yield bindings


def place_of(host: ThreadHost) -> NvshmemPlace:
    return NvshmemPlace(host, CPU, timeout=300.0)  # type: ignore[arg-type]


# -- memory and nodes ----------------------------------------------------------------------------


def test_near_memory_is_mapped_and_far_memory_is_a_number(
    fake: FakeTorch, tmp_path: pathlib.Path
) -> None:
    def on_rank(host: ThreadHost) -> Any:
        place = place_of(host)
        buffer = place._allocate(256)
        assert buffer.peers.tolist() == [*buffer.addresses[:4], 0, 1, 2, 3]
        for peer in range(4):
            if buffer.mapped(peer):
                assert buffer.addresses[peer] == buffer.peer_bytes[peer].data_ptr() != 0
                buffer.peer_bytes[peer][host.rank] = 10 + host.rank
            else:
                assert buffer.addresses[peer] == 0
        host.exchange(b"", "written")
        assert place.nodes is not None and place.nodes.put == "nvshmem"
        assert place.nodes.options == {
            "extern_libs": (("libnvshmem_device", str(tmp_path / "libnvshmem_device.bc")),)
        }
        assert hash(tuple(place.nodes.options.items()))  # LaunchCache's key
        assert buffer.multicast == 0 and buffer.owner is not None
        assert place._stream_words() is None
        return place.nodes.of, buffer.peer_bytes[host.rank][:5].tolist()

    nodes = (0, 0, 2, 2)
    expected = [(nodes, [10, 11, 0, 0, 0])] * 2 + [(nodes, [0, 0, 12, 13, 0])] * 2
    assert on_hosts(on_rank, 4) == expected


def test_where_all_is_mapped_nothing_is_put(fake: FakeTorch) -> None:
    """Nodes that share one NVLink domain map all memory."""
    fake.nodes = [0, 0, 0, 0]

    def on_rank(host: ThreadHost) -> Any:
        place = place_of(host)
        buffer = place._allocate(64)
        return place.nodes, all(buffer.addresses), buffer.multicast

    assert on_hosts(on_rank, 4) == [(None, True, 4096)] * 4


def test_numbers_are_those_of_all_processes(fake: FakeTorch) -> None:
    """torch.distributed may number the processes in another order than this group."""
    fake.everyone = lambda rank: FakeGroup(None, 3 - rank, 4)
    tables = on_hosts(lambda host: place_of(host)._allocate(64).peers.tolist()[4:], 4)
    assert tables == [[3, 2, 1, 0]] * 4


def test_a_group_of_some_processes_is_refused(fake: FakeTorch) -> None:
    fake.everyone = lambda rank: FakeGroup(None, rank, 8)
    with pytest.raises(PlaceUnavailableError, match="made by all 8 processes together, and this"):
        on_hosts(place_of, 4)
    fake.everyone = None

    def splits(host: ThreadHost) -> None:
        place_of(host).subgroup((0, 1), 1)

    with pytest.raises(PlaceUnavailableError, match=r"a group of 2 of them, \[0, 1\], cannot"):
        on_hosts(splits, 4)


def test_what_one_rank_cannot_have_nobody_has(fake: FakeTorch) -> None:
    def on_rank(host: ThreadHost) -> None:
        place = place_of(host)
        fake.failing.add(2)
        host.exchange(b"", "in step")
        with pytest.raises(PlaceUnavailableError, match=r"NVSHMEM_SYMMETRIC_SIZE.*nvshmem_malloc"):
            place._allocate(1 << 20)
        host.exchange(b"", "still in step")

    on_hosts(on_rank, 4)


def test_closing_forgets_the_group(fake: FakeTorch) -> None:
    def on_rank(host: ThreadHost) -> list[str]:
        memory = NvshmemMemory(host.rank, host.world_size, CPU, host.exchange)
        assert len(fake.groups) == 2
        memory.close()
        return list(fake.groups)

    assert on_hosts(on_rank, 4) == [["0"]] * 4


@pytest.mark.parametrize(
    ("mapped", "nodes"),
    [
        (["1"], [0]),
        (["110", "110", "001"], [0, 0, 2]),
        (["101", "010", "101"], [0, 1, 0]),
        (["111", "111", "111"], [0, 0, 0]),
    ],
)
def test_nodes_are_who_addresses_whom(mapped: list[str], nodes: list[int]) -> None:
    assert nodes_of([[each == "1" for each in row] for row in mapped]) == nodes


@pytest.mark.parametrize("mapped", [["110", "111", "011"], ["110", "010", "001"]])
def test_what_makes_no_nodes_is_refused(mapped: list[str]) -> None:
    with pytest.raises(PlaceUnavailableError, match="are not nodes"):
        nodes_of([[each == "1" for each in row] for row in mapped])


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("available", None, "built without NVSHMEM; install one for CUDA"),
        (
            "available",
            lambda: False,
            "finds no libnvshmem_host.so; install nvidia-nvshmem-cu12 or -cu13",
        ),
        ("fixed", True, "is of backend 'CUDA' in this process and stays so: Backend can not"),
    ],
    ids=["no binding", "no library", "another backend"],
)
def test_the_error_says_what_a_rank_lacks(
    fake: FakeTorch, name: str, value: Any, text: str
) -> None:
    setattr(fake, name, value)
    with pytest.raises(PlaceUnavailableError, match="rank 0 cannot use it: .*" + text):
        on_hosts(place_of, 4)


def test_without_the_device_library(fake: FakeTorch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "libnvshmem_device.bc").unlink()
    with pytest.raises(PlaceUnavailableError, match="device library for sm_90"):
        on_hosts(place_of, 4)


def test_without_a_gpu_on_one_rank_all_say_the_same(fake: FakeTorch) -> None:
    process, errors = threading.local(), []

    def on_rank(host: ThreadHost) -> None:
        process.rank = host.rank
        try:
            place_of(host)
        except PlaceUnavailableError as error:
            errors.append(str(error))

    with replaced((torch.cuda, "is_available", lambda: process.rank != 2)):
        on_hosts(on_rank, 4)
    assert len(errors) == 4 and len(set(errors)) == 1
    assert "several nodes, and rank 2 cannot use it: torch sees no CUDA device" in errors[0]


# -- modules, and what is linked -------------------------------------------------------------------


def compiled(module: int, *libraries: str) -> Any:
    """Return a compiled kernel as Triton's, with metadata from JSON."""
    metadata = SimpleNamespace(extern_libs=[[name, f"/x/{name}.bc"] for name in libraries])
    return SimpleNamespace(module=module, metadata=metadata)


def test_a_linked_module_gets_its_state_once(fake: FakeTorch) -> None:
    def on_rank(host: ThreadHost) -> None:
        place, first = place_of(host), 100 * host.rank
        for loaded in (
            compiled(first + 5, "libdevice", "libnvshmem_device"),
            compiled(first + 5, "libdevice", "libnvshmem_device"),
            compiled(first + 6, "libdevice"),
            SimpleNamespace(module=first + 7, metadata=SimpleNamespace()),
            compiled(first + 8, "libnvshmem_device"),
        ):
            place._loaded(loaded)

    on_hosts(on_rank, 4)
    assert sorted(fake.initialised) == [5, 8, 105, 108, 205, 208, 305, 308]


@pytest.mark.parametrize("put", ["nvshmem", "stores"])
def test_what_puts_is_linked_and_nothing_else(put: str) -> None:
    options = {"extern_libs": (("libnvshmem_device", "x.bc"),)} if put == "nvshmem" else {}
    group: Any = AbsentGroup(4, put=put)
    group.nodes = group.place.nodes = Nodes((0, 0, 1, 1), put, options)
    config = Configuration(copiers=4, chunks=2)
    part, whole = meta(1000, dtype=torch.uint8), meta(4000, dtype=torch.uint8)
    node_moves.all_gather(group, part, whole, [1000] * 4, config)
    sizes = [[10] * 4] * 4
    node_moves.exchange(group, "all_to_all", part[:40], [part[:10]] * 4, sizes, config)
    sums = meta(400, dtype=torch.float32)
    node_moves.reduce_scatter(group, sums, sums[:100], [100] * 4, config, average=False)
    names = {launch.name for launch in group.launches}
    assert names == {
        "move_kernel",
        "all_gather_kernel",
        "node_reduce_scatter_kernel",
        "quiet_kernel",
        "put_credits_kernel",
    }
    for launch in group.launches:
        puts = "PUT" in launch.arguments
        assert puts == (launch.name != "all_gather_kernel")
        assert launch.arguments.get("PUT", put) == put
        assert launch.options == (options if puts else {})
        assert set(launch.arguments) == set(launch.kernel.arg_names), launch.name
        assert launch.num_warps == (1 if "quiet" in launch.name or "credit" in launch.name else 8)
