"""The collectives of a process group in Python: the path of a call, and interlace's internal forms.

Ranks in options (``rootRank``) and of ``send`` and ``recv`` are ranks of the group.
"""

import abc
import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from interlace.groups.groups import OnInterlace
from interlace.ops.collectives import point_to_point, rooted, rootless
from interlace.ops.collectives.all_to_all import _all_to_all, _all_to_all_single
from interlace.ops.collectives.rootless import (
    _all_gather_coalesced,
    _all_reduce_coalesced,
    _reduce_scatter_tensor_coalesced,
)
from interlace.process_group import dispatch
from interlace.process_group.dispatch import all_flat, flat, long_form
from interlace.runtime.compat import torch_groups
from interlace.runtime.compat.torch_groups import c10d
from interlace.runtime.compat.torch_modes import PLAIN_TYPES, above_autograd, modes_active
from interlace.runtime.core import place as places
from interlace.runtime.core.errors import InterlaceError, PlaceUnavailableError
from interlace.runtime.core.place import Place
from interlace.runtime.core.work import Work

Tensors = list[torch.Tensor]

_DEFAULT_ALLREDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_DEFAULT_ALLGATHER = c10d.AllgatherOptions()
_DEFAULT_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_DEFAULT_ALL_TO_ALL = c10d.AllToAllOptions()

# The result of a synchronous call: torch waits for it and drops it.
_done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
_done.set_result([])
COMPLETED: Work = c10d._create_work_from_future(_done)

_ZERO = timedelta(0)


class OpOptions(Protocol):
    """Options as torch passes them: each op has some of these."""

    asyncOp: bool
    timeout: timedelta
    rootRank: int
    reduceOp: object


class HostCopies:
    """Copies of a call's tensors in host memory, without overlap; copies back are enqueued."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of ``tensors``, which are complete; wait for the device."""
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self._pairs += zip(tensors, copies, strict=True)
        return copies

    def back(self, outputs: Sequence[torch.Tensor]) -> None:
        """Copy ``outputs`` back to their originals, whether ``outputs`` are the copies or the originals."""
        filled = {output.data_ptr() for output in outputs}
        for original, copy in self._pairs:
            if original.data_ptr() in filled or copy.data_ptr() in filled:
                original.detach().copy_(copy)


