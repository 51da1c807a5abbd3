"""One gather for all linears that read the same sequence-sharded input: q, k and v, or w1 and w3.

The first linear multiplies while it gathers, and its op also returns the gathered input ``X``. In backward
the linears' gradients of ``X`` are added before one reduce-scatter::

    wq(x)   all_gather_matmul(x, Wq) -> q, X        wk(x)   X @ Wk        wv(x)   X @ Wv

``X`` is kept for ``x``, the same tensor object, while that lives. ``x`` is gathered again for a linear that
has read ``X`` already, after a backward through the op, after ``x`` has changed, under another autocast or
gradient mode, in another checkpointed region, and when activation checkpointing calls the linears again. So
a forward and its recomputation run the same ops, and all ranks decide alike.

``X`` must not refer back to ``x``, or both would live for ever. It does if ``x`` is a leaf that requires a
gradient; for such leaves only the ``X`` of the last one of a thread is kept.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from interlace.runtime.compat.torch_modes import modes_active

Tensor = torch.Tensor


class _Kept:
    """A gathered input, the state in which it may be used, and the linears that have read it."""

    def __init__(self, gathered: Tensor, state: tuple[object, ...]) -> None:
        self.gathered: Tensor | None = gathered
        self.state, self.readers = state, list[Any]()
        self.region = weakref.ref(_region())  # weak, because it may refer to the input


class _OwnGathers(threading.local):
    def __init__(self) -> None:
        self.kept: Any = WeakTensorKeyDictionary()
        self.leaf: Any = None  # a weak reference to the last input that is a leaf


_own = _OwnGathers()


def can_share() -> bool:
    """Return whether tensors are ordinary; a compiler sees a whole graph and fuses gathers itself."""
    return not (torch.compiler.is_compiling() or modes_active())


def find(input: Tensor, reader: object, *how: object) -> Tensor | None:
    """Return the gathered ``input``, if ``reader`` has not read it yet; ``how`` it was gathered."""
    kept = _own.kept.get(input) if can_share() else None
    if kept is None or kept.gathered is None or kept.state != _state(input, how):
        return None
    if kept.region() is not _region():
        return None
    if any(each() is reader for each in kept.readers):
        return None
    kept.readers.append(weakref.ref(reader))
    gathered: Tensor = kept.gathered
    return gathered


def keep(input: Tensor, reader: object, gathered: Tensor, output: Tensor, *how: object) -> None:
    """Make :func:`find` return ``gathered``, made by ``reader`` from ``input`` with ``output``."""
    kept = _Kept(gathered, _state(input, how))
    kept.readers.append(weakref.ref(reader))
    weak = weakref.ref(kept)

    def forget(_: Tensor) -> None:
        if (found := weak()) is not None:
            found.gathered = None

    for each in (gathered, output):
        if each.requires_grad:
            # the op's backward frees the tensors that it has saved
            each.register_hook(forget)  # type: ignore[no-untyped-call]
    if input.is_leaf and input.requires_grad:
        before = None if _own.leaf is None else _own.leaf()
        if before is not None:
            _own.kept.pop(before, None)
        _own.leaf = weakref.ref(input)
    _own.kept[input] = kept


def _state(input: Tensor, options: tuple[object, ...]) -> tuple[object, ...]:
    local = input._local_tensor if isinstance(input, DTensor) else input
    version = None if local.is_inference() else local._version
    kind = local.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (*options, version, autocast, *_pass())


def _outside() -> None:
    """Stand for the region outside activation checkpointing."""


def _region() -> object:
    """Return the hook that saves tensors for backward: torch uses another function in each region."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return _outside if hooks is None else hooks[0]


NO_BACKWARD = -1  # the task id outside a backward


def _pass() -> tuple[bool, int]:
    """Return values that differ between a forward and its recomputation, which runs inside a backward."""
    return torch.is_grad_enabled(), torch._C._current_graph_task_id()


