"""The ranks of a group by host, and the address at which others reach this rank.

Two processes are on one host if they can share memory as ``processes/rendezvous.py`` does it: by
descriptors that are sent over abstract unix sockets. That requires

==================  ================================================================================
one kernel          the same boot id; two machines have two, containers of one machine have one
one network         abstract unix sockets are visible within one network namespace only
one user            they have no permissions, so peers with another user id are refused; a user id
                    means the same within one user namespace only
==================  ================================================================================

Process and mount namespaces do not matter, because descriptors of memory and of processes (pidfd) work
across them. So two containers of one pod are one host. Two containers with networks of their own are two
hosts, and are connected like two machines, which is slower but right.

Every rank puts a :class:`Card` into the store, see ``processes/rendezvous.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interlace.runtime.core import plain
from interlace.runtime.core.errors import PeerDiedError
from interlace.runtime.processes.waiting import has_ended

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
        return "; ".join(
            f"host {index}: ranks {list(ranks)}" for index, ranks in enumerate(self.hosts)
        )


def address_towards(host: str, port: int = _ANY_PORT) -> str | None:
    """Return this machine's address on the way to ``host``, or None if there is no way."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as connection:
                connection.connect(target)
                return str(connection.getsockname()[0])
    return None


def interface_address(interface: str) -> str | None:
    """Return this machine's address on ``interface``, or None if it has none."""
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


def listening_address(own: str | None) -> str:
    """Return where gloo listens, too: the user's interface, the address ``own``, or the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return (interface and interface_address(interface)) or own or socket.gethostname()


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
    host, because ranks there know an address of their own that others can use.
    """
    own = cards[rank]
    if not is_loopback(own.address):
        return own.address
    for card in cards:
        if card.host != own.host and card.address and not is_loopback(card.address):
            return address_towards(card.address)
    return own.address
