"""The ranks of a group by host, their addresses, and the reasons why a group cannot be joined.

Two processes are on one host if they can share memory as ``processes/rendezvous.py`` does it: by
descriptors that are sent over abstract unix sockets. That requires

==================  ================================================================================
one kernel          the same boot id; two machines have two, containers of one machine have one
one network         abstract unix sockets are visible within one network namespace only
one user            they have no permissions, so peers with another user id are refused; a user id
                    means the same within one user namespace only
==================  ================================================================================

Process and mount namespaces do not matter, because descriptors of memory and of processes (pidfd) work
across them. So two containers of one pod are one host. Two containers with different networks are two
hosts, and are connected like two machines, which is slower but right.

When gloo fails to connect, it does not say which connection failed, and it says nothing before that. So
every rank checks now and then whether a rank of its host has ended, which ranks of other hosts cannot
see. A rank that fails publishes its reason in the store before the others can notice. A rank that fails
without a known reason asks all ranks to answer, and names those that do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from interlace.runtime.core import plain
from interlace.runtime.core.errors import (
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
    StoreGoneError,
)
from interlace.runtime.processes.rendezvous import PROBE_SECONDS
from interlace.runtime.processes.signed_store import glance
from interlace.runtime.processes.waiting import Interruption, Patience, has_ended

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux, for IPv4
_ANY_PORT = 9  # "discard"; connecting a datagram socket sends nothing


def this_host() -> str:
    """Return a name that two processes have in common exactly if they can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
    except OSError:
        kernel = socket.gethostname()
    return "/".join((kernel, _namespace("net"), _namespace("user"), str(os.geteuid())))


def _namespace(kind: str) -> str:
    """Return the number of this process's namespace. The kernel's numbers are unique until it ends."""
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return "none"  # a kernel without this kind of namespace has one for all processes


@plain.record
@dataclass(frozen=True)
class Card:
    """A rank's host, process, address as the store's host sees it, and namespace of process ids."""

    host: str
    pid: int
    address: str | None
    processes: str = field(default_factory=lambda: _namespace("pid"))

    def __post_init__(self) -> None:
        types = type(self.host), type(self.pid), type(self.address), type(self.processes)
        if types not in ((str, int, str, str), (str, int, type(None), str)):
            raise TypeError(f"no card of a rank: {types}")

    def check_living(self, doing: str, cards: Mapping[int, Card]) -> None:
        """Raise PeerDiedError if a rank with one of these cards has ended, as far as this rank can see."""
        for rank, card in cards.items():
            near = (card.host, card.processes) == (self.host, self.processes)
            if near and has_ended(card.pid):
                raise PeerDiedError(rank, card.pid, doing)

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Parse the card that a rank has put into the store."""
        found = plain.loads(data)
        if not isinstance(found, cls):
            raise plain.UnreadableError(f"the store has no card of a rank but {found!r:.99}")
        return found


@dataclass(frozen=True)
class HostMap:
    """The ranks of a group by host: hosts in the order of their lowest rank, ranks ascending."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Sequence[str]) -> HostMap:
        """Build the map from the host of each rank."""
        by_host: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            by_host.setdefault(key, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_host.values()))

    def index(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    def __str__(self) -> str:
        hosts = enumerate(self.hosts)
        return "; ".join(f"host {index}: ranks {list(ranks)}" for index, ranks in hosts)


def address_towards(host: str) -> str | None:
    """Return this machine's address on the way to ``host``, or None if there is no way."""
    with contextlib.suppress(OSError):
        ways = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, target in ways:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as connection:
                connection.connect(target)
                return str(connection.getsockname()[0])
    return None


def interface_address(interface: str) -> str | None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
        contextlib.suppress(OSError),
    ):
        name = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, name)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for number, *_, name_of in map(str.split, file):
            if name_of == interface:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
    return None


def listening_address(address: str | None) -> str:
    """Return where gloo also listens: the user's interface, the address ``address``, or the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return (interface and interface_address(interface)) or address or socket.gethostname()


def is_loopback(address: str | None) -> bool:
    return address is None or address.startswith("127.") or address == "::1"


def store_address(store: object) -> str | None:
    """Return this machine's address on the way to the server of ``store``, or to ``MASTER_ADDR``."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
    return address_towards(host) if host else None


def own_address(cards: Sequence[Card], rank: int) -> str | None:
    """Return the address at which ranks on other hosts reach this one.

    The rank that serves the store may know it only as localhost. It takes its address on the way to another
    host, because ranks there know an address by which others reach them.
    """
    own_card = cards[rank]
    if not is_loopback(own_card.address):
        return own_card.address
    for card in cards:
        if card.host != own_card.host and card.address and not is_loopback(card.address):
            return address_towards(card.address)
    return own_card.address


ANSWER_SECONDS = 5.0  # in which a rank must answer, however busy its machine is
_WHY, _ASKED = "why", "asked"


class UnconnectedError(InterlaceError):
    """A connection could not be made; the rank at its other end is unknown."""


