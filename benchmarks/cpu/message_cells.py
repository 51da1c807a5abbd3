"""Messages between ranks that are timed, of interlace, gloo and OpenMPI alike.

Needs neither torch nor interlace, which OpenMPI's Python may not have.

    exchange    isend to the other of a pair, irecv from it
    send        send from the one of a pair, recv on the other; several in flight: isend and irecv
    ping-pong   send and recv, and back; the time covers both
    batch       an exchange by batch_isend_irecv
    ring        isend to the next rank, irecv from the one before; on two ranks it is an exchange
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SIZES = (1, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
IN_FLIGHT = 8
SMALL, MEDIUM = 1 << 20, 16 << 20
MATRIX = 256  # rows of what the other thread multiplies, again and again


@dataclass(frozen=True)
class Cell:
    """One op on messages of ``nbytes``, ``in_flight`` at once, beside a thread that computes or alone."""

    op: str
    nbytes: int
    in_flight: int = 1
    computing: bool = False

    @property
    def name(self) -> str:
        flight = f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return f"{self.op}{flight}{', computing' if self.computing else ''}"

    @property
    def key(self) -> str:
        return f"{self.name} {self.nbytes}"

    def peers(self, rank: int, world_size: int) -> tuple[int | None, int | None]:
        if self.op == "ring":
            return (rank + 1) % world_size, (rank - 1) % world_size
        if self.op == "send":
            return (None, rank - 1) if rank % 2 else (rank + 1, None)
        return rank ^ 1, rank ^ 1

    def repetitions(self, most: int) -> int:
        return most if self.nbytes <= SMALL else max(1, most // (3 if self.nbytes <= MEDIUM else 5))


def cells(world_size: int, sizes: Sequence[int], memory: int) -> list[Cell]:
    """Those that fit into ``memory`` bytes of this host, all ranks' together."""
    return [
        cell
        for cell in _every(world_size, sizes)
        if world_size * (1 + cell.in_flight) * cell.nbytes <= memory
    ]


def _every(world_size: int, sizes: Sequence[int]) -> Iterator[Cell]:
    ops = ("exchange", "send") if world_size == 2 else ("exchange", "send", "ring")
    for nbytes in sizes:
        yield Cell("ping-pong", nbytes)
        for in_flight in (1, IN_FLIGHT):
            yield Cell("batch", nbytes, in_flight)
            for op in ops:
                for computing in (False, True):
                    yield Cell(op, nbytes, in_flight, computing)


@contextlib.contextmanager
def computing(multiply: Callable[[], object]) -> Iterator[None]:
    stop = threading.Event()

    def again_and_again() -> None:
        while not stop.is_set():
            multiply()

    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
