"""Multicast addresses where kernels are interpreted: numbers that stand for a place in every rank's memory.

On a GPU the switch knows what a multicast address means; here this table does, for the ``multimem``
instructions that ``multimem.py`` runs. The numbers lie where no memory of a process is, so that
whatever else is done with them fails.
"""

import itertools
import weakref
from collections.abc import Sequence

from interlace.runtime.core.memory import RED_ZONE

_SPACING = 1 << 40  # the largest buffer
_numbers = itertools.count(1 << 16)
_bases: dict[int, tuple[int, tuple[int, ...]]] = {}  # by number: bytes, and addresses by rank


def address_for(owner: object, nbytes: int, bases: Sequence[int]) -> int:
    """An address for ``nbytes`` at ``bases`` of all ranks; known for as long as ``owner`` lives."""
    assert nbytes <= _SPACING
    number = next(_numbers)
    _bases[number] = nbytes, tuple(bases)
    weakref.finalize(owner, _bases.pop, number, None)
    return number * _SPACING


def addresses(address: int, nbytes: int) -> list[int]:
    """Where ``nbytes`` at a multicast address are on every rank, by rank. LookupError if nowhere.

    What lies a little beyond a buffer does so on every rank, and is found to by whoever checks there.
    """
    number, offset = divmod(address, _SPACING)
    size, bases = _bases.get(number, (0, ()))
    if not bases or offset + nbytes > size + RED_ZONE:
        raise LookupError
    return [base + offset for base in bases]
