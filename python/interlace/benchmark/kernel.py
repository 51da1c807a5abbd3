"""The subject of a measurement on one rank, and a user's own kernel as a subject.

A function named in ``bench FILE.py::FUNCTION`` is called on every rank, once per size. It may take any of
the arguments ``nbytes``, ``dtype``, ``m``, ``n``, ``k``. It may return

===============  =====================================================================================
:class:`Kernel`  everything: the function, its inputs, its check, its bytes and operations
a callable       the function to time; it is called without arguments
anything else    then the function itself is timed, as a whole, and is right if it raises nothing:
                 like the functions that ``python -m interlace verify`` takes
===============  =====================================================================================
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

LONGEST = 500  # characters of a check's message that are kept
ARGUMENTS = ("nbytes", "dtype", "m", "n", "k")


@dataclass
class Kernel:
    """One kernel at one size, on one rank.

    Parameters
    ----------
    run : called as ``run(*inputs(number))``; its result goes to ``check``. Collective.
    inputs : the arguments of set ``number``, made anew in each call. Not collective, and not timed. Sets
        are used in turn, as many as do not fit the cache together.
    check : ``check(result, number)``: None or True if the result is right, False or AssertionError if it is
        wrong. Or its largest error as a multiple of the allowed one: one number, wrong if it is negative or
        nan. Tensors and NumPy arrays without dimensions count as their element; anything else is a
        TypeError. Not collective.
    nbytes : for algbw, bytes of the largest buffer of a rank; 0 prints none.
    bus_factor : busbw = ``bus_factor`` * algbw; see ``figures.py``. None prints none.
    flops : for TFLOP/s, floating-point operations of a rank; 0 prints none.
    matmul, communication : the two parts alone, called like ``run``; with both, overlap is printed.
    baselines : functions to compare with, by name, called and checked like ``run``. For the names "gloo"
        and "nccl" ``torch.distributed`` is initialized with that backend before the first call.

    >>> double = Kernel(run=lambda x: 2 * x, inputs=lambda number: (torch.full((4,), float(number)),),
    ...                 check=lambda result, number: bool((result == 2 * number).all()), nbytes=16)
    >>> double.check(double.run(*double.inputs(3)), 3)
    True
    """

    run: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]] = lambda number: ()
    check: Callable[[Any, int], Any] | None = None
    nbytes: int = 0
    bus_factor: float | None = None
    flops: float = 0.0
    matmul: Callable[..., Any] | None = None
    communication: Callable[..., Any] | None = None
    baselines: dict[str, Callable[..., Any]] = field(default_factory=dict)


def arguments_for(
    function: Callable[..., Any], target: str, values: dict[str, Any]
) -> dict[str, Any]:
    """Return the values among ``values`` that the function takes; raise if it needs another."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is parameter.empty
        if name in ARGUMENTS and values.get(name) is not None:
            arguments[name] = values[name]
        elif needed and name not in ARGUMENTS:
            known = ", ".join(ARGUMENTS)
            raise TypeError(f"{target}: takes an argument {name!r}; bench gives {known}")
        elif needed:
            option = "--sizes" if name == "nbytes" else f"--{name}"
            raise ValueError(f"{target}: takes {name!r}, so give {option}")
    return arguments


def verdict(check: Callable[[Any, int], Any], result: Any, number: int) -> tuple[float, str]:
    """Return (largest error as a multiple of the allowed one, the check's message if it is wrong)."""
    try:
        found = check(result, number)
    except AssertionError as error:
        return float("inf"), (str(error) or "AssertionError")[:LONGEST]
    scalars = torch.Tensor, numpy.ndarray, numpy.generic
    value = found.item() if isinstance(found, scalars) and found.ndim == 0 else found
    if value is None or value is True:
        return 0.0, ""
    if value is False:
        return float("inf"), ""
    if isinstance(value, (int, float)):
        if value >= 0:
            return float(value), ""
        return float("inf"), f"the check returned {value}, which is not a valid error"
    name = getattr(check, "__name__", type(check).__name__)
    raise TypeError(
        f"check {name} returned {type(found).__name__}, {str(found)[:100]}; it must return None, a bool, "
        "or its largest error as one number"
    )


ALGORITHM, BASELINE, PART = "algorithm", "baseline", "part"


@dataclass
class BenchCandidate:
    """One way to do it.

    ``run(*inputs(number))`` is a call, whose result ``check(result, number)`` judges as in
    :class:`interlace.benchmark.Kernel`; None is not checked. While time is taken, ``timed_inputs``
    (``inputs`` if None) gives the sets, which are used in turn, at most ``most_sets``. ``copied``: further
    sets are copies of the first, which is quicker than making them. ``role``: "algorithm" for the subject
    of the measurement, "baseline", "part" for the matmul or the communication alone.
    """

    name: str
    role: str
    run: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    check: Callable[[Any, int], Any] | None = None
    timed_inputs: Callable[[int], tuple[Any, ...]] | None = None
    most_sets: int = 1 << 30
    copied: bool = True


@dataclass
class Facts:
    """``nbytes``, ``bus_factor``, ``flops`` as in :class:`interlace.benchmark.Kernel`.

    ``shape``: distinguishes sizes of one op, for tables. ``matmul`` and ``communication`` are names of
    candidates, for the overlap.
    """

    op: str
    shape: dict[str, int]
    nbytes: int
    bus_factor: float | None
    flops: float
    matmul: str | None = None
    communication: str | None = None


@dataclass
class Subject(Facts):
    candidates: list[BenchCandidate] = field(default_factory=list)
