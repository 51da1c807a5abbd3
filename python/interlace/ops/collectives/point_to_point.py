"""Messages between two ranks: send, recv, isend, irecv, batches of them, and ``monitored_barrier``.

Messages are not collective: a misuse raises on the rank that made it. Messages with one tag from one rank
to another arrive in the order they were sent.

If length or dtype of a message and its receive differ, both ranks raise an error with the same text, and
later messages are correct again. Between hosts the send raises it on the sender. On one host a send ends
when its bytes have left the tensor, often before the receiver asks for them. There the sender's next wait
for a send or receive of the group after the refusal has arrived raises it, although that message has moved.

In ``monitored_barrier`` every rank tells rank 0 that it has arrived, and waits until rank 0 answers that
all have. The messages of both directions have a number for each monitored barrier of the group, so a rank
that is late for one barrier does not count for the next.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.checks import copied_back, remember
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError, PeerDiedError
from interlace.runtime.core.memory import contiguous
from interlace.runtime.core.stream import Continued, Outcome
from interlace.runtime.core.work import Work

LARGEST_TAG = 2**31 - 1
FIRST_BARRIER_TAG = (1 << 30) + 1

_barriers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def _call(communicator: Communicator, op: str, tensor: torch.Tensor) -> Call:
    key = (op, tensor.dtype, tensor.numel())
    call = communicator.calls.get(key)
    if call is None:
        terms = (("dtype of tensor", tensor.dtype), ("elements of tensor", tensor.numel()))
        call = remember(communicator, key, Call(op, terms))
    return call


def _check_tag(tag: Any) -> None:
    if not 0 <= checks.integer("tag", tag) <= LARGEST_TAG:
        raise ValueError(f"tag must be within 0..{LARGEST_TAG}, got {tag}")


def _isend(communicator: Communicator, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
    """Begin to send to ``peer``, a rank of the group."""
    with communicator.accepting():
        checks.check_member("dst", peer, communicator)
        source = contiguous(checks.source("tensor", tensor, communicator))
        _check_tag(tag)
        call = _call(communicator, "send", source)

    def start(engine: Engine) -> Future[Outcome]:
        return engine.send(call, source, peer, tag)

    return communicator.transfer(call, start, tensor, peer, tag)


def _irecv(
    communicator: Communicator, tensor: torch.Tensor, peer: int | None, tag: int = 0
) -> Work:
    """Begin to receive from ``peer``, a rank of the group, or from any rank if None."""
    with communicator.accepting():
        if peer is not None:
            checks.check_member("src", peer, communicator)
        data = checks.target("tensor", tensor, communicator)
        _check_tag(tag)
        call = _call(communicator, "recv", data)

    def start(engine: Engine) -> Future[Outcome]:
        if data.is_contiguous():
            return engine.recv(call, data, peer, tag)
        buffer = torch.empty(data.shape, dtype=data.dtype, device=data.device)
        return Continued(
            engine.recv(call, buffer, peer, tag), lambda outcome: copy_back(outcome, buffer)
        )

    def copy_back(outcome: Outcome, made: torch.Tensor) -> Outcome:
        event = copied_back(communicator, [data], [made], outcome.event)
        return Outcome(outcome.result, event, outcome.source)

    return communicator.transfer(call, start, tensor, peer, tag)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Begin to send ``tensor`` to rank ``dst``; never blocks. ``tensor`` must not change before it is sent.

    Any shape and dtype; ``dst`` may be the caller, ``group_dst`` is a rank of ``group``. Raises ValueError
    or TypeError, on this rank, if ``dst`` or ``tag`` is out of range. If the receiver expects another
    length or dtype, ``Work.wait()`` of this or a later message raises. Semantics:
    ``torch.distributed.isend``.

    >>> def on_rank():
    ...     mine, tensor = torch.tensor([float(interlace.get_rank())]), torch.empty(1)
    ...     peer = 1 - interlace.get_rank()
    ...     works = [interlace.isend(mine, peer), interlace.irecv(tensor, peer)]
    ...     return [work.wait() for work in works], tensor.item()
    >>> interlace.run(on_rank, 2)
    [([True, True], 1.0), ([True, True], 0.0)]
    """
    communicator = resolve(group).on(tensor)
    return _isend(communicator, tensor, _peer("dst", dst, group_dst, communicator), tag)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Begin to receive into ``tensor`` from rank ``src``, from any rank if None; never blocks.

    ``Work.source_rank()`` is the sender's rank within the group. Raises ValueError or TypeError if ``src``
    or ``tag`` is out of range. ``Work.wait()`` raises if the message differs in length or dtype. Semantics:
    ``torch.distributed.irecv``.

    >>> def on_rank():
    ...     if interlace.get_rank() == 0:
    ...         return interlace.send(torch.arange(2), 1)
    ...     tensor = torch.empty(2, dtype=torch.int64)
    ...     work = interlace.irecv(tensor)
    ...     work.wait()
    ...     return tensor.tolist(), work.source_rank()
    >>> interlace.run(on_rank, 2)
    [None, ([0, 1], 0)]
    """
    communicator = resolve(group).on(tensor)
    return _irecv(communicator, tensor, _peer("src", src, group_src, communicator), tag)


def _peer(
    name: str, record: Any, group_given: Any, communicator: Communicator, *, other: bool = False
) -> Any:
    """Return the rank of the group; None for any source. With ``other`` refuse this rank itself."""
    if name == "src" and record is None and group_given is None:
        return None
    with communicator.accepting():
        peer = checks.group_rank(name, record, group_given, communicator)
        if other and peer == communicator.rank:
            raise ValueError(
                f"{name} must be another rank, got {communicator.ranks[peer]}, the rank of the caller; "
                "isend and irecv may go to oneself"
            )
    return peer


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to rank ``dst``, which is not the caller; return when ``tensor`` may be reused.

    Any shape and dtype. Semantics: ``torch.distributed.send``.

    Raises ValueError or TypeError if ``dst`` is not another rank of the group. If the receiver expects
    another length or dtype, this or a later message of the group raises.

    >>> def on_rank():
    ...     tensor = torch.tensor([float(interlace.get_rank())])
    ...     interlace.send(tensor, 1) if interlace.get_rank() == 0 else interlace.recv(tensor, 0)
    ...     return tensor.item()
    >>> interlace.run(on_rank, 2)
    [0.0, 0.0]
    """
    communicator = resolve(group).on(tensor)
    peer = _peer("dst", dst, group_dst, communicator, other=True)
    work = _isend(communicator, tensor, peer, tag)
    work.kept = False
    work.wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into ``tensor`` from rank ``src``, from any rank if None; return the sender's rank.

    The rank is of the default group, or, if ``group_src`` is passed, of ``group``. Raises ValueError or
    TypeError if the message differs in length or dtype. Semantics: ``torch.distributed.recv``.

    >>> def on_rank():
    ...     tensor = torch.tensor([interlace.get_rank()])
    ...     return interlace.recv(tensor) if interlace.get_rank() == 0 else interlace.send(tensor, 0)
    >>> interlace.run(on_rank, 2)
    [1, None]
    """
    communicator = resolve(group).on(tensor)
    peer = _peer("src", src, group_src, communicator, other=True)
    work = _irecv(communicator, tensor, peer, tag)
    work.kept = False
    work.wait()
    if peer is None:
        peer = work.source_rank()
    return peer if group_src is not None else communicator.ranks[peer]  # type: ignore[no-any-return]


class P2POp:
    """One message of :func:`batch_isend_irecv`, like ``torch.distributed.P2POp``.

    ``op`` is :func:`isend` or :func:`irecv`, of interlace or of torch. ``tensor``, of any shape and dtype,
    is sent or filled. ``peer`` is a rank of the default group, ``group_peer`` one of ``group``; None is any
    rank, for ``irecv``. Raises ValueError for another ``op``, TypeError if ``tensor`` is not a tensor.

    >>> interlace.P2POp(interlace.isend, torch.ones(2), peer=1)
    P2POp(isend, peer=1, torch.float32, torch.Size([2]))
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        _direction(op)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a tensor, got {checks.describe(tensor)}")
        self.op, self.tensor, self.peer = op, tensor, peer
        self.group, self.tag, self.group_peer = group, tag, group_peer

    def __repr__(self) -> str:
        peer = self.peer if self.group_peer is None else f"group rank {self.group_peer}"
        return (
            f"P2POp({_direction(self.op)}, peer={peer}, {self.tensor.dtype}, {self.tensor.shape})"
        )


