"""``check_numerics``: no NaN goes into an op, or comes out of one, unseen."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.runtime.core.hooks import HookedOp


@contextlib.contextmanager
def check_numerics(group: Group = None, *, inf: bool = False) -> Iterator[None]:
    """Within, an op of ``group`` that reads or makes a NaN raises; it says rank, op, argument and index.

    Of tensors of any shape of floats, complex numbers and fp8. ``inf``: infinities are refused too; by
    default they are not, for masks have them legitimately.

    What is wrong in an input is refused on all ranks before data moves, and the group goes on. In a message
    that is sent, or in a result, it ends the group: the rank that found it aborts it, and the others raise
    an AbortedError that says the same. Of an asynchronous op ``Work.wait`` raises that. An index is that of
    complex numbers in a view of them as real ones, too, as torch makes (not in inference mode). Takes a
    pass over each tensor, for which on a GPU the host waits. Raises ValueError.

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
    """What the first NaN, or infinity if ``inf``, of ``tensor`` is, and where; empty if there is none."""
    values, base = tensor.detach(), tensor._base
    if base is not None and base.is_complex():
        with contextlib.suppress(RuntimeError):  # with which torch refuses what is no such view
            values = torch.view_as_complex(values)
    if values.is_sparse:
        values = values._values()
    if values.dtype.itemsize == 1 and values.is_floating_point():
        values = values.float()  # fp8, of which torch asks less
    if not (values.is_floating_point() or values.is_complex()) or torch.isfinite(values).all():
        return ""
    bad = values.isfinite().logical_not_() if inf else values.isnan()
    indices = bad.nonzero()
    if not len(indices):
        return ""
    index = indices[0].tolist()
    kind = "nan" if bool(values[tuple(index)].isnan()) else "inf"
    return f"{kind} at {index}"
