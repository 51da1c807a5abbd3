"""NVSHMEM's device functions that interlace calls: a table of extern symbols, nothing more.

The symbols are in ``libnvshmem_device.bc``, which a compilation links when it is named in
``extern_libs``; a kernel that calls none of them needs no library. Their module finds NVSHMEM's state in
constant memory, which the CPU fills in once per loaded module, before the first launch.

Addresses are int64 or pointers and always of this rank's own symmetric memory: a function that
accesses rank ``pe`` translates them. ``pe`` counts all processes, not the ranks of a group.

Threads
-------
Triton runs a scalar call in every thread of the program. ``put_signal_nbi_block`` is made for that: all
threads work together on one transfer. The others act once per thread, which is once per lane
where the arguments are tensors: ``signal`` of a vector of 32 in a kernel of one warp sends 32 signals,
one each. ``quiet`` in every thread is merely slower.

Ordering
--------
``put_signal_nbi_block``  sends all that the program has stored at ``source`` before, as the block meets
                       first; ``signal`` is set at ``pe`` after the data has arrived. ``source`` may be read
                       until ``pe`` is known to have the data.
``signal``             is ordered with puts only by a ``quiet`` in between.
``wait_until``         returns when the own word compares; then data that was put before the word was set
                       can be loaded. Unbounded: call it when the word is known to compare already. On some
                       machines it does more after that than loads alone do.
``quiet``              earlier puts of this thread have arrived.

Calls are inside a constexpr branch: the interpreter has no library (``tests/repository/test_laws.py``).
"""

from triton.language import core

SIGNAL_SET = 9
COMPARE_GE = 5
LIBRARY = "libnvshmem_device"

_I32 = core.dtype("int32")
_I64 = core.dtype("int64")


def _call(symbol, arguments, semantic):
    """Call ``symbol``, which returns nothing, with pairs of a value and the type it is passed as.

    It is declared to return an unused int32: extern calls have a result.
    """
    values = [semantic.cast(semantic.to_tensor(value), kind) for value, kind in arguments]
    kinds = tuple(kind for _, kind in arguments)
    # is_pure=False: the calls are made for their effect; the result is unused.
    return core.extern_elementwise(
        "", "", values, {kinds: (symbol, _I32)}, is_pure=False, _semantic=semantic
    )


@core.extern
def put_signal_nbi_block(destination, source, nbytes, signal, value, operation, pe, _semantic=None):
    """Copy ``nbytes`` to ``destination`` of rank ``pe``, then set its word ``signal``; return at once."""
    addresses = [(destination, _I64), (source, _I64), (nbytes, _I64), (signal, _I64)]
    how = [(value, _I64), (operation, _I32), (pe, _I32)]
    return _call("nvshmemx_putmem_signal_nbi_block", addresses + how, _semantic)


@core.extern
def signal(signal, value, operation, pe, _semantic=None):
    """Set the word ``signal`` of rank ``pe``; one signal per thread or lane."""
    arguments = [(signal, _I64), (value, _I64), (operation, _I32), (pe, _I32)]
    return _call("nvshmemx_signal_op", arguments, _semantic)


@core.extern
def wait_until(word, comparison, value, _semantic=None):
    """Return when the own int64 ``word`` compares with ``value``, and data put before it has arrived."""
    arguments = [(word, _I64), (comparison, _I32), (value, _I64)]
    return _call("nvshmem_uint64_wait_until", arguments, _semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until all earlier puts have arrived."""
    return _call("nvshmem_quiet", [], _semantic)
