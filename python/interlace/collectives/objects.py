"""Collectives of Python objects that can be pickled. They block; ``torch.distributed`` has the same names.

Objects are pickled into bytes. What is small goes along with the comparison of the ranks' calls, so it
needs one meeting; larger bytes go as uint8 tensors afterwards. As with torch, unpickling runs code: use
these among ranks that trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments.roots import group_rank
from interlace.collectives import point_to_point
from interlace.groups.groups import resolve
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Event

SMALL = 16384  # bytes that go along with a rank's message
TAG = 1 << 30  # of messages with objects, so that they are not taken for tensors

Packed = bytes | int


def _pickled(communicator: Communicator, op: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise TypeError(
            f"{op}: an object of type {type(value).__name__} cannot be pickled on rank "
            f"{communicator.rank}: {error}"
        ) from error


def _tensor(communicator: Communicator, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=communicator.place.device)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.to(communicator.place.device)


def _room(communicator: Communicator, length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=communicator.place.device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy())


def _said(data: bytes) -> Packed:
    """What a rank says of its bytes: themselves, or how many."""
    return data if len(data) <= SMALL else len(data)


def _length(said: Packed) -> int:
    return said if isinstance(said, int) else 0


def _all_gather_object(communicator: Communicator, obj: Any) -> list[Any]:
    """Every rank's ``obj``, by rank."""
    name = "all_gather_object"
    with communicator.accepting(name):
        data = _pickled(communicator, name, obj)
    call = Call(name, part=_said(data))
    said: list[Packed] = []
    outputs: list[torch.Tensor] = []

    def start() -> Event | None:
        said.extend(communicator.engine.parts(call))
        lengths = [_length(each) for each in said]
        if not any(lengths):
            return None
        outputs.extend(_room(communicator, length) for length in lengths)
        rest = Call(name, (("lengths", tuple(lengths)),))
        own = _tensor(communicator, data if lengths[communicator.rank] else b"")
        return communicator.engine.all_gather(rest, outputs, own)

    communicator.run(name, start, async_op=False)
    return [
        pickle.loads(each if isinstance(each, bytes) else _bytes(outputs[rank]))
        for rank, each in enumerate(said)
    ]


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """``object_list`` becomes every rank's ``obj``, by rank. Semantics: ``torch.distributed``'s.

    Objects are pickled. Raises ValueError if the list does not have an entry per rank.

    >>> import interlace
    >>> def on_rank():
    ...     objects = [None, None]
    ...     interlace.all_gather_object(objects, {"rank": interlace.get_rank()})
    ...     return objects
    >>> interlace.run(on_rank, 2)[0]
    [{'rank': 0}, {'rank': 1}]
    """
    communicator = resolve(group)
    with communicator.accepting("all_gather_object"):
        _check_list("object_list", object_list, communicator)
    object_list[:] = _all_gather_object(communicator, obj)


def _check_list(name: str, value: Any, communicator: Communicator) -> None:
    rank, world_size = communicator.rank, communicator.world_size
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {type(value).__name__} on rank {rank}")
    if len(value) != world_size:
        raise ValueError(
            f"{name} must have one entry per rank, {world_size}, got {len(value)} on rank {rank}"
        )


