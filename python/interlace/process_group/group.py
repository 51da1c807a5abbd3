"""interlace as a backend of torch.distributed: ``init_process_group("interlace")``.

torch requires the following of a ``ProcessGroup`` in Python:

- ``ProcessGroup.__init__(rank, size)`` without a store: with one, it builds an object without overrides.
- Name and description are kept here: torch would keep them in its C++ backends, and there are none.
- Every collective returns a Work: C++ callers do not expect None, and crash.
- Dynamo must not trace into a method: see ``keep_outside_compilation``.
- C++ code that finds the group in a dispatched ``c10d::`` op asks it for a C++ backend. That is a gloo
  group over the same ranks, made when it is first needed; all ranks of the group must take part.

Tensors on a GPU go to a second communicator, on the place ``cuda`` of the same ranks. It is made for the
first such tensor. If ranks have no GPU for kernels, these tensors go through copies on the host.
"""

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.process_group import dispatch
from interlace.process_group.collectives import Collectives
from interlace.runtime.compat import torch_groups
from interlace.runtime.compat.launchers import local_rank
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import AbortedError
from interlace.runtime.core.place import Place
from interlace.runtime.places import connect
from interlace.runtime.places.gpu.driver import gpu_problem

LINGER_SECONDS = 0.2
DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_reunited: Place | None = None  # the place of the group that torch is about to request
ON_GPU = -(1 << 40)  # generation of the ranks' group on GPUs; no other group over them has it


def create(options: Any, backend_options: object = None) -> "InterlaceProcessGroup":
    """Return the process group for torch's ``_DistributedBackendOptions``. Collective."""
    torch_groups.leave_unrecorded("interlace")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return InterlaceProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name=options.group_id,
        ranks=ranks,
        high_priority=bool(getattr(backend_options, "is_high_priority_stream", False)),
        place=_reunited,
    )


class OnTwoDevices(Communicator):
    """The group on the CPU; ``group.device_communicator`` on the GPUs is made on first use."""

    def __init__(self, place: Place, ranks: Sequence[int], group: "InterlaceProcessGroup") -> None:
        super().__init__(place, ranks)
        self._group = group

    def on(self, *values: object) -> Communicator:
        return self._group.device_communicator if kind_of(values) == "cuda" else self

    def on_all_devices(self) -> Sequence[Communicator]:
        on_device = self._group.__dict__.get("device_communicator")
        return (self,) if on_device is None else (self, on_device)