def connected(
    store: Store, rank: int, world_size: int, address: str | None, timeout: float
) -> tuple[object, dict[int, int]]:
    """Return a gloo group, its descriptors and their inodes.

    It uses the interface of ``GLOO_SOCKET_IFNAME``, or ``address``, or the host's name. gloo waits five
    times its own timeout for a peer to connect. Raises UnconnectedError if one does not.
    """
    from interlace.runtime.compat.torch_groups import c10d

    gloo = c10d.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        device = gloo.create_device(interface=interface, lazy_init=False)
    elif address is not None:
        device = gloo.create_device(hostname=address, lazy_init=False)
    else:
        device = gloo.create_default_device(lazy_init=False)
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout / 5)
    before = set(_descriptors())
    try:
        made = gloo(store, rank, world_size, options)
        own = {number: inode for number, inode in _descriptors().items() if number not in before}
        for number in own:
            with contextlib.suppress(OSError):
                os.set_inheritable(number, False)  # otherwise another program would keep them open
        return made, own
    except RuntimeError as error:
        where = interface or address or "the address of its host name"
        raise UnconnectedError(
            f"rank {rank} cannot connect to the ranks on other hosts from {where}: {error}"
        ) from error


def _descriptors() -> dict[int, int]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # for the descriptor with which they were listed
            found[int(number)] = os.fstat(int(number)).st_ino
    return found


def let_go(descriptors: dict[int, int]) -> None:
    """Close the parent's connections in a forked child. The parent's library still has the numbers."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number, inode in descriptors.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


class Joining:
    """One rank's view of a group that is being joined; ``cards`` are the cards of all its ranks.

    ``timeout``, in seconds, bounds :meth:`step`. ``hopeless`` finds other reasons to fail, if the ranks
    have other means of communication than the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        cards: Sequence[Card],
        *,
        timeout: float,
        prefix: str,
        hopeless: Interruption | None,
    ) -> None:
        self._rank, self._cards = rank, dict(enumerate(cards))
        self._store = None if hopeless else store
        self._prefix, self._doing = prefix, f"joining group {prefix!r}"
        self._peers = [peer for peer in self._cards if peer != rank]
        own = weakref.proxy(self)  # this object owns the patience
        self._patience = Patience(rank, timeout, lambda *wait: own.problem(*wait))
        self._hopeless = hopeless
        self._looked, self._told = 0.0, ""
        self._answered: bytes | None = None
        self._known: InterlaceError | None = None

    def step(self) -> None:
        """Spend a moment. Raises if the group cannot be joined, or on timeout."""
        self._patience.step(self._doing, self._peers)

    def look(self, *_: object) -> None:
        """Raise a reason that can be seen or was published; answer ranks that ask."""
        if self._known is None and (now := time.monotonic()) > self._looked + PROBE_SECONDS:
            self._looked = now
            try:
                self._cards[self._rank].check_living(self._doing, self._cards)
                text = (self._said(_WHY) or b"").decode(errors="replace")
                if text and text != self._told:
                    raise InterlaceError(f"rank {self._rank}: joining has failed: {text}")
                if (asked := self._said(_ASKED)) != self._answered:
                    self._answered = asked
                    self._say(self._rank, str(asked))
            except InterlaceError as error:
                self._known = error
        if self._known is not None:
            raise self._known

    def why(self, error: BaseException) -> BaseException:
        """Return why joining failed, given this rank's ``error``, and publish it to all others."""
        if isinstance(error, InterlaceError):
            with contextlib.suppress(Exception):  # the store itself may have failed
                error = self._cause(error)
        self.tell(error)
        return error

    def _cause(self, error: InterlaceError) -> InterlaceError:
        try:
            self._looked = 0.0
            self.look()
            vague = self._store and isinstance(error, (UnconnectedError, CollectiveTimeoutError))
            if vague and (silent := self._silent()):
                text = f"rank {self._rank}: ranks {silent} have not joined group {self._prefix!r}"
                return CollectiveTimeoutError(f"{text}, nor answered: {error}", tuple(silent))
        except StoreGoneError as gone:
            return error if isinstance(error, PeerDiedError) else gone
        except InterlaceError as known:
            return known
        return error

    def tell(self, error: BaseException) -> None:
        """Publish why there will be no group, unless a rank has already done so."""
        kind = "" if isinstance(error, InterlaceError) else f"{type(error).__name__}: "
        text = f"{kind}{error}"
        if not text.startswith(own := f"rank {self._rank}"):
            text = f"{own} could not join: {text}"
        with contextlib.suppress(Exception):
            if self._said(_WHY) is None:
                self._say(_WHY, text)
                self._told = text

    def problem(self, doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        if self._hopeless is not None and (problem := self._hopeless(doing, waited_for)):
            return problem
        try:
            self.look()
        except InterlaceError as error:
            return error
        return None

    def _silent(self) -> list[int]:
        silent = {peer: self._said(peer) for peer in self._peers}
        self._say(_ASKED, os.urandom(8).hex())
        until = time.monotonic() + ANSWER_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(PROBE_SECONDS)
            self.look()
            silent = {peer: old for peer, old in silent.items() if self._said(peer) == old}
        return list(silent)

    def _said(self, what: str | int) -> bytes | None:
        return glance(self._store, self._key(what)) if self._store else None

    def _say(self, what: str | int, text: str) -> None:
        if self._store:
            self._store.set(self._key(what), text)

    def _key(self, what: str | int) -> str:
        return f"{self._prefix}/joining/{what}"