def _direction(op: Any) -> str:
    name = getattr(op, "__name__", "")
    if name not in ("isend", "irecv"):
        raise ValueError(f"op must be isend or irecv, got {op!r}")
    return str(name)


def batch_isend_irecv(p2p_op_list: Sequence["P2POp | torch.distributed.P2POp"]) -> list[Work]:
    """Begin all messages of a list of :class:`P2POp`, interlace's or torch's; return handles in order.

    No order of the list can block: order matters only between messages of one direction and peer. Raises
    ValueError or TypeError, before any is begun, if an entry is wrong. Semantics:
    ``torch.distributed.batch_isend_irecv``.

    >>> def on_rank():
    ...     rank, theirs = interlace.get_rank(), torch.tensor([9])
    ...     mine = torch.tensor([rank])
    ...     ops = [interlace.P2POp(interlace.isend, mine, 1 - rank),
    ...            interlace.P2POp(interlace.irecv, theirs, 1 - rank)]
    ...     for work in interlace.batch_isend_irecv(ops):
    ...         work.wait()
    ...     return theirs.item()
    >>> interlace.run(on_rank, 2)
    [1, 0]
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not p2p_op_list:
        raise ValueError(f"p2p_op_list must be a non-empty list of P2POp, got {p2p_op_list!r}")
    begun: list[Callable[[], Work]] = []
    for index, entry in enumerate(p2p_op_list):
        if not all(hasattr(entry, name) for name in ("op", "tensor", "peer", "group", "tag")):
            raise ValueError(f"p2p_op_list[{index}] must be a P2POp, got {type(entry).__name__}")
        begun.append(_prepare(entry))
    return [begin() for begin in begun]


def _prepare(entry: Any) -> Callable[[], Work]:
    communicator, sends = resolve(entry.group).on(entry.tensor), _direction(entry.op) == "isend"
    group_peer = getattr(entry, "group_peer", None)
    peer = entry.peer if group_peer is None else None  # torch's P2POp has both, which agree
    peer = _peer("dst" if sends else "src", peer, group_peer, communicator)
    with communicator.accepting():
        _check_tag(entry.tag)
        (checks.source if sends else checks.target)("tensor", entry.tensor, communicator)
    begin = _isend if sends else _irecv
    return lambda: begin(communicator, entry.tensor, peer, entry.tag)


def _monitored_barrier(
    communicator: Communicator,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Run the barrier. ``waited_for`` of its CollectiveTimeoutError are group ranks. All ranks raise."""
    rank = communicator.rank
    refused: Exception | None = None
    try:
        with communicator.accepting():
            record = checks.seconds("timeout", timeout)
            if record is not None and record < 0:
                raise ValueError(f"timeout must not be negative, got {timeout}")
    except (TypeError, ValueError) as error:
        refused, record = error, None
    seconds = communicator.place.bound() if record is None else record
    number = _barriers[communicator] = _barriers.get(communicator, 0) + 1
    tag = FIRST_BARRIER_TAG + number
    token = torch.zeros(1, dtype=torch.int64, device=communicator.place.device)
    if refused is not None:
        token += 1 + rank
    if rank == 0:
        _collect(communicator, token, tag, seconds, wait_all_ranks)
    else:
        message = _isend(communicator, token, 0, tag)
        if refused is not None:
            message.wait()
            raise refused
        try:
            _receive_token(communicator, token, 0, tag).wait(max(seconds, 1e-3))
            if (number := int(token.item())) < 0:
                raise CollectiveTimeoutError(f"rank {-number} failed to pass it", (-number,))
        except InterlaceError as error:
            raise CollectiveTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n{error}",
                (0,),
            ) from error
    if refused is not None:
        raise refused
    if number := int(token.item()):  # 1 + the rank that refused its arguments
        raise ValueError(
            f"monitored_barrier: rank {number - 1} cannot take part: its timeout is not a number of seconds"
        )


