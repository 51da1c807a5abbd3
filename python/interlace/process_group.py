"""interlace as a backend of torch.distributed: ``init_process_group("interlace")``.

A ``ProcessGroup`` in Python over one :class:`Communicator`. Every method serves plain tensors with the
internal form of interlace's own function; a call that torch's dispatcher has to see first goes to
``super()``, see ``process_group_rules.py``. What torch asks of such a class, and what breaks otherwise:

- ``ProcessGroup.__init__(rank, size)``; given a store, it builds an object without overrides.
- Name and description are kept here: torch would keep them in its C++ backends, of which there is none.
- Every collective returns a Work: C++ callers do not expect None, and crash.
- Dynamo must not trace into a method: see ``process_group_rules.outside_compilation``.
- C++ code that finds the group in a dispatched ``c10d::`` op asks it for a C++ backend. That is a gloo
  group over the same ranks, made when it is first needed, which takes all ranks of the group.
- ``_c10d_functional`` ops whose kernels ask for one without need have kernels in ``functional_kernels.py``.

Ranks in options (``rootRank``) and of ``send`` and ``recv`` are ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from interlace import all_to_all, collectives, functional_kernels, rooted, sparse
from interlace.process_group_rules import (
    PLAIN_TYPES,
    is_simulated,
    modes_active,
    outside_compilation,
    underlying,
)
from interlace.runtime.communicator import Communicator
from interlace.runtime.errors import InterlaceError, PlaceUnavailableError
from interlace.runtime.place import Place
from interlace.runtime.work import Work

Tensors = list[torch.Tensor]

_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def connect_place(store: Any, rank: int, world_size: int, timeout: float, name: str) -> Place:
    """The place of one rank of a group that meets through ``store``. Collective; seconds."""
    from interlace.runtime.place_shm import ShmPlace

    return ShmPlace.connect(store, rank, world_size, timeout=timeout, name=name)


def create(options: Any, backend_options: Any = None) -> InterlaceProcessGroup:
    """The process group that torch asks for, with its ``_DistributedBackendOptions``. Collective."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return InterlaceProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name=options.group_id,
        ranks=ranks,
    )


