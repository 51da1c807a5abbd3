"""Calls that one rank makes otherwise than the rest: by class, by the rank's position, small and large."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from faults.crew import LONG, MISUSE, Said, crew, tried
from faults.rows import Plan, Row, Trial
from interlace.runtime.core.call import Call
from interlace.runtime.numerics import reductions
from multi.numerics import test_modes

RANKS = 4
ODD = (0, 1, RANKS - 1)
SIZES = (1 << 10, 32 << 20)  # bytes of the tensor
BOUND, GLOO_BOUND = 3.0, 1.0


def _coalesced(api: Any, count: int, tensors: int) -> None:
    api.all_reduce_coalesced([torch.empty(count // tensors) for _ in range(tensors)])


def _ordered(api: Any, count: int, odd: bool) -> None:
    calls = (
        lambda: api.all_reduce(torch.empty(count)),
        lambda: api.broadcast(torch.empty(count), 0),
    )
    for call in calls[::-1] if odd else calls:
        call()


def _lists(api: Any, count: int, lists: int) -> None:
    api.all_gather([torch.empty(count) for _ in range(lists)], torch.empty(count))


def _splits(api: Any, part: int, odd: bool) -> None:
    even = [part] * RANKS
    sends = [part - 1, part + 1, *even[2:]] if odd else even
    api.all_to_all_single(torch.empty(RANKS * part), torch.empty(RANKS * part), even, sends)


def _of_group(api: Any, count: int, ranks: Sequence[int]) -> None:
    api.all_reduce(torch.empty(count), group=api.new_group(list(ranks)))


SUM, MAX = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX
of = partial(
    torch.empty, dtype=torch.float32
)  # not filled, which would take longer than to compare

CLASSES: dict[str, Callable[[Any, int, bool], Any]] = {
    "size": lambda api, n, odd: api.all_reduce(of(n + odd)),
    "shape": lambda api, n, odd: api.all_reduce(of((n // 2, 2) if odd else n)),
    "dtype": lambda api, n, odd: api.all_reduce(of(n, dtype=(torch.float32, torch.float64)[odd])),
    "dtype of one width": lambda api, n, odd: api.all_reduce(
        of(n, dtype=(torch.float32, torch.int32)[odd])
    ),
    "op": lambda api, n, odd: api.broadcast(of(n), 0) if odd else api.all_reduce(of(n)),
    "reduce op": lambda api, n, odd: api.all_reduce(of(n), (SUM, MAX)[odd]),
    "root": lambda api, n, odd: api.broadcast(of(n), 2 if odd else 1),
    "order": _ordered,
    "missing call": lambda api, n, odd: api.barrier() if odd else api.all_reduce(of(n)),
    "number of tensors": lambda api, n, odd: _coalesced(api, n, 3 if odd else 2),
    "length of lists": lambda api, n, odd: _lists(api, n // RANKS, RANKS - odd),
    "split sizes": lambda api, n, odd: _splits(api, n // RANKS, odd),
    "order of ranks": lambda api, n, odd: _of_group(
        api, n, range(RANKS) if odd else range(RANKS - 1, -1, -1)
    ),
}


class Cell(NamedTuple):
    name: str
    odd: int
    nbytes: int


_WHERE = list(itertools.product(ODD, SIZES))
CELLS = [
    Cell(name, *_WHERE[(number + turn) % len(_WHERE)])
    for turn in range(len(_WHERE))
    for number, name in enumerate(CLASSES)
]
"""All of them, such that the first of each class come first, and differ in position and size."""


def on_rank(join: Any, end: Any, cells: Sequence[Cell], broken: bool) -> None:
    """Call every cell on a new group; report the result, and whether the group continues."""
    if broken:
        Call.verify = lambda *_: None  # type: ignore[method-assign]
    whole = join()
    for cell in cells:
        call = CLASSES[cell.name]
        odd = whole.get_rank() == cell.odd
        own = _Own(whole, BOUND) if hasattr(whole, "shrink") else whole
        end.send(tried(partial(call, own, cell.nbytes // 4, odd)))
        end.send(tried(partial(own.all_reduce, torch.ones(4))))


class _Own:
    """The collectives on a new group of all ranks, which a mismatch may end."""

    def __init__(self, whole: Any, seconds: float) -> None:
        self._whole, self._group = whole, whole.new_group(timeout=seconds)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._whole, name)
        return partial(function) if name == "new_group" else partial(self._call, function)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{"group": self._group, **kwargs})


def judged(cell: Cell, said: Sequence[Said], afterwards: Sequence[Said], gloo: bool) -> Trial:
    """Every rank must raise a misuse that names the odd rank, and all must continue or report the reason.

    Gloo must only raise any error on every rank before the timeout.
    """
    wrong = [
        f"rank {rank}: {each.kind or 'returns'}: {each.text}"
        for rank, each in enumerate(said)
        if not (_raised_at_once(each) if gloo else _names(cell.odd, each))
    ]
    wrong += [
        f"rank {rank} afterwards: {each.kind}: {each.text}"
        for rank, each in enumerate(afterwards)
        if each.kind and "different ops" not in each.text
    ]
    begun = max((each.begun for each in said), default=0.0)
    times = [1e3 * (each.ended - begun) for each in said if each.kind in MISUSE]
    return Trial(not wrong, times, f"{cell}: " + "; ".join(wrong))


def _names(rank: int, said: Said) -> bool:
    return said.kind in MISUSE and f"rank {rank}" in said.text


def _raised_at_once(said: Said) -> bool:
    return bool(said.kind) and bool(said.ended) and said.ended - said.begun < 0.8 * GLOO_BOUND


def matrix(place: str, plan: Plan) -> Iterator[Trial]:
    """Run the first ``plan.trials`` cells. After a cell that ends a crew, a new crew starts."""
    left = CELLS[: plan.trials]
    while left:
        several = left if place != "gloo" and not plan.broken else left[:1]
        timeout = GLOO_BOUND if place == "gloo" else BOUND if plan.broken else LONG
        with crew(place, RANKS, on_rank, several, plan.broken, timeout=timeout) as team:
            for cell in several:
                said = team.all_said(seconds=3 * BOUND)
                ended = any(each.kind in ("silence", "end of the rank") for each in said)
                afterwards = [] if ended or place == "gloo" else team.all_said(seconds=3 * BOUND)
                yield judged(cell, said, afterwards, place == "gloo")
                left = left[1:]
                if ended or place == "gloo":
                    break


# -- messages --------------------------------------------------------------------------------------


def receives(count: int, broken: bool) -> list[torch.Tensor]:
    """Return receives that do not fit a message of ``count`` floats; in the control all of them fit."""
    other = (of(count + 1), of(count - 1), torch.empty(count, dtype=torch.int32))
    return [of(count) if broken else each for each in other]


def messages(join: Any, end: Any, times: int, broken: bool) -> None:
    """Rank 0 sends rank 1 a message that does not fit, then one that fits, and gets an answer.

    The sender gets its error with its next message, because a message leaves before its receive.
    """
    api = join()
    for number in range(times):
        count = SIZES[number % 2] // 4
        unfit, sends = receives(count, broken)[number % 3], (of(count), torch.full((3,), 7.0))
        fits, answer = torch.zeros(3), torch.zeros(1)
        if api.get_rank() == 0:
            calls = [partial(api.send, each, 1) for each in sends] + [partial(api.recv, answer, 1)]
        else:
            calls = [partial(api.recv, each, 0) for each in (unfit, fits)]
            calls.append(partial(api.send, answer, 0))
        said = [tried(call) for call in calls]
        end.send(
            (
                [each for each in said if each.kind],
                api.get_rank() == 0 or fits.tolist() == [7.0] * 3,
            )
        )


def unfitting(place: str, plan: Plan) -> Iterator[Trial]:
    """Sender and receiver must raise the same misuse once, and later messages must be right."""
    timeout = BOUND if plan.broken else LONG
    with crew(place, 2, messages, plan.trials, plan.broken, timeout=timeout) as team:
        for _ in range(plan.trials):
            found = team.all_said()
            if ended := [each for each in found if isinstance(each, Said)]:
                yield Trial(False, said=str(ended))
                return
            errors = [each for said, _ in found for each in said]
            same = len(errors) == 2 and len({each.text for each in errors}) == 1
            right = (
                same and all(each.kind in MISUSE for each in errors) and all(r for _, r in found)
            )
            yield Trial(right, [1e3 * (each.ended - each.begun) for each in errors[1:]], str(found))


def computing(
    join: Any, end: Any, mode: str, dtype: torch.dtype, threads: int, broken: bool
) -> None:
    """Sum while rank 1 has the floating-point mode ``mode``; the control does not notice the mode."""
    join()
    if broken:
        reductions.is_usual = lambda: True
    end.send(test_modes.wrong_sums(mode, dtype, threads, seen=not broken))


def other_modes(plan: Plan) -> Iterator[Trial]:
    """All ranks must have equal bits of sums, as in the usual mode."""
    cases = itertools.cycle(itertools.product(test_modes.FLOATS, (1, 2), test_modes.MODES))
    for dtype, threads, mode in itertools.islice(cases, plan.trials):
        with crew("shm", 2, computing, mode, dtype, threads, plan.broken) as team:
            found = team.all_said()
        yield Trial(found == [[], []], said=f"{mode}, {dtype}, {threads} threads: {found}")


def rows() -> list[Row]:
    what, all_of_them = "another call on one rank", len(CELLS)
    return [
        Row(what, "shm", partial(matrix, "shm"), all_of_them, 13),
        Row(what, "hosts", partial(matrix, "hosts"), all_of_them, 13),
        Row(what, "gloo", partial(matrix, "gloo"), all_of_them, 1, beside=True),
        Row("a message that does not fit", "shm", partial(unfitting, "shm"), 60, 6),
        Row("a message that does not fit", "hosts", partial(unfitting, "hosts"), 60, 6),
        Row("another floating-point mode", "shm", other_modes, 20, 2),
    ]
