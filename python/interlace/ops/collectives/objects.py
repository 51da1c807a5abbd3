"""Collectives of Python objects that can be pickled. They block; ``torch.distributed`` has the same names.

Small objects are sent together with the comparison of the ranks' calls, which needs one meeting; larger
ones are sent as uint8 tensors afterwards. Unpickling runs code: use these functions among ranks that trust
each other.
"""

import pickle
from typing import Any

import numpy as np
import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import point_to_point, rooted
from interlace.runtime.compat.torch_modes import pickle_tensors
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Event

SMALL = 16384  # bytes that go along with a rank's message
TAG = 1 << 30  # marks messages with objects, which are then not taken for tensors


def _pickle(op: str, value: Any) -> bytes:
    try:
        return pickle_tensors(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise TypeError(
            f"{op}: an object of type {type(value).__name__} cannot be pickled: {error}"
        ) from error


def _tensor(communicator: Communicator, data: bytes) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return flat.to(communicator.place.device)


def _room(communicator: Communicator, length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=communicator.place.device)


def _unpickle(data: bytes | torch.Tensor) -> Any:
    return pickle.loads(data if isinstance(data, bytes) else bytes(data.cpu().numpy()))


def _gather_data(
    communicator: Communicator, name: str, terms: Terms, data: bytes, root: int | None = None
) -> list[bytes | torch.Tensor]:
    """Return every rank's ``data``, by rank; if ``root`` is passed, only there."""
    here = root in (None, communicator.rank)
    call = Call(name, terms, part=data if len(data) <= SMALL else len(data))
    found: list[bytes | torch.Tensor] = []

    def start() -> Event | None:
        answers: list[bytes | int] = communicator.engine.agree(call)
        lengths = [answer if isinstance(answer, int) else 0 for answer in answers]
        outputs = [_room(communicator, length) for length in lengths if here]
        for each, output in zip(answers, outputs, strict=False):
            found.append(each if isinstance(each, bytes) else output)
        if not any(lengths):
            return None
        rest = Call(name, (("lengths", tuple(lengths)),))
        tensor = _tensor(communicator, data if lengths[communicator.rank] else b"")
        if root is None:
            return communicator.engine.all_gather(rest, outputs, tensor)
        return communicator.engine.gather(rest, outputs if here else None, tensor, root)

    communicator.run(name, start, async_op=False)
    return found


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fill ``object_list`` with every rank's ``obj``, by rank. Semantics: ``torch.distributed``'s.

    Objects are pickled. Raises ValueError if the list does not have an entry per rank.

    >>> def on_rank():
    ...     objects = [None, None]
    ...     interlace.all_gather_object(objects, {"rank": interlace.get_rank()})
    ...     return objects
    >>> interlace.run(on_rank, 2)[0]
    [{'rank': 0}, {'rank': 1}]
    """
    communicator, name = resolve(group), "all_gather_object"
    with communicator.accepting(name):
        _check_list("object_list", object_list, communicator.world_size)
        data = _pickle(name, obj)
    object_list[:] = map(_unpickle, _gather_data(communicator, name, (), data))


def _check_list(name: str, value: Any, entries: int | None = None) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
    if entries is not None and len(value) != entries:
        raise ValueError(f"{name} must have one entry per rank, {entries}, got {len(value)}")


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Fill ``object_gather_list`` of rank ``dst``, by default 0, with every rank's ``obj``, by rank.

    The list is None on other ranks. Raises ValueError or TypeError on every rank, also for an object that
    cannot be pickled. Semantics: ``torch.distributed.gather_object``.

    >>> def on_rank():
    ...     objects = [None, None] if interlace.get_rank() == 1 else None
    ...     interlace.gather_object(interlace.get_rank() * 10, objects, dst=1)
    ...     return objects
    >>> interlace.run(on_rank, 2)
    [None, [0, 10]]
    """
    communicator, name = resolve(group), "gather_object"
    with communicator.accepting(name):
        root = checks.group_rank("dst", dst, group_dst, communicator, default=0)
        rooted.only_on_root("object_gather_list", object_gather_list, root, communicator.rank)
        if communicator.rank == root:
            _check_list("object_gather_list", object_gather_list, communicator.world_size)
        data = _pickle(name, obj)
    gathered = _gather_data(communicator, name, (("root", root),), data, root)
    if object_gather_list:
        object_gather_list[:] = map(_unpickle, gathered)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Overwrite ``object_list`` with the list of rank ``src``, by default 0. Lengths must be equal.

    ``device`` is torch's and not needed. Raises ValueError or TypeError on every rank, also for lists of
    different lengths. Semantics: ``torch.distributed.broadcast_object_list``.

    >>> def on_rank():
    ...     objects = ["a", 1] if interlace.get_rank() == 0 else [None, None]
    ...     interlace.broadcast_object_list(objects)
    ...     return objects
    >>> interlace.run(on_rank, 2)[1]
    ['a', 1]
    """
    communicator, name = resolve(group), "broadcast_object_list"
    with communicator.accepting(name):
        root = checks.group_rank("src", src, group_src, communicator, default=0)
        is_root = communicator.rank == root
        _check_list("object_list", object_list)
        data = _pickle(name, object_list) if is_root else b""
    terms = (("number of objects", len(object_list)), ("root", root))
    everyones = _gather_data(communicator, name, terms, data)  # other ranks' data is empty
    if not is_root:
        object_list[:] = _unpickle(everyones[root])


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Overwrite entry 0 of the output list with this rank's entry of rank ``src``'s input list.

    ``src`` is 0 by default.

    The input list is None on other ranks. Raises ValueError or TypeError on every rank. Semantics:
    ``torch.distributed.scatter_object_list``.

    >>> def on_rank():
    ...     mine = [None]
    ...     interlace.scatter_object_list(mine, ["a", "b"] if interlace.get_rank() == 0 else None)
    ...     return mine
    >>> interlace.run(on_rank, 2)
    [['a'], ['b']]
    """
    communicator, name = resolve(group), "scatter_object_list"
    rank, packed = communicator.rank, []
    with communicator.accepting(name):
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise TypeError(
                f"scatter_object_output_list must be a non-empty list, got {scatter_object_output_list!r}"
            )
        root = checks.group_rank("src", src, group_src, communicator, default=0)
        if rank == root:
            size = communicator.world_size
            _check_list("scatter_object_input_list", scatter_object_input_list, size)
            for each in scatter_object_input_list or ():
                packed.append(_pickle(name, each))
    small = sum(map(len, packed)) <= SMALL
    call = Call(name, (("root", root),), part=packed if small else [len(each) for each in packed])
    received: list[bytes | torch.Tensor] = []

    def start() -> Event | None:
        answers = communicator.engine.agree(call)[root]
        if isinstance(answers[rank], bytes):
            received.append(answers[rank])
            return None
        room = _room(communicator, answers[rank])
        received.append(room)
        inputs = [_tensor(communicator, each) for each in packed] if rank == root else None
        rest = Call(name, (("lengths", tuple(answers)),))
        return communicator.engine.scatter(rest, room, inputs, root)

    communicator.run(name, start, async_op=False)
    scatter_object_output_list[0] = _unpickle(*received)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to rank ``dst``, which calls :func:`recv_object_list` with an equally long list.

    ``device`` and ``use_batch`` are torch's and not needed. Raises ValueError or TypeError, on this rank,
    if ``object_list`` is not a list, an object cannot be pickled, or ``dst`` is out of range. Semantics:
    ``torch.distributed.send_object_list``.

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
    peer = point_to_point._peer("dst", dst, group_dst, communicator)
    with communicator.accepting():
        data = _pickle("send_object_list", object_list)
    numbers = [len(data), len(object_list)]
    header = torch.tensor(numbers, dtype=torch.int64).to(communicator.place.device)
    point_to_point._isend(communicator, header, peer, TAG).wait()
    point_to_point._isend(communicator, _tensor(communicator, data), peer, TAG).wait()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects into ``object_list`` from rank ``src``, any rank if None; return the sender's rank.

    The rank is of the default group. Raises ValueError if the sender's list has another length.
    Semantics: ``torch.distributed.recv_object_list``.

    >>> def on_rank():
    ...     objects = [interlace.get_rank()]
    ...     if interlace.get_rank() == 0:
    ...         return interlace.send_object_list(objects, dst=1)
    ...     return interlace.recv_object_list(objects), objects
    >>> interlace.run(on_rank, 2)
    [None, (0, [0])]
    """
    communicator = resolve(group)
    peer = point_to_point._peer("src", src, group_src, communicator)
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
    object_list[:] = _unpickle(data)
    return communicator.ranks[peer]  # type: ignore[no-any-return]