class InterlaceProcessGroup(dist.ProcessGroup):
    """One group of ranks of ``torch.distributed``, on interlace.

    ``interlace_communicator`` is the group under it, for interlace's own functions.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str = "group",
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size)
        functional_kernels.register()
        place = connect_place(store, rank, size, timeout.total_seconds(), name)
        self.interlace_communicator = Communicator(place, ranks or range(size))
        self._place = place
        self._store, self._timeout = store, timeout
        self._group_name, self._group_description = name, "undefined"
        self._sequence = 0
        self._ended = ""
        self._gloo: Any = None

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

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._place.device.type)]

    supports_coalescing = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = False
    supports_window = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        """This group: the functions that ask want to know what it supports."""
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has started."""
        return self._sequence

    # -- which way a call goes -----------------------------------------------------------------

    def _own(self, tensors: Tensors) -> Tensors | None:
        """Plain tensors that this group serves itself; None if torch's dispatcher sees them first."""
        if self._ended:
            raise InterlaceError(
                f"rank {self.rank()}: process group {self._group_name!r} was {self._ended}"
            )
        if not modes_active():
            for tensor in tensors:
                if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
                    break
            else:
                return tensors
        return self._unusual(tensors)

    def _unusual(self, tensors: Tensors) -> Tensors | None:
        plain = underlying(tensors)
        if plain is None:
            if not is_simulated(tensors):
                self._make_dispatchable()
            return None
        here = self._place.device.type
        for tensor in plain:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != here:
                raise PlaceUnavailableError(
                    f"rank {self.rank()}: backend interlace has no place for tensors on "
                    f"{tensor.device} in this group, which is on {here}"
                )
        return plain

    def _make_dispatchable(self) -> None:
        """Give this group the C++ backend that torch's kernels of ``c10d::`` ops ask for. Collective."""
        if self._gloo is None:
            from torch._C._distributed_c10d import ProcessGroupGloo

            kind = self._backend_kind()
            store = dist.PrefixStore("interlace/gloo", self._store)
            self._gloo = ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._timeout)
            self._register_backend(torch.device("cpu"), kind, self._gloo)
            self._set_default_backend(kind)

    def _backend_kind(self) -> Any:
        return dist.ProcessGroup.BackendType.CUSTOM

    def _run(
        self, name: str, outputs: Sequence[torch.Tensor], function: Callable[..., Any], *args: Any
    ) -> Work:
        """Call the internal form of an op; a Work in any case."""
        self._sequence += 1
        if _profiling():
            with torch.autograd.profiler.record_function(f"{self.getBackendName()}:{name}"):
                work = function(self.interlace_communicator, *args)
        else:
            work = function(self.interlace_communicator, *args)
        return Work(name, self._place, None, outputs) if work is None else work

    # -- collectives ---------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = AllreduceOptions()) -> Any:
        own = self._own(tensors)
        if own is None:
            return super().allreduce(tensors, opts)
        (tensor,) = own
        if tensor.layout is not torch.strided:
            return self._run(
                "all_reduce", own, sparse._all_reduce, tensor, opts.reduceOp, opts.asyncOp
            )
        return self._run(
            "all_reduce", own, collectives._all_reduce, tensor, opts.reduceOp, opts.asyncOp
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = AllreduceCoalescedOptions()) -> Any:
        own = self._own(tensors)
        if own is None:
            return super().allreduce_coalesced(tensors, opts)
        return self._run(
            "all_reduce_coalesced", own, collectives._all_reduce, own, opts.reduceOp, opts.asyncOp
        )

    def broadcast(self, tensors: Tensors, opts: Any = BroadcastOptions()) -> Any:
        own = self._own(tensors)
        if own is None:
            return super().broadcast(tensors, opts)
        (tensor,) = own
        return self._run("broadcast", own, rooted._broadcast, tensor, opts.rootRank, opts.asyncOp)

    def reduce(self, tensors: Tensors, opts: Any = ReduceOptions()) -> Any:
        own = self._own(tensors)
        if own is None:
            return super().reduce(tensors, opts)
        (tensor,) = own
        return self._run(
            "reduce", own, rooted._reduce, tensor, opts.rootRank, opts.reduceOp, opts.asyncOp
        )

    def allgather(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = AllgatherOptions()
    ) -> Any:
        outs, ins = self._own(outputs[0]), self._own(inputs)
        if outs is None or ins is None:
            return super().allgather(outputs, inputs, opts)
        (tensor,) = ins
        return self._run(
            "all_gather", outs, collectives._all_gather, outs, tensor, opts.asyncOp
        )

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = AllgatherOptions()
    ) -> Any:
        own = self._own([output, input])
        if own is None:
            return super().all_gather_single(output, input, opts)  # type: ignore[misc]
        out, tensor = own
        if out.dim() != tensor.dim():
            out, tensor = _flat(out, tensor)
        return self._run(
            "all_gather_single", [output], collectives._all_gather, out, tensor, opts.asyncOp
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = ReduceScatterOptions()
    ) -> Any:
        outs, ins = self._own(outputs), self._own(inputs[0])
        if outs is None or ins is None:
            return super().reduce_scatter(outputs, inputs, opts)
        (output,) = outs
        return self._run(
            "reduce_scatter", outs, collectives._reduce_scatter, output, ins, opts.reduceOp, opts.asyncOp
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = ReduceScatterOptions()
    ) -> Any:
        own = self._own([output, input])
        if own is None:
            return super().reduce_scatter_single(output, input, opts)  # type: ignore[misc]
        out, tensor = own
        if out.dim() != tensor.dim():
            tensor, out = _flat(tensor, out)
        return self._run(
            "reduce_scatter_single", [output], collectives._reduce_scatter, out, tensor,
            opts.reduceOp, opts.asyncOp,
        )  # fmt: skip

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = AllToAllOptions()) -> Any:
        outs, ins = self._own(outputs), self._own(inputs)
        if outs is None or ins is None:
            return super().alltoall(outputs, inputs, opts)
        return self._run("all_to_all", outs, all_to_all._all_to_all, outs, ins, opts.asyncOp)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = AllToAllOptions(),
    ) -> Any:
        own = self._own([output, input])
        if own is None:
            return super().all_to_all_single(  # type: ignore[misc]
                output, input, output_split_sizes, input_split_sizes, opts
            )
        out, tensor = own
        return self._run(
            "all_to_all_single", [output], all_to_all._all_to_all_single, out, tensor,
            output_split_sizes, input_split_sizes, opts.asyncOp,
        )  # fmt: skip

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = GatherOptions()) -> Any:
        outs, ins = self._own(outputs[0] if outputs else []), self._own(inputs)
        if outs is None or ins is None:
            return super().gather(outputs, inputs, opts)
        (tensor,) = ins
        gathered = outs if outputs else None
        return self._run(
            "gather", outs, rooted._gather, tensor, gathered, opts.rootRank, opts.asyncOp
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = ScatterOptions()) -> Any:
        outs, ins = self._own(outputs), self._own(inputs[0] if inputs else [])
        if outs is None or ins is None:
            return super().scatter(outputs, inputs, opts)
        (tensor,) = outs
        scattered = ins if inputs else None
        return self._run(
            "scatter", outs, rooted._scatter, tensor, scattered, opts.rootRank, opts.asyncOp
        )

    def barrier(self, opts: Any = BarrierOptions()) -> Any:
        if self._own([]) is None:
            return super().barrier(opts)
        timeout = opts.timeout if opts.timeout > timedelta(0) else None
        return self._run("barrier", [], collectives._barrier, opts.asyncOp, timeout)

    # -- ending --------------------------------------------------------------------------------

    def abort(self) -> None:
        """Make every wait of every rank end with an error; the group cannot be used any more."""
        self._place.abort(f"rank {self.rank()} aborted process group {self._group_name!r}")
        self._end("aborted")

    def shutdown(self) -> None:
        """Leave the group and give its memory back. Not collective; ``destroy_process_group`` calls it."""
        self._end("destroyed")

    def _end(self, how: str) -> None:
        if not self._ended:
            self._ended = how
            self.interlace_communicator.close()
        if self._gloo is not None:
            self._gloo.shutdown()


def _flat(long: torch.Tensor, short: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch lets a flat tensor stand for one of the same length; 0-dim and stacked ones stay."""
    if long.dim() == short.dim() + 1 or not long.is_contiguous():
        return long, short
    return long.view(-1), short.reshape(-1)


for _name, _method in list(vars(InterlaceProcessGroup).items()):
    if callable(_method) and not _name.startswith("__"):
        outside_compilation(_method)