class _Later(torch.autograd.Function):
    """From a shard to an :class:`Ungathered`; in backward a replicated gradient becomes the shard's."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> DTensor:
        ctx.placements = shard.placements
        spec = DTensorSpec(shard.device_mesh, (Replicate(),), tensor_meta=shard._spec.tensor_meta)
        local = shard._local_tensor.detach()
        ungathered: DTensor = DTensor.__new__(Ungathered, local, spec, requires_grad=False)
        return ungathered

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


class Ungathered(DTensor):
    """A replicated DTensor of which each rank has its shard until an op other than a linear reads it.

    A module's input is one if a PrepareModuleInput asks for a gathered input. After the gather the gathered
    tensor stands for it, in every mode, because an op may change it in place. Its gradient leads to the
    gradient of the shard, where the gradients of linears and of other ops are added.
    """

    shard: DTensor
    _say: Callable[[str], None]
    _gathered: DTensor | None
    _born: tuple[object, bool]  # the gathered tensor's node in the graph before any change in place
    _read: dict[object, DTensor]

    @staticmethod
    def of(shard: DTensor, say: Callable[[str], None]) -> "Ungathered":
        """Return a tensor for ``shard``; ``say`` is called with the name of an op that gathers it."""
        shard = shard.redistribute(
            placements=shard.placements
        )  # a node in which the gradients are added
        ungathered = _Later.apply(shard)  # type: ignore[no-untyped-call]
        ungathered.shard, ungathered._say, ungathered._gathered, ungathered._read = (
            shard,
            say,
            None,
            {},
        )
        return ungathered  # type: ignore[no-any-return]

    def for_linear(self, linear: object) -> DTensor:
        """Return the shard, which ``linear`` gathers while it multiplies, or the tensor if it is gathered.

        Within a backward return what ``linear`` read last: a recomputation repeats its forward.
        """
        read = self.shard if self._gathered is None else self._gathered
        if _pass()[1] != NO_BACKWARD:
            return self._read.get(linear, read)
        self._read[linear] = read
        return read

    def whole(self, reader: str) -> DTensor:
        if self._gathered is None:
            self._say(reader)
            local = self.shard._local_tensor
            with torch.inference_mode(local.is_inference()), torch.enable_grad():
                self._gathered = self.shard.redistribute(placements=self.placements)
            self._born = _place_in_graph(self._gathered)
        return self._gathered

    def _in_graph(self) -> DTensor:
        """Return the tensor whose gradient is this tensor's gradient."""
        changed = self._gathered is not None and _place_in_graph(self._gathered) != self._born
        return self._gathered if changed else self.shard  # type: ignore[return-value]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))

        def stand_in(each: Ungathered) -> DTensor:
            return each._in_graph() if func in _OF_GRADIENTS else each.whole(name)

        args, kwargs = tree_map_only(Ungathered, stand_in, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def _local_tensor(self) -> Tensor:
        return self.whole("to_local")._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, tensor: Tensor) -> None:
        """Ignore the shard's tensor, which DTensor's constructor sets."""

    def to_local(self, **options: Any) -> Tensor:
        return self.whole("to_local").to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        return self.whole("full_tensor").full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        return self.whole("redistribute").redistribute(*args, **options)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Ungathered(shard={self.shard!r})"


def _place_in_graph(tensor: Tensor) -> tuple[object, bool]:
    return tensor.grad_fn, tensor.requires_grad


_class: Any = Tensor
_METADATA: frozenset[object] = frozenset(
    {
        _class.shape.__get__, _class.dtype.__get__, _class.device.__get__, _class.ndim.__get__,
        _class.layout.__get__, Tensor.size, Tensor.stride, Tensor.dim, Tensor.ndimension,
        Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
    }
)  # fmt: skip
_OF_GRADIENTS: frozenset[object] = frozenset(
    {
        _class.requires_grad.__get__, _class.is_leaf.__get__, _class.grad_fn.__get__,
        _class.grad.__get__, _class.grad.__set__, _class.retains_grad.__get__, Tensor.retain_grad,
        Tensor.register_hook, torch.autograd.grad, torch.autograd.backward, Tensor.backward,
    }
)  # fmt: skip
