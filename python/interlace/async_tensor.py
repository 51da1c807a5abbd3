"""AsyncTensor: what a functional op returns, a tensor that waits by itself when it is first used."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _register_work

from interlace.runtime.work import Work

_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default
_aten: Any = torch.ops.aten
_VIEWS = frozenset((_aten.view.default, _aten.detach.default, _aten.alias.default))


class AsyncTensor(torch.Tensor):
    """A tensor whose op may still be running. ``size()``, ``stride()`` and views do not wait; all else does.

    :meth:`wait` gives the plain tensor. In a graph that is traced, the wait comes where the first use is.
    """

    _inner: torch.Tensor
    _work: Work | None
    _waited: bool

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, work: Work | None = None) -> AsyncTensor:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        self._inner, self._work, self._waited = inner, work, False
        return self  # type: ignore[no-any-return]

    def wait(self) -> torch.Tensor:
        """The plain tensor, complete. Raises what the op failed with. A second call waits for nothing."""
        if not self._waited:
            if self._work is not None:
                self._work.wait()
                self._work = None
            else:
                self._inner = _wait_tensor(self._inner)
            self._waited = True
        return self._inner

    @property
    def completed(self) -> bool:
        """Whether a use would not have to wait; never blocks. False if only torch's registry knows."""
        return self._waited or (self._work is not None and self._work.is_completed())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS and not args[0]._waited:
            source = args[0]
            return AsyncTensor(func(source._inner, *args[1:], **(kwargs or {})), source._work)
        plain = [_opened(each) for each in args]
        if kwargs:
            kwargs = {key: _opened(value) for key, value in kwargs.items()}
            return func(*plain, **kwargs)
        return func(*plain)

    # -- torch.compile: a pair of a plain tensor and the wait that is still to come ---------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self._work is not None:
            _register_work(self._inner, self._work)  # type: ignore[arg-type]
            self._work = None
        return ["_inner"], self._waited

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], waited: Any, size: Any, stride: Any
    ) -> AsyncTensor:
        made = AsyncTensor(inner["_inner"])
        made._waited = waited
        return made

    def __coerce_tangent_metadata__(self) -> torch.Tensor:
        return self.wait()

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        return self.wait() if expected_type is torch.Tensor else None

    # -- what Tensor does without the dispatcher ---------------------------------------------------

    def tolist(self) -> Any:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def data_ptr(self) -> int:
        return self.wait().data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AsyncTensor({self.wait()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wait().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.wait().clone()


def _opened(value: Any) -> Any:
    """``value`` with the plain tensor for every AsyncTensor in it."""
    if type(value) is AsyncTensor:
        return value.wait()
    if isinstance(value, (list, tuple)):
        return type(value)([_opened(each) for each in value])
    return value


class _Tracked(torch.autograd.Function):
    """Wraps a tensor with a history, which the wrapper keeps."""

    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor) -> torch.Tensor:
        return AsyncTensor(inner)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return wait(grad)


def wrapped(inner: torch.Tensor) -> torch.Tensor:
    """``inner``, the output of an op of ``torch.ops.interlace``, as an AsyncTensor."""
    if inner.requires_grad:
        return _Tracked.apply(inner)  # type: ignore[no-any-return,no-untyped-call]
    return AsyncTensor(inner)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a plain one, complete; itself if it is one already."""
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor
