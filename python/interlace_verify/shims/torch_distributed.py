"""``torch.distributed`` on simulated ranks: each rank has a default group from its first line on.

``dist.get_rank()``, ``dist.group.WORLD``, ``dist.all_reduce`` and so on are torch's functions, unchanged.
They find a process group of this project's backend over the simulated group. ``init_process_group`` has
nothing to do, and ``destroy_process_group`` leaves the group to the run.

``torch.distributed._symmetric_memory`` uses the class ``_SymmetricMemory``, which this file replaces. The
functions of that module are torch's, unchanged: ``empty``, ``rendezvous``, ``get_symm_mem_workspace``,
``_get_backend_stream``, the pipelines of asynchronous tensor parallelism. Semantics of the class:
``torch._C._distributed_c10d._SymmetricMemory`` of torch 2.13.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket

from interlace import new_group as new_simulated_group
from interlace.groups import groups
from interlace.groups.groups import DEFAULT_NAME, name_of
from interlace.ops.matmul import torch_ops
from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.compat import torch_groups
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.place import DEFAULT_TIMEOUT, Place
from interlace.symmetric_memory import functions
from interlace.symmetric_memory.functions import NAMES, SymmetricMemory
from interlace_verify.shims.torch_cuda import get_device_capability, run_streams

_groups: dict[int, str] = {}  # group names of allocations that have one, by address


class MemoryOfTorch(SymmetricMemory):
    signal_pad_size: Any = functions.DEFAULT_SIGNAL_PAD_SIZE

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: object,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """Allocate for the whole run (to free it would wait for the device); ``alloc_id`` is ignored."""
        functions.set_signal_pad_size(MemoryOfTorch.signal_pad_size)
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        whole = functions.empty(max(elements, 0), dtype=dtype)
        run_streams().kept.append(whole)
        _groups.pop(whole.data_ptr(), None)
        if group_name is not None:
            _groups[whole.data_ptr()] = group_name
        return whole.as_strided(tuple(size), tuple(stride))

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> Any:
        """Return the handle, or None for a tensor that is not in symmetric memory."""
        if not functions.is_symm_mem_tensor(tensor):
            return None
        known = _groups.get(tensor.untyped_storage().data_ptr())
        return functions.rendezvous(tensor, group_name or known)

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        return functions.is_symm_mem_tensor(tensor)

    @staticmethod
    def has_multicast_support(device_type: object = None, device_idx: int = 0) -> bool:
        """Return whether it is at least sm_90, where ``multicast_ptr`` is a multimem address."""
        return get_device_capability() >= (9, 0)

    @staticmethod
    def get_backend(device: object) -> str:
        return "CUDA"

    @staticmethod
    def set_backend(name: str) -> None:
        """Do nothing, as all backends are the same memory here."""

    @staticmethod
    def set_group_info(group_name: str, rank: int, world_size: int, store: object) -> None:
        """Do nothing, as a group is already known by its name."""

    @staticmethod
    def get_mempool_allocator(device: object) -> None:
        """Return None, as there are no pools."""


class PacketOnRanks(OpOverloadPacket):
    """An op of ``torch.ops.symm_mem`` that, when called, calls interlace's function instead.

    Torch's op would wait inside pybind11, and ranks that take turns there end the process.
    """

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return getattr(torch_ops, self.__name__)(*args, **kwargs)


class OverloadOnRanks(OpOverload):
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return getattr(torch_ops, self.overloadpacket.__name__)(*args, **kwargs)


def replace_ops(leaving: contextlib.ExitStack) -> None:
    """Let :data:`NAMES` call interlace until ``leaving`` exits, also for code that already holds an op."""
    for name in NAMES:
        packet: Any = getattr(torch.ops.symm_mem, name)
        for op, kind in ((packet, PacketOnRanks), (packet.default, OverloadOnRanks)):
            leaving.callback(setattr, op, "__class__", type(op))
            op.__class__ = kind


_c10d: Any = dist.distributed_c10d
_REAL = dist.ProcessGroup


class _AnyGroup(type(dist.ProcessGroup)):  # type: ignore[misc]
    """Accepts every process group of torch, and every class of them, as ``SimulatedGroup``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, _REAL)
            if cls is SimulatedGroup
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, other: Any) -> bool:
        return (
            issubclass(other, _REAL) if cls is SimulatedGroup else super().__subclasscheck__(other)
        )


class SimulatedGroup(InterlaceProcessGroup, metaclass=_AnyGroup):
    """A process group of torch over simulated ranks; constructed as ``dist.ProcessGroup`` is."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super(InterlaceProcessGroup, self).__init__(*args, **kwargs)

    @classmethod
    def over(cls, place: Place, found: Callable[[], Communicator], name: str) -> "SimulatedGroup":
        """Return the group of the ranks of ``place``. ``found`` returns their communicator when needed."""
        group = cls(place.rank, place.world_size)
        group._found = found
        group._place, group._waits = place, SimpleNamespace(options=None)
        group._store = group._gloo = None
        group._timeout = timedelta(seconds=DEFAULT_TIMEOUT)
        group._group_name, group._group_description = name, "undefined"
        group._has_gpus = group._high_priority = False
        return group

    @property
    def interlace_communicator(self) -> Communicator:  # type: ignore[override]
        return self._found()  # type: ignore[no-any-return]

    def _own(self, tensors: object) -> Any:
        """Return all tensors: a check's dispatch modes are not a reason to use torch's dispatcher."""
        return tensors


def join(place: Place) -> None:
    group = SimulatedGroup.over(place, groups.default_group, DEFAULT_NAME)
    _c10d._world.default_pg = _register(group, range(place.world_size))


def _register(group: SimulatedGroup, ranks: Sequence[int]) -> SimulatedGroup:
    world, name = _c10d._world, group.getGroupName()
    world.pg_map[group] = ("interlace", torch_groups.HashStore())
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = "cpu:interlace,cuda:interlace"
    world.tags_to_pg.setdefault("", []).append(group)
    world.pg_to_tag[group] = ""
    return group


def init_process_group(*args: object, **kwargs: object) -> None:
    """Do nothing, as the group exists."""


def destroy_process_group(group: object = None) -> None:
    """Do nothing, as the group ends with the run."""


def new_group(ranks: Sequence[int] | None = None, *args: object, **kwargs: object) -> Any:
    """Return the group of ``ranks`` to its members. Collective over all ranks."""
    group = new_simulated_group(ranks)
    if not isinstance(group, Communicator):
        return group
    name = name_of(groups.default_group(), group)
    return _register(SimulatedGroup.over(group.place, lambda: group, name), group.ranks)


def resolve_process_group(name: str) -> Any:
    """Return the calling rank's group of that name, or raise RuntimeError, as torch does."""
    for group, known in _c10d._world.pg_names.items():
        if known == name:
            return group
    raise RuntimeError(f"Could not resolve the process group registered under the name {name}")


REPLACED: dict[str, object] = {
    **{each.__name__: each for each in (init_process_group, destroy_process_group, new_group)},
    "_resolve_process_group": resolve_process_group,
}
"""Names of ``torch.distributed`` and its ``distributed_c10d``, and their replacements."""


def state() -> tuple[object, ...]:
    """Return torch's state of groups, which each rank has for itself."""
    tables = (value for name, value in vars(_c10d).items() if name.startswith(("_pg_", "_tags_")))
    return vars(_c10d._world), *tables
