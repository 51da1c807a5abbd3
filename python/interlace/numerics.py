"""``check_numerics``: an error for every NaN that enters or leaves an op."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.runtime.core.hooks import HookedOp


@contextlib.contextmanager
def check_numerics(group: Group = None, *, inf: bool = False) -> Iterator[None]:
    """Raise an error, in this context, if an op of ``group`` reads or makes a NaN.

    The error names rank, op, argument and index. Tensors may have any shape, with floats, complex numbers
    or fp8. With ``inf`` infinities are errors as well; by default they are not, because masks contain them.

    A NaN in an input raises on all ranks before data moves, and the group stays usable. A NaN in a message
    that is sent, or in a result, ends the group. The rank that found it aborts the group, and the others
    raise an AbortedError with the same text. For an asynchronous op ``Work.wait`` raises it. The index
    counts complex numbers, even in torch's view of them as real numbers (not in inference mode). Each check
    takes a pass over the tensor, and on a GPU the host waits for it. Raises ValueError.

    >>> def on_rank():
    ...     tensor = torch.tensor([1.0, float("nan")]) if interlace.get_rank() else torch.ones(2)
    ...     with interlace.check_numerics():
    ...         try:
    ...             interlace.all_reduce(tensor)
    ...         except ValueError as error:
    ...             return str(error)
    >>> interlace.run(on_rank, 2)[1]
    'tensor of all_reduce has nan at [1] (on rank 1)'
    """
    communicator = resolve(group)

    def wrong(call: HookedOp, tensors: Mapping[str, torch.Tensor]) -> str:
        found = ((name, first(tensor, inf)) for name, tensor in tensors.items())
        return next((f"{name} of {call.op} has {where}" for name, where in found if where), "")

    def before(call: HookedOp) -> None:
        if text := wrong(call, call.inputs):
            raise ValueError(text)

    def after(call: HookedOp) -> None:
        if call.error is None and (text := wrong(call, call.outputs)):
            text += f" (on rank {communicator.rank})"
            call.group.place.abort(text)
            raise ValueError(text)

    with communicator.register_hook(before, after):
        yield


def first(tensor: torch.Tensor, inf: bool) -> str:
    """Return the first NaN in ``tensor`` (or infinity, if ``inf``) with its index, as text, or ""."""
    values, base = tensor.detach(), tensor._base
    if base is not None and base.is_complex():
        with contextlib.suppress(RuntimeError):  # torch raises it if this is not such a view
            values = torch.view_as_complex(values)
    if values.is_sparse:
        values = values._values()
    if values.dtype.itemsize == 1 and values.is_floating_point():
        values = values.float()  # fp8, for which torch has fewer operations
    if not (values.is_floating_point() or values.is_complex()) or torch.isfinite(values).all():
        return ""
    bad = values.isfinite().logical_not_() if inf else values.isnan()
    indices = bad.nonzero()
    if not len(indices):
        return ""
    index = indices[0].tolist()
    kind = "nan" if bool(values[tuple(index)].isnan()) else "inf"
    return f"{kind} at {index}"