def _receive_token(communicator: Communicator, token: torch.Tensor, peer: int, tag: int) -> Work:
    """Receive ``token``; fail early if ``peer`` waits for this rank in another op."""
    work = _irecv(communicator, token, peer, tag)
    vars(work._outcome)["early"] = True
    return work


def _collect(
    communicator: Communicator, token: torch.Tensor, tag: int, seconds: float, wait_all_ranks: bool
) -> None:
    deadline = time.monotonic() + seconds
    milliseconds = round(seconds * 1000)
    late: dict[int, str] = {}
    tokens = [torch.empty_like(token) for _ in range(communicator.world_size)]
    works = [
        _receive_token(communicator, tokens[peer], peer, tag)
        for peer in range(1, communicator.world_size)
    ]
    if works and seconds <= 0:
        raise CollectiveTimeoutError(
            f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms", (1,)
        )
    for peer, work in enumerate(works, 1):
        try:
            work.wait(max(deadline - time.monotonic(), 1e-3))
        except InterlaceError as error:
            late[peer] = f"\n{error}" if work.exception() is not None else ""
            if not isinstance(error, CollectiveTimeoutError):  # the group is aborted
                peer = error.rank if isinstance(error, PeerDiedError) else peer
                text = f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms"
                raise CollectiveTimeoutError(f"{text}\n{error}", (peer,)) from error
            if not wait_all_ranks:
                break
    for each in tokens[1:]:
        token.copy_(torch.maximum(token, each))
    if late:
        token.fill_(-next(iter(late)))
    for peer, work in enumerate(works, 1):
        if not late or (work.is_completed() and work.exception() is None):
            _isend(communicator, token, peer, tag)
    if late:
        names = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, late))}"
        text = f"[Rank 0]: {names} failed to pass monitoredBarrier in {milliseconds} ms"
        raise CollectiveTimeoutError(text + "".join(late.values()), tuple(late))


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks; rank 0 of the group names the ranks that have not arrived within ``timeout``.

    ``timeout``: seconds or a timedelta, the group's by default; 0 always fails. ``wait_all_ranks``: name
    every missing rank and not only the first. A rank that died is named at once. So is a rank of the same
    host that waits for rank 0 in another op and therefore cannot arrive, if their processes have nothing
    else to do. Blocks. In ``sim``, which has no clock, a rank that never arrives causes a DeadlockError
    that names it.

    Raises CollectiveTimeoutError, a RuntimeError, on rank 0, and on the ranks that arrived; ValueError on
    all for a ``timeout`` less than 0. Semantics and messages: ``torch.distributed.monitored_barrier``.

    >>> interlace.run(interlace.monitored_barrier, 2, timeout=60)
    [None, None]
    """
    _monitored_barrier(resolve(group), timeout, wait_all_ranks)
