"""NVSHMEM's device functions, as far as interlace calls them: a table of extern symbols, nothing more.

The symbols are those of ``libnvshmem_device.bc``, which a compilation links when it is named in
``extern_libs``; a kernel that calls none of them needs no library. Their module finds NVSHMEM's state in
constant memory, which the host fills in once per loaded module, before the first launch.

Addresses are int64 or pointers and always of this rank's own symmetric memory: a function that
reaches for rank ``pe`` translates them. ``pe`` counts all processes, not the ranks of a group.

Who calls
---------
Triton runs a scalar call in every thread of the program. ``*_block`` functions are made for that: all
threads come together and one transfer happens. The others act once per thread, which is once per lane
where the arguments are tensors: ``signal`` of a vector of 32 in a kernel of one warp sends 32 signals,
one each. ``quiet`` and ``fence`` in every thread are merely slower.

Ordering
--------
``put_signal_block``   what the program stored at ``source`` before is what is sent, as the block meets
                       first; ``signal`` is set at ``pe`` after the data is there. ``source`` may be
                       written again when the call returns.
``put_signal_nbi_block``  the same, but ``source`` may be read until ``pe`` is known to have the data.
``signal``             is in no order with puts, other than by ``fence`` or ``quiet`` in between.
``wait_until``         returns when the own word compares; what was put before the word was set can be
                       loaded then. Unbounded: call it when the word is known to compare already, for
                       what it does after that, which loads alone do not on every machine.
``fence``              earlier puts of this thread to each rank are before later ones to it.
``quiet``              earlier puts of this thread have arrived.
``barrier_block``      as quiet, and every rank of the team has come. Unbounded. ``sync_block`` only meets.

Calls stand behind a constexpr: the interpreter has no library (``tests/test_laws.py`` checks it).
"""

from triton.language import core

SIGNAL_SET = 9
SIGNAL_ADD = 10
COMPARE_EQ = 0
COMPARE_GE = 5
TEAM_WORLD = 0
TEAM_SHARED = 1
TEAM_NODE = 2
LIBRARY = "libnvshmem_device"

_I32 = core.dtype("int32")
_I64 = core.dtype("int64")
# What returns nothing is declared to return an int32 that nobody reads: extern calls have a result.
_NOTHING = _I32


def _call(symbol, returns, arguments, semantic):
    """Call ``symbol`` with ``arguments``, pairs of a value and the type it is passed as."""
    values = [semantic.cast(semantic.to_tensor(value), kind) for value, kind in arguments]
    kinds = tuple(kind for _, kind in arguments)
    return core.extern_elementwise(
        "", "", values, {kinds: (symbol, returns)}, is_pure=False, _semantic=semantic
    )


def _put_signal(symbol, destination, source, nbytes, signal, value, operation, pe, semantic):
    addresses = [(destination, _I64), (source, _I64), (nbytes, _I64), (signal, _I64)]
    how = [(value, _I64), (operation, _I32), (pe, _I32)]
    return _call(symbol, _NOTHING, addresses + how, semantic)


@core.extern
def put_block(destination, source, nbytes, pe, _semantic=None):
    """Copy ``nbytes`` to ``destination`` of rank ``pe``."""
    arguments = [(destination, _I64), (source, _I64), (nbytes, _I64), (pe, _I32)]
    return _call("nvshmemx_putmem_block", _NOTHING, arguments, _semantic)


@core.extern
def put_signal_block(destination, source, nbytes, signal, value, operation, pe, _semantic=None):
    """Copy ``nbytes`` to ``destination`` of rank ``pe``, then set or add to its word ``signal``."""
    symbol = "nvshmemx_putmem_signal_block"
    return _put_signal(symbol, destination, source, nbytes, signal, value, operation, pe, _semantic)


@core.extern
def put_signal_nbi_block(destination, source, nbytes, signal, value, operation, pe, _semantic=None):
    """As put_signal_block, and return at once."""
    symbol = "nvshmemx_putmem_signal_nbi_block"
    return _put_signal(symbol, destination, source, nbytes, signal, value, operation, pe, _semantic)


@core.extern
def signal(signal, value, operation, pe, _semantic=None):
    """Set or add to the word ``signal`` of rank ``pe``; one signal per thread or lane."""
    arguments = [(signal, _I64), (value, _I64), (operation, _I32), (pe, _I32)]
    return _call("nvshmemx_signal_op", _NOTHING, arguments, _semantic)


@core.extern
def wait_until(word, comparison, value, _semantic=None):
    """Return when the own int64 ``word`` compares with ``value``, and data put before it is there."""
    arguments = [(word, _I64), (comparison, _I32), (value, _I64)]
    return _call("nvshmem_uint64_wait_until", _NOTHING, arguments, _semantic)


@core.extern
def signal_wait_until(signal, comparison, value, _semantic=None):
    """As wait_until for a word that signals set; the value it has then."""
    arguments = [(signal, _I64), (comparison, _I32), (value, _I64)]
    return _call("nvshmem_signal_wait_until", _I64, arguments, _semantic)


@core.extern
def fence(_semantic=None):
    """Order earlier puts before later ones, for each destination by itself."""
    return _call("nvshmem_fence", _NOTHING, [], _semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until all earlier puts have arrived."""
    return _call("nvshmem_quiet", _NOTHING, [], _semantic)


@core.extern
def peer_pointer(address, pe, _semantic=None):
    """Where rank ``pe``'s ``address`` is mapped here, or 0 if it is not."""
    return _call("nvshmem_ptr", _I64, [(address, _I64), (pe, _I32)], _semantic)


@core.extern
def multicast_pointer(team, address, _semantic=None):
    """The multicast address of ``address`` on all ranks of ``team``, or 0 if there is none."""
    return _call("nvshmemx_mc_ptr", _I64, [(team, _I32), (address, _I64)], _semantic)


@core.extern
def barrier_block(team, _semantic=None):
    """Wait until all ranks of ``team`` have come and their puts have arrived."""
    return _call("nvshmemx_barrier_block", _I32, [(team, _I32)], _semantic)


@core.extern
def sync_block(team, _semantic=None):
    """Wait until all ranks of ``team`` have come."""
    return _call("nvshmemx_team_sync_block", _I32, [(team, _I32)], _semantic)


@core.extern
def my_pe(_semantic=None):
    """The rank of this process among all."""
    return _call("nvshmem_my_pe", _I32, [], _semantic)


@core.extern
def n_pes(_semantic=None):
    """How many processes there are."""
    return _call("nvshmem_n_pes", _I32, [], _semantic)