def _gather_object(communicator: Communicator, obj: Any, root: int) -> list[Any] | None:
    """On ``root``, every rank's ``obj``, by rank; elsewhere None."""
    name, rank = "gather_object", communicator.rank
    with communicator.accepting(name):
        data = _pickled(communicator, name, obj)
    call = Call(name, (("root", root),), part=_said(data))
    said: list[Packed] = []
    outputs: list[torch.Tensor] = []

    def start() -> Event | None:
        said.extend(communicator.engine.parts(call))
        lengths = [_length(each) for each in said]
        if not any(lengths):
            return None
        if rank == root:
            outputs.extend(_room(communicator, length) for length in lengths)
        rest = Call(name, (("lengths", tuple(lengths)),))
        own = _tensor(communicator, data if lengths[rank] else b"")
        return communicator.engine.gather(rest, outputs if rank == root else None, own, root)

    communicator.run(name, start, async_op=False)
    if rank != root:
        return None
    return [
        pickle.loads(each if isinstance(each, bytes) else _bytes(outputs[source]))
        for source, each in enumerate(said)
    ]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    """On rank ``dst``, by default 0, ``object_gather_list`` becomes every rank's ``obj``, by rank.

    The list is None on other ranks. Raises ValueError or TypeError on every rank, also for an object that
    cannot be pickled. Semantics: ``torch.distributed.gather_object``.

    >>> import interlace
    >>> def on_rank():
    ...     objects = [None, None] if interlace.get_rank() == 1 else None
    ...     interlace.gather_object(interlace.get_rank() * 10, objects, dst=1)
    ...     return objects
    >>> interlace.run(on_rank, 2)
    [None, [0, 10]]
    """
    communicator = resolve(group)
    with communicator.accepting("gather_object"):
        root = group_rank("dst", dst, group_dst, communicator, default=0)
        _check_root_list("object_gather_list", object_gather_list, root, communicator)
    gathered = _gather_object(communicator, obj, root)
    if gathered is not None:
        assert object_gather_list is not None
        object_gather_list[:] = gathered


def _check_root_list(name: str, value: Any, root: int, communicator: Communicator) -> None:
    if communicator.rank == root:
        _check_list(name, value, communicator)
    elif value:
        raise ValueError(
            f"{name} must be given on the root only, group rank {root}, got {value!r} "
            f"on rank {communicator.rank}"
        )


def _broadcast_objects(communicator: Communicator, objects: list[Any], root: int) -> list[Any]:
    """``root``'s ``objects``, as many as there are everywhere."""
    name, is_root = "broadcast_object_list", communicator.rank == root
    with communicator.accepting(name):
        if not isinstance(objects, list):
            raise TypeError(
                f"object_list must be a list, got {type(objects).__name__} on rank {communicator.rank}"
            )
        data = _pickled(communicator, name, objects) if is_root else b""
    terms = (("number of objects", len(objects)), ("root", root))
    call = Call(name, terms, part=_said(data))
    received: list[bytes | torch.Tensor] = []

    def start() -> Event | None:
        said = communicator.engine.parts(call)[root]
        if isinstance(said, bytes):
            received.append(said)
            return None
        moved = _tensor(communicator, data) if is_root else _room(communicator, said)
        received.append(moved)
        return communicator.engine.broadcast(Call(name, (("length", said),)), moved, root)

    communicator.run(name, start, async_op=False)
    (whole,) = received
    return list(pickle.loads(whole if isinstance(whole, bytes) else _bytes(whole)))


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """``object_list`` becomes that of rank ``src``, by default 0; equally long on every rank.

    ``device`` is torch's and not needed. Raises ValueError or TypeError on every rank, also for lists of
    different lengths. Semantics: ``torch.distributed.broadcast_object_list``.

    >>> import interlace
    >>> def on_rank():
    ...     objects = ["a", 1] if interlace.get_rank() == 0 else [None, None]
    ...     interlace.broadcast_object_list(objects)
    ...     return objects
    >>> interlace.run(on_rank, 2)[1]
    ['a', 1]
    """
    communicator = resolve(group)
    with communicator.accepting("broadcast_object_list"):
        root = group_rank("src", src, group_src, communicator, default=0)
    received = _broadcast_objects(communicator, object_list, root)
    if communicator.rank != root:
        object_list[:] = received


