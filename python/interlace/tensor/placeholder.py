"""A tensor that is on other ranks: shape, dtype and device, no data.

It works like torch's meta tensors, on any device: arithmetic returns placeholders. An operation that needs
values raises :class:`PlaceholderError`.

Gradients: a placeholder that requires them has a node in the graph. So ``backward`` of a result computed
from it reaches the op that it came from, which communicates in backward as well. A rank calls ``backward``
where the ranks with the data do, with the same code. Tensors with data that are combined with a placeholder
get no gradient from that, because the result is not computed here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter, tree_map

READING = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
COMMUNICATION = ("interlace", "c10d", "_c10d_functional", "c10d_functional", "_dtensor")
# calls about the graph itself, in which a tensor with data must stay unchanged
ABOUT_GRAPHS = frozenset(("backward", "grad", "__get__", "__set__", "__delete__"))


class PlaceholderError(TypeError, RuntimeError):
    """Raised by an operation that needs the data of a :class:`Placeholder`, on a rank without it."""


class Placeholder(torch.Tensor):
    """A stand-in for a tensor that is on ``ranks`` and not here. It takes no memory: 0 bytes of storage.

    Parameters
    ----------
    shape : the tensor's shape.
    dtype, device : the tensor's; by default torch's defaults.
    requires_grad : whether it is a leaf that gets a gradient, which is a placeholder again.
    ranks : ranks of the default group on which the value is valid; () if unknown.

    A result of several placeholders is valid on the ranks on which all of them are.

    >>> from interlace.tensor import Placeholder
    >>> there = Placeholder((4, 2), dtype=torch.bfloat16, ranks=[3])
    >>> there
    Placeholder(shape=(4, 2), dtype=torch.bfloat16, device=cpu, ranks=(3,))
    >>> (there @ torch.ones(2, 5, dtype=torch.bfloat16)).sum(0).shape
    torch.Size([5])
    >>> there.untyped_storage().nbytes()
    0
    """

    ranks: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        ranks: Iterable[int] = (),
    ) -> "Placeholder":
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.empty(0).device if device is None else torch.device(device)
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        placeholder = _standing_for(meta, device, tuple(ranks))
        if requires_grad:
            placeholder.requires_grad_()
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ABOUT_GRAPHS:
            args, kwargs = tree_map(_without_gradient, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _infer(func, args, kwargs or {})

    def _refuse(self, action: str) -> PlaceholderError:
        where = f"ranks {list(self.ranks)} of the default group" if self.ranks else "other ranks"
        return PlaceholderError(
            f"{action}: a Placeholder of shape {tuple(self.shape)} and {self.dtype} has no data here; its "
            f"value is on {where}"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        text = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        needs = ", requires_grad=True" if self.requires_grad else ""
        return f"Placeholder({text}, ranks={self.ranks}{needs})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Placeholder":
        return _rebuilt(*self._description())

    def __reduce_ex__(self, protocol: object) -> Any:
        return _rebuilt, self._description()

    def _description(self) -> tuple[Any, ...]:
        return tuple(self.shape), self.dtype, self.device, self.requires_grad, self.ranks


def _refusing(name: str) -> Callable[..., object]:
    def refuse(self: Placeholder, *args: object, **kwargs: object) -> object:
        raise self._refuse(name.strip("_"))

    refuse.__name__ = name
    return refuse


for _name in (
    "item", "tolist", "numpy", "data_ptr", "storage", "__array__", "__dlpack__", "__bool__", "__float__",
    "__int__", "__index__", "__complex__", "__contains__",
):  # fmt: skip
    setattr(Placeholder, _name, _refusing(_name))


def _rebuilt(shape: Any, dtype: Any, device: Any, requires_grad: bool, ranks: Any) -> Placeholder:
    return Placeholder(shape, dtype=dtype, device=device, requires_grad=requires_grad, ranks=ranks)


# torch.load(weights_only=True) may call this: it makes a checkpoint's Placeholders from plain data
FORMER = (
    "interlace.tensor.uneven.placeholder._rebuilt"  # its name in checkpoints of earlier commits
)
torch.serialization.add_safe_globals([_rebuilt, (_rebuilt, FORMER)])


def _standing_for(meta: torch.Tensor, device: torch.device, ranks: tuple[int, ...]) -> Placeholder:
    make: Any = torch.Tensor._make_wrapper_subclass
    about: Any = {"dtype": meta.dtype, "device": device, "storage_size": 0}
    placeholder = make(Placeholder, meta.shape, meta.stride(), **about)
    placeholder.ranks = ranks
    return placeholder  # type: ignore[no-any-return]


def _without_gradient(value: object) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, Placeholder):
        return value.detach() if value.requires_grad else value
    return value


def _infer(func: OpOverload, args: object, kwargs: dict[str, object]) -> Any:
    """Return the result of ``func``, as far as it can be inferred without data."""
    name = func._schema.name.partition("::")[2]
    placeholders = [each for each in tree_iter((args, kwargs)) if isinstance(each, Placeholder)]
    first = placeholders[0]
    if func.namespace in COMMUNICATION:
        return _communicate(func, name, args, first)
    if name in READING:
        raise first._refuse(name.strip("_"))
    _check_written(func, name, args, kwargs, first)
    ranks = tuple(
        r for r in first.ranks if all(r in placeholder.ranks for placeholder in placeholders)
    )
    device = first.device
    # keeps the meta tensor as well: an id is unique only while its owner lives
    stand_ins: dict[int, tuple[Placeholder, torch.Tensor]] = {}

    def to_meta(value: object) -> object:
        nonlocal device
        if isinstance(value, torch.device):
            device = value
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Placeholder):
            stand_ins[id(meta)] = value, meta
        return meta

    def to_placeholder(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in stand_ins:
            return _standing_for(value, device, ranks)
        known, _ = stand_ins[id(value)]
        if known.shape != value.shape:
            raise first._refuse(f"{name}, which changes a shape in place")
        return known

    try:
        meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
        result = func(*meta_args, **meta_kwargs)
    except NotImplementedError as error:
        raise first._refuse(f"{name}, whose result depends on values") from error
    return tree_map(to_placeholder, result)


def _check_written(
    func: OpOverload, name: str, args: Any, kwargs: dict[str, object], first: Placeholder
) -> None:
    """Refuse writes to a tensor with data, which would keep values that it should not have any more."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for each in tree_iter(value):
            if isinstance(each, torch.Tensor) and not isinstance(each, Placeholder):
                raise first._refuse(f"{name}, into a tensor that has data")


def _communicate(func: OpOverload, name: str, args: Any, first: Placeholder) -> Any:
    """Run a collective on a placeholder if receivers read only its shape; refuse it otherwise."""
    if name == "wait_tensor":
        return first
    if func.namespace == "interlace":
        from interlace.groups.specs import bind

        communicator = bind(args[-1], args[-2])
        if name in ("broadcast", "scatter") and args[1] != communicator.rank:
            empty = torch.empty(first.shape, dtype=first.dtype, device=first.device)
            return func(empty, *args[1:])
        with communicator.accepting(name):
            raise first._refuse(name)
    raise first._refuse(name)