def kind_of(value: object) -> str:
    """Return the device type of the first tensor in ``value``, or "" if there is no tensor."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, (list, tuple)):
        return next((kind for each in value if (kind := kind_of(each))), "")
    if hasattr(value, "__dlpack_device__"):
        return "cuda" if int(value.__dlpack_device__()[0]) in DLPACK_CUDA else "cpu"
    return ""


class InterlaceProcessGroup(Collectives):
    """One group of ranks of ``torch.distributed``, on interlace.

    ``interlace_communicator`` is the underlying group, for interlace's own functions.
    """

    _backend_kind = dist.ProcessGroup.BackendType.CUSTOM  # torch's own tests expect gloo's

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str = "group",
        ranks: Sequence[int] | None = None,
        high_priority: bool = False,
        place: Any = None,
    ) -> None:
        local_rank()  # checked here, because other ranks wait for this one when it is used
        super().__init__(rank, size)
        dispatch.register()
        if place is None:
            seconds = timeout.total_seconds()
            place = connect.connect_place(store, rank, size, timeout=seconds, name=name)
        self._place, self._waits = place, place.group
        self._store: Any = connect.sign(store)
        self._timeout = timeout
        self._group_name, self._group_description = name, "undefined"
        self._gloo: Any = None
        self._high_priority = high_priority
        members = ranks or range(size)
        self._has_gpus = place.name == "shm" and not gpu_problem()
        if self._has_gpus:
            self.interlace_communicator = OnTwoDevices(place, members, self)
        else:
            self.interlace_communicator = Communicator(place, members)

    # -- on GPUs -------------------------------------------------------------------------------

    @functools.cached_property
    def device_communicator(self) -> Communicator:
        """Return this group on its ranks' GPUs. Making it is collective."""
        ranks = tuple(range(self.size()))
        host = self._place.subgroup(ranks, ON_GPU)
        place = connect.on_gpu(
            host, timeout=self._timeout.total_seconds(), high_priority=self._high_priority
        )
        return Communicator(
            place, self.interlace_communicator.ranks, self.interlace_communicator.hooks
        )

    # -- identity ------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "interlace"

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_description

    def setGroupDesc(self, description: str) -> None:
        self._group_description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = [self._place.device.type, *(["cuda"] if self._has_gpus else [])]
        return [torch.device(kind) for kind in kinds]

    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False
    supports_window = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        """Return this group: the callers want to know what it supports."""
        return self

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has started."""
        return self._sequence

    def _make_dispatchable(self) -> None:
        """Give this group the C++ backend that torch's kernels of ``c10d::`` ops need. Collective."""
        if self._gloo is None:
            kind = self._backend_kind
            # gloo reads values that an earlier group has left under the same name in the same store
            name = self.interlace_communicator.agree("a gloo group", os.urandom(8).hex())[0]
            store = torch_groups.PrefixStore(f"interlace/gloo/{name}", self._store)
            self._gloo = torch_groups.c10d.ProcessGroupGloo(
                store, self.rank(), self.size(), timeout=self._timeout
            )
            self._register_backend(torch.device("cpu"), kind, self._gloo)
            self._set_default_backend(kind)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit every later wait of this group to ``timeout``."""
        self.interlace_communicator.set_timeout(timeout)
        self._timeout = timeout

    _set_default_timeout = set_timeout  # the name that torch's backends have

    def register_hook(self, *args: Any, **more: Any) -> Any:
        """Call :meth:`interlace.Group.register_hook`, which describes the arguments."""
        return self.interlace_communicator.register_hook(*args, **more)

    def abort(self) -> None:
        """End every wait of every rank with an error; the group cannot be used any more."""
        reason = f"rank {self.rank()} aborted process group {self._group_name!r}"
        for communicator in reversed(self.interlace_communicator.on_all_devices()):
            communicator.place.abort(reason)
            communicator.hooks.over(AbortedError(reason))
        self._end("aborted")

    def reunited(self, ranks: Sequence[int] | None) -> Any:
        global _reunited
        whole = self is dist.group.WORLD
        place, left = self.interlace_communicator.reunited(ranks)
        members = [self.interlace_communicator.ranks[rank] for rank in left]
        store, timeout = connect.new_store(place), self._timeout
        dist.destroy_process_group(None if whole else self)
        try:
            _reunited = place
            if not whole:
                name = f"{self._group_name.partition('/')[0]}/{'-'.join(map(str, members))}"
                return torch_groups.of_members(store, place.rank, members, name, timeout)
            dist.init_process_group(
                "interlace",
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
            )
        finally:
            _reunited = None
        return dist.group.WORLD

    def shutdown(self) -> None:
        """Leave the group and free its memory. Not collective; ``destroy_process_group`` calls it."""
        self._place.linger = LINGER_SECONDS
        self._end("destroyed")

    def _end(self, ending: str) -> None:
        if not self._ended:
            self._ended = ending
            for communicator in reversed(self.interlace_communicator.on_all_devices()):
                communicator.close()
            self._store = None
        if self._gloo is not None:
            self._gloo.shutdown()


torch_groups.keep_outside_compilation(InterlaceProcessGroup)


def _serve_timeouts() -> None:
    """Make torch's function that sets a group's timeout accept this backend; it knows two others."""
    c10d: Any = dist.distributed_c10d
    torchs_own = c10d._set_pg_timeout

    @functools.wraps(torchs_own)
    def set_timeout(timeout: timedelta, group: object = None) -> None:
        group = group or c10d._get_default_group()
        if isinstance(group, InterlaceProcessGroup):
            group.set_timeout(timeout)
        else:
            torchs_own(timeout, group)

    c10d._set_pg_timeout = set_timeout


_serve_timeouts()