def _scatter_object(communicator: Communicator, objects: Sequence[Any] | None, root: int) -> Any:
    """This rank's of ``root``'s ``objects``, which are None elsewhere."""
    name, rank = "scatter_object_list", communicator.rank
    with communicator.accepting(name):
        packed = [_pickled(communicator, name, each) for each in objects or ()]
    small = sum(map(len, packed)) <= SMALL
    call = Call(name, (("root", root),), part=packed if small else [len(each) for each in packed])
    received: list[bytes | torch.Tensor] = []

    def start() -> Event | None:
        said = communicator.engine.parts(call)[root]
        if isinstance(said[rank], bytes):
            received.append(said[rank])
            return None
        mine = _room(communicator, said[rank])
        received.append(mine)
        inputs = [_tensor(communicator, each) for each in packed] if rank == root else None
        return communicator.engine.scatter(
            Call(name, (("lengths", tuple(said)),)), mine, inputs, root
        )

    communicator.run(name, start, async_op=False)
    (mine,) = received
    return pickle.loads(mine if isinstance(mine, bytes) else _bytes(mine))


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """The first entry of the output list becomes this rank's of the input list of rank ``src``, or 0.

    The input list is None on other ranks. Raises ValueError or TypeError on every rank. Semantics:
    ``torch.distributed.scatter_object_list``.

    >>> import interlace
    >>> def on_rank():
    ...     mine = [None]
    ...     interlace.scatter_object_list(mine, ["a", "b"] if interlace.get_rank() == 0 else None)
    ...     return mine
    >>> interlace.run(on_rank, 2)
    [['a'], ['b']]
    """
    communicator = resolve(group)
    name = "scatter_object_output_list"
    with communicator.accepting("scatter_object_list"):
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise TypeError(
                f"{name} must be a non-empty list, got {scatter_object_output_list!r} "
                f"on rank {communicator.rank}"
            )
        root = group_rank("src", src, group_src, communicator, default=0)
        if communicator.rank == root:
            _check_list("scatter_object_input_list", scatter_object_input_list, communicator)
    inputs = scatter_object_input_list if communicator.rank == root else None
    scatter_object_output_list[0] = _scatter_object(communicator, inputs, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to rank ``dst``, which calls :func:`recv_object_list` with an equally long list.

    ``device`` and ``use_batch`` are torch's and not needed. Raises ValueError or TypeError, on this rank,
    for no list, an object that cannot be pickled, or a ``dst`` that cannot be. Semantics:
    ``torch.distributed.send_object_list``.

    >>> import interlace
    >>> def on_rank():
    ...     objects = ["a", 1] if interlace.get_rank() == 0 else [None, None]
    ...     if interlace.get_rank() == 0:
    ...         interlace.send_object_list(objects, dst=1)
    ...     else:
    ...         interlace.recv_object_list(objects, src=0)
    ...     return objects
    >>> interlace.run(on_rank, 2)[1]
    ['a', 1]
    """
    communicator = resolve(group)
    peer = group_rank("dst", dst, group_dst, communicator)
    data = _pickled(communicator, "send_object_list", object_list)
    numbers = [len(data), len(object_list)]
    header = torch.tensor(numbers, dtype=torch.int64).to(communicator.place.device)
    point_to_point._isend(communicator, header, peer, TAG).wait()
    point_to_point._isend(communicator, _tensor(communicator, data), peer, TAG).wait()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects into ``object_list`` from rank ``src``, any rank if None; the sender's rank.

    The rank is of the default group. Raises ValueError if the sender's list has another length.
    Semantics: ``torch.distributed.recv_object_list``.

    >>> import interlace
    >>> def on_rank():
    ...     objects = [interlace.get_rank()]
    ...     if interlace.get_rank() == 0:
    ...         return interlace.send_object_list(objects, dst=1)
    ...     return interlace.recv_object_list(objects), objects
    >>> interlace.run(on_rank, 2)
    [None, (0, [0])]
    """
    communicator = resolve(group)
    peer = point_to_point._source(src, group_src, communicator)
    header = torch.empty(2, dtype=torch.int64, device=communicator.place.device)
    work = point_to_point._irecv(communicator, header, peer, TAG)
    work.wait()
    if peer is None:
        peer = work.source_rank()
    nbytes, count = header.tolist()
    data = _room(communicator, nbytes)
    point_to_point._irecv(communicator, data, peer, TAG).wait()
    if count != len(object_list):
        raise ValueError(
            f"object_list has {len(object_list)} entries on rank {communicator.rank}, rank {peer} sent "
            f"{count}"
        )
    object_list[:] = pickle.loads(_bytes(data))
    return communicator.ranks[peer]
