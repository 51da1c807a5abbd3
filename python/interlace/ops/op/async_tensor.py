"""AsyncTensor, the result of a functional op: a tensor that waits when it is first used."""

import functools
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from interlace.runtime.compat.torch_groups import _register_work
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    above_autograd,
    allow_in_graph,
    modes_active,
    returned_by_traces,
    transforms_active,
)
from interlace.runtime.core.work import Work

_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default
_aten: Any = torch.ops.aten
_view, _detach, _alias = _aten.view.default, _aten.detach.default, _aten.alias.default
_AS_THEY_ARE = frozenset((int, float, bool, torch.Tensor))


class _Failed:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return True


_CHANGE_SHAPE = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in (
        "t_", "transpose_", "unsqueeze_", "squeeze_", "swapdims_", "swapaxes_", "as_strided_", "resize_",
        "resize_as_", "set_",
    )
    for overload in getattr(_aten, name).overloads()
)  # fmt: skip


class AsyncTensor(torch.Tensor):
    """A tensor whose op may still be running. ``size()``, ``stride()``, ``view()`` do not wait.

    :meth:`wait` returns the plain tensor. In a traced graph, the wait is placed at the first use. The
    functions of :mod:`interlace.functional` return it. Semantics: the ``AsyncCollectiveTensor`` of
    ``torch.distributed._functional_collectives``.

    >>> def summed():
    ...     y = functional.all_reduce(torch.ones(2))
    ...     return type(y).__name__, type(y.wait()).__name__, y.completed
    >>> interlace.run(summed, 2)[0]
    ('AsyncTensor', 'Tensor', True)
    """

    _inner: torch.Tensor
    _work: Work | _Failed | None
    _waited: bool
    _of_graph: bool

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, work: Work | None = None) -> "AsyncTensor":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        self._inner, self._work, self._waited = inner, work, False
        self._of_graph = False
        return self

    def wait(self) -> torch.Tensor:
        """Return the complete plain tensor. Raise the op's error. A second call does not wait."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Opened.apply(self)  # type: ignore[no-any-return,no-untyped-call]
        return self._complete()

    def _complete(self) -> torch.Tensor:
        """Wait for the op, and return the tensor under this one, without this one's autograd history."""
        if not self._waited:
            if self._work is not None:
                self._work.wait()
                self._work = None
            else:
                try:
                    self._inner = _wait_tensor(self._inner)
                except Exception as error:
                    self._work = _Failed(error)  # torch's registry forgets the op after this wait
                    raise
            self._waited = True
        if self._of_graph and self.requires_grad:
            # its gradient goes to code that was compiled for an AsyncTensor
            self._of_graph = False
            self.register_hook(complete)  # type: ignore[no-untyped-call]
        return self._inner

    @property
    def completed(self) -> bool:
        """Whether a use would not wait; never blocks. False if only torch's registry knows the op."""
        return self._waited or (self._work is not None and self._work.is_completed())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _view or func is _detach or func is _alias:
            source = args[0]
            # keep the wait next to the op for a compiler: a view costs nothing there
            if not source._waited and (source._work is not None or func is not _view):
                return AsyncTensor(func(source._inner, *args[1:], **(kwargs or {})), source._work)
        elif func in _CHANGE_SHAPE and type(args[0]) is AsyncTensor:
            raise RuntimeError(
                f"{func} would change the shape of an AsyncTensor in place: apply it to its wait()"
            )
        plain = [
            each._complete()
            if (kind := type(each)) is AsyncTensor
            else (each if kind in _AS_THEY_ARE else _open(each))
            for each in args
        ]
        if kwargs:
            kwargs = {key: _open(value) for key, value in kwargs.items()}
            if func is _aten.clone.default and type(plain[0]) not in PLAIN_TYPES:
                # AOTAutograd makes tangents contiguous, and expects the same type as before
                return complete(func(*plain, **kwargs))
            return func(*plain, **kwargs)
        return func(*plain)

    # -- torch.compile: a pair of a plain tensor and a wait that is still to come -----------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self._work is not None:
            _register_work(self._inner, self._work)  # type: ignore[arg-type]
            self._work = None
        return ["_inner"], self._waited

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], waited: Any, size: Any, stride: Any
    ) -> "AsyncTensor":
        _take_plain_tangents()
        tensor = AsyncTensor(inner["_inner"])
        tensor._waited = waited
        tensor._of_graph = True
        return tensor

    def __coerce_tangent_metadata__(self) -> "AsyncTensor":
        return complete(self._complete())

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        plain = self._complete()
        return plain if expected_type is torch.Tensor else complete(plain)

    # -- methods of Tensor that do not use the dispatcher ------------------------------------------

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AsyncTensor({self.wait()})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.wait().clone()


def _of_plain(name: str) -> Any:
    """Return a method that waits and calls the plain tensor's method of that name."""

    def method(self: AsyncTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.wait(), name)(*args, **kwargs)

    return method


for _name in (
    "backward", "tolist", "numpy", "data_ptr", "__dlpack__", "__format__", "__reduce_ex__",
):  # fmt: skip
    setattr(AsyncTensor, _name, _of_plain(_name))