class Works(torch_groups.Work):
    """Several ops; ``wait`` waits for them in their order."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


ON_GPU = HostCopies()  # has no copies: the tensors of the call stay on their GPU


class Collectives(OnInterlace, torch_groups.ProcessGroup):  # type: ignore[misc]
    """Methods that torch calls to move tensors; ``InterlaceProcessGroup`` is the whole group.

    ``_has_gpus``: whether ``device_communicator`` serves tensors on GPUs, equal on all ranks of a job.
    """

    device_communicator: Any
    _place: Place
    _waits: Any  # the group of the processes of this host
    _group_name: str
    _has_gpus: bool
    _sequence = 0
    _ended = ""
    _copies: HostCopies | None = None
    _coalescing: list[Work] | None = None  # the Works of the calls since coalescing began
    _above = 0  # the number of torch's own methods that are running

    @abc.abstractmethod
    def _make_dispatchable(self) -> None:
        """Give this group the C++ backend that torch's kernels of ``c10d::`` ops need. Collective."""

    # -- which way a call goes -----------------------------------------------------------------

    def _own(self, tensors: Tensors) -> Tensors | None:
        """Return plain tensors that this group serves, or None if torch's dispatcher sees them first."""
        if self._ended:
            raise InterlaceError(
                f"rank {self.rank()}: process group {self._group_name!r} was {self._ended}"
            )
        if not (modes_active() or above_autograd()):
            for tensor in tensors:
                if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
                    break
            else:
                return tensors
        return self._unusual(tensors)

    def _unusual(self, tensors: Tensors) -> Tensors | None:
        plain = dispatch.underlying(tensors)
        if (
            plain
            and self._has_gpus
            and all(isinstance(t, torch.Tensor) and t.is_cuda for t in plain)
        ):
            self._copies = ON_GPU
            return plain
        if self._copies is ON_GPU:
            self._copies = None  # left by a call that was refused before it ran
        if plain is None:
            return None
        here = self._place.device.type
        if any(isinstance(t, torch.Tensor) and t.device.type != here for t in plain):
            self._copies = self._copies or HostCopies()
            return self._copies.of(plain)
        return plain

    def _dispatched(self, name: str, tensors: Sequence[object], *rest: object) -> Work:
        """Pass a call of method ``name`` to torch's dispatcher, by torch's own method of that name.

        A call that comes out of the dispatcher is served here. The result is the Work of that call, because
        torch's Work would hide its errors and its source.
        """
        works: list[Work | None] = []

        def serve(*given: object) -> Work | None:
            works.append(getattr(self, name)(*given[: len(tensors)], *rest))
            return works[-1]

        self._above += 1
        try:
            with contextlib.ExitStack() as around:
                if not dispatch.is_simulated(tree_leaves(tensors)):
                    if dispatch.needs_backend():
                        self._make_dispatchable()
                    else:
                        around.enter_context(dispatch.returning_to(self, serve))
                work: Work = torch_groups.torchs_own(name)(self, *tensors, *rest)
        finally:
            self._above -= 1
        return works[-1] if works and works[-1] is not None else work

    def _run(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        function: Callable[..., Work | None],
        *args: Any,
        opts: OpOptions | None = None,
    ) -> Work:
        """Call the internal form of an op, with ``opts`` if there are any; always return a Work."""
        if opts is not None:
            if opts.asyncOp or self._copies is not None:
                args = (*args, opts.asyncOp)
                if opts.timeout > _ZERO:
                    with places.timeout(opts.timeout):
                        return self._run(name, outputs, function, *args)
            else:
                self._waits.options = opts  # the timeout is read if a wait is necessary
        self._sequence += 1
        if self._copies is not None:
            work: Work | None = self._run_elsewhere(name, outputs, function, *args)
        else:
            try:
                work = function(self.interlace_communicator, *args)
            finally:
                self._waits.options = None
        if self._coalescing is not None and work is not None:
            self._coalescing.append(work)
        return COMPLETED if work is None else work

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a ``_coalescing_manager`` with a device. Ops start when they are called, in their order."""
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Works:
        works, self._coalescing = self._coalescing or [], None
        return Works(works)

    def _run_elsewhere(
        self, name: str, outputs: Sequence[torch.Tensor], function: Callable[..., Any], *args: Any
    ) -> Work:
        """Run an op on GPUs, or on copies of its tensors until it has finished."""
        copies, self._copies = self._copies, None
        assert copies is not None
        if copies is ON_GPU:
            work = function(self.device_communicator, *args)
            return COMPLETED if work is None else work
        if function in (point_to_point._isend, point_to_point._irecv):
            raise PlaceUnavailableError(
                f"rank {self.rank()}: {name} needs a tensor on {self._place.device}, where group "
                f"{self._group_name!r} has its memory"
            )
        work = function(self.interlace_communicator, *args)
        if work is not None:
            work.wait()
        copies.back(outputs)
        return Work(name, self._place, None, outputs)

    def allreduce(self, tensors: Tensors, opts: Any = None, *rest: object) -> Work:
        if type(opts) is not c10d.AllreduceOptions or type(tensors) is not list:
            return self.allreduce(*long_form(c10d.AllreduceOptions, [tensors], [opts, *rest]))
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("allreduce", (tensors,), opts)
        (tensor,) = plain
        dense = tensor.layout is torch.strided
        start = rootless._all_reduce if dense else rootless._all_reduce_sparse
        return self._run("all_reduce", plain, start, (tensor,), (opts.reduceOp,), opts=opts)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: OpOptions = _DEFAULT_ALLREDUCE_COALESCED
    ) -> Work:
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("allreduce_coalesced", (tensors,), opts)
        op, start = (opts.reduceOp,), _all_reduce_coalesced
        return self._run("all_reduce_coalesced", plain, start, (plain,), op, opts=opts)

    def broadcast(self, tensors: Tensors, opts: Any = None, *rest: object) -> Work:
        if type(opts) is not c10d.BroadcastOptions or type(tensors) is not list:
            return self.broadcast(*long_form(c10d.BroadcastOptions, [tensors], [opts, *rest]))
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("broadcast", (tensors,), opts)
        (tensor,) = plain
        root = None, opts.rootRank
        return self._run("broadcast", plain, rooted._broadcast, (tensor,), root, opts=opts)

    def reduce(self, tensors: Tensors, opts: Any = None, *rest: Any) -> Work:
        if type(opts) is not c10d.ReduceOptions or type(tensors) is not list:
            return self.reduce(*long_form(c10d.ReduceOptions, [tensors], [opts, *rest]))
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("reduce", (tensors,), opts)
        (tensor,) = plain
        options = None, opts.rootRank, opts.reduceOp
        return self._run("reduce", plain, rooted._reduce, (tensor,), options, opts=opts)

    def allgather(
        self, outputs: object, inputs: object, opts: OpOptions = _DEFAULT_ALLGATHER, *rest: object
    ) -> Work:
        if type(opts) is not c10d.AllgatherOptions or not type(outputs) is type(inputs) is list:
            return self.allgather(
                *long_form(c10d.AllgatherOptions, [outputs, inputs], [opts, *rest])
            )
        outs, ins = self._own(outputs[0]), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("allgather", (outputs, inputs), opts)
        (tensor,) = ins
        return self._run("all_gather", outs, rootless._all_gather, (outs, tensor), (), opts=opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: OpOptions = _DEFAULT_ALLGATHER
    ) -> Work:
        plain = self._own([output, input])
        if plain is None:
            return self._dispatched("all_gather_single", (output, input), opts)
        out, tensor = plain
        if out.dim() != tensor.dim():
            out, tensor = flat(out, tensor)
        start = rootless._all_gather
        return self._run("all_gather_single", [output], start, (out, tensor), (), opts=opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: OpOptions = _DEFAULT_REDUCE_SCATTER, *rest: Any
    ) -> Work:
        if type(opts) is not c10d.ReduceScatterOptions or not type(outputs) is type(inputs) is list:
            return self.reduce_scatter(
                *long_form(c10d.ReduceScatterOptions, [outputs, inputs], [opts, *rest])
            )
        outs, ins = self._own(outputs), self._own(inputs[0])
        if outs is None or ins is None:
            return self._dispatched("reduce_scatter", (outputs, inputs), opts)
        (output,) = outs
        op, start = (opts.reduceOp,), rootless._reduce_scatter
        return self._run("reduce_scatter", outs, start, (output, ins), op, opts=opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: OpOptions = _DEFAULT_REDUCE_SCATTER
    ) -> Work:
        plain = self._own([output, input])
        if plain is None:
            return self._dispatched("reduce_scatter_single", (output, input), opts)
        out, tensor = plain
        if out.dim() != tensor.dim():
            tensor, out = flat(tensor, out)
        op, start = (opts.reduceOp,), rootless._reduce_scatter
        return self._run("reduce_scatter_single", [output], start, (out, tensor), op, opts=opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: OpOptions = _DEFAULT_ALL_TO_ALL
    ) -> Work:
        outs, ins = self._own(outputs), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("alltoall", (outputs, inputs), opts)
        return self._run("all_to_all", outs, _all_to_all, (outs, ins), (), opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: OpOptions = _DEFAULT_ALL_TO_ALL,
    ) -> Work:
        splits = output_split_sizes, input_split_sizes
        plain = self._own([output, input])
        if plain is None:
            return self._dispatched("all_to_all_single", (output, input), *splits, opts)
        out, tensor = plain
        if not any(splits) and out.shape[1:] != tensor.shape[1:]:
            out, tensor = out.view(-1), tensor.reshape(-1)  # equal parts, for any shape
        return self._run(
            "all_to_all_single", [output], _all_to_all_single, (out, tensor), splits, opts=opts
        )

    def gather(self, outputs: object, inputs: object, opts: Any = None, *rest: object) -> Work:
        if type(opts) is not c10d.GatherOptions or not type(outputs) is type(inputs) is list:
            return self.gather(*long_form(c10d.GatherOptions, [outputs, inputs], [opts, *rest]))
        outs, ins = self._own(outputs[0] if outputs else []), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("gather", (outputs, inputs), opts)
        (tensor,) = ins
        gathered = outs if outputs else None
        root = None, opts.rootRank
        return self._run("gather", outs, rooted._gather, (tensor, gathered), root, opts=opts)

    # since torch 2.14
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: OpOptions) -> Work:
        parts = list(output.view(self.size(), -1)) if self.rank() == opts.rootRank else []
        return self.gather([parts] if parts else [], [input.reshape(-1)], opts)

    gather_into_tensor = gather_single  # the name that matches all_gather_into_tensor

    def scatter(self, outputs: object, inputs: object, opts: Any = None, *rest: object) -> Work:
        if type(opts) is not c10d.ScatterOptions or not type(outputs) is type(inputs) is list:
            return self.scatter(*long_form(c10d.ScatterOptions, [outputs, inputs], [opts, *rest]))
        outs, ins = self._own(outputs), self._own(inputs[0] if inputs else [])
        if outs is None or ins is None:
            return self._dispatched("scatter", (outputs, inputs), opts)
        (output,) = outs
        scattered = ins if inputs else None
        root = None, opts.rootRank
        return self._run("scatter", outs, rooted._scatter, (output, scattered), root, opts=opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if type(opts) is not c10d.BarrierOptions or timeout is not None:
            return self.barrier(*long_form(c10d.BarrierOptions, [], [opts, timeout]))
        if self._own([]) is None:
            return self._dispatched("barrier", (), opts)
        return self._run("barrier", [], rootless._barrier, opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run interlace's barrier: ``dist.monitored_barrier`` refuses every backend but gloo."""
        if self._own([]) is None:
            self._dispatched("monitored_barrier", (), timeout, wait_all_ranks)
            return
        point_to_point._monitored_barrier(self.interlace_communicator, timeout, wait_all_ranks)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: OpOptions = _DEFAULT_ALLGATHER
    ) -> Work:
        outs, ins = self._own([each for row in outputs for each in row]), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("allgather_coalesced", (outputs, inputs), opts)
        by_input = [outs[index :: len(ins)] for index in range(len(ins))]
        start = _all_gather_coalesced
        return self._run("all_gather_coalesced", outs, start, (by_input, ins), (), opts=opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: OpOptions = _DEFAULT_ALLGATHER
    ) -> Work:
        outs, ins = self._own(outputs), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("all_gather_single_coalesced", (outputs, inputs), opts)
        lists, start = all_flat(outs, ins), _all_gather_coalesced
        return self._run("all_gather_single_coalesced", outputs, start, lists, (), opts=opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: OpOptions = _DEFAULT_REDUCE_SCATTER
    ) -> Work:
        outs, ins = self._own(outputs), self._own(inputs)
        if outs is None or ins is None:
            return self._dispatched("reduce_scatter_single_coalesced", (outputs, inputs), opts)
        ins, outs = all_flat(ins, outs)
        op, start = (opts.reduceOp,), _reduce_scatter_tensor_coalesced
        name = "reduce_scatter_single_coalesced"
        return self._run(name, outputs, start, (outs, ins), op, opts=opts)

    # -- names that torch before 2.13 calls ----------------------------------------------------

    _allgather_base = torch_groups.under_old_name("all_gather_single")
    _reduce_scatter_base = torch_groups.under_old_name("reduce_scatter_single")
    alltoall_base = torch_groups.under_old_name("all_to_all_single")
    allgather_into_tensor_coalesced = torch_groups.under_old_name("all_gather_single_coalesced")
    reduce_scatter_tensor_coalesced = torch_groups.under_old_name("reduce_scatter_single_coalesced")

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("send", (tensors,), dstRank, tag)
        (tensor,) = plain
        return self._run("send", plain, point_to_point._isend, tensor, dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("recv", (tensors,), srcRank, tag)
        (tensor,) = plain
        return self._run("recv", plain, point_to_point._irecv, tensor, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        plain = self._own(tensors)
        if plain is None:
            return self._dispatched("recv_anysource", (tensors,), tag)
        (tensor,) = plain
        return self._run("recv_anysource", plain, point_to_point._irecv, tensor, None, tag)


torch_groups.keep_outside_compilation(Collectives)