def _operator(name: str, tensors: str = "") -> Any:
    """Return an operator that waits first: Tensor's operators would hide a TypeError from the wait.

    (They take it for "not implemented".) ``tensors``: for a reflected operator, the left tensor's operator.
    """
    plain, of_left = getattr(torch.Tensor, name), getattr(torch.Tensor, tensors or name)

    def operator(self: AsyncTensor, other: Any) -> Any:
        if not (torch.compiler.is_compiling() or modes_active()):
            _open([self, other])
        if tensors and isinstance(other, torch.Tensor):
            return of_left(other, self)
        return plain(self, other)

    return operator


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(AsyncTensor, f"__{_name}__", _operator(f"__{_name}__"))
for _name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or",
    "xor",
):  # fmt: skip
    setattr(AsyncTensor, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(AsyncTensor, f"__r{_name}__", _operator(f"__r{_name}__", f"__{_name}__"))


def _open(value: Any) -> Any:
    if type(value) is AsyncTensor:
        return value._complete()
    if isinstance(value, (list, tuple)):
        return type(value)([_open(each) for each in value])
    return value


def complete(tensor: torch.Tensor) -> AsyncTensor:
    """Return ``tensor``, which nothing writes any more, as an AsyncTensor."""
    if isinstance(tensor, AsyncTensor):
        tensor = tensor._complete()
    result = AsyncTensor(tensor)
    result._waited = True
    return result


@functools.cache
def _wait_in_traces() -> None:
    """Wait at the end of a traced function for results that it returns without a use."""
    returned_by_traces(AsyncTensor, AsyncTensor._complete)


@functools.cache
def _take_plain_tangents() -> None:
    """Replace torch's ``process_runtime_tangent``, which runs before the backward of a compiled function.

    For a result that no loss has used, autograd has plain zeros. torch takes these for the tangent of an
    AsyncTensor whose type it guessed wrong, and calls a method that plain tensors do not have.
    """
    from torch._functorch._aot_autograd import runtime_wrappers  # imports torch's compilers

    dispatch: Any = getattr(runtime_wrappers, "AOTDispatchAutograd", None)
    stock: Any = getattr(dispatch, "process_runtime_tangent", None)

    def process(tangent: Any, expected: Any, *about: Any, **more: Any) -> Any:
        plain = type(tangent) is torch.Tensor
        if plain and getattr(expected, "original_subclass_type", None) is AsyncTensor:
            tangent = complete(tangent)
        return stock(tangent, expected, *about, **more)

    if stock is not None:  # a torch without this function reports its limit itself
        dispatch.process_runtime_tangent = staticmethod(process)


class _Tracked(torch.autograd.Function):
    """Wrap a tensor with an autograd history as an AsyncTensor with the same history."""

    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor) -> torch.Tensor:
        return AsyncTensor(inner)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return wait(grad)


class _Opened(torch.autograd.Function):
    """Unwrap an AsyncTensor with an autograd history to the plain tensor."""

    @staticmethod
    def forward(ctx: Any, outer: AsyncTensor) -> torch.Tensor:
        return outer._complete().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _AboveAutograd(AsyncTensor):
    """For ``torch.export``, which traces above autograd and allows no subclass there: it waits before."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PEEKED:
            args = tree_map_only(_AboveAutograd, lambda each: each._inner, args)
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(AsyncTensor, AsyncTensor._complete, (args, kwargs or {}))
        return func(*args, **kwargs)

    def wait(self) -> torch.Tensor:
        return self._complete()


_PEEKED = frozenset(  # these do not read a tensor's values
    [
        getattr(torch.Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf",
        )
    ]
    + [
        getattr(torch.Tensor, name)
        for name in (
            "size", "stride", "dim", "numel", "storage_offset", "is_floating_point", "element_size",
        )
    ]
)  # fmt: skip


def wrap(inner: torch.Tensor) -> torch.Tensor:
    """Return ``inner``, the output of an op of ``torch.ops.interlace``, as an AsyncTensor."""
    if transforms_active():  # they allow no subclass of their tensors
        return _wait_tensor(inner)  # type: ignore[no-any-return]
    if modes_active() or above_autograd():
        _wait_in_traces()
    if above_autograd():
        return _AboveAutograd(inner)
    if inner.requires_grad:
        return _Tracked.apply(inner)  # type: ignore[no-any-return,no-untyped-call]
    return AsyncTensor(inner)


@allow_in_graph
def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, of any shape, as a complete plain tensor; a plain tensor is returned as it is.

    Also accepts results of torch's functional collectives. Raises :class:`CollectiveTimeoutError`,
    :class:`PeerDiedError` and so on, if the op failed. Semantics:
    ``torch.distributed._functional_collectives.wait_tensor``.

    >>> interlace.run(lambda: functional.wait(functional.all_reduce(torch.ones(1))), 2)
    [tensor([2.]), tensor([2.])]
    """
    started: Any = tensor
    return started.wait() if isinstance(tensor, (AsyncTensor, *_of_torch())) else tensor


def _of_torch() -> tuple[type, ...]:
    """Return torch's class for the same purpose, or () before a program has imported it."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    return () if module is None else (module.AsyncCollectiveTensor,)
