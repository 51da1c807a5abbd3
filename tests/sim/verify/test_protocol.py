"""The protocol explorer, and the patterns of kernels/signal.py: clean, and true to the code.

The faults that it must find in them are in ``test_protocol_faults.py``.
"""

import ast
import pathlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from cases.texts import texts_beside
from interlace_verify.protocols.explorer import (
    EMPTY,
    BeginRead,
    BeginWrite,
    CompareAndSwap,
    Counterexample,
    EndRead,
    EndWrite,
    Process,
    Protocol,
    ProtocolStep,
    Publish,
    StateLimitError,
    Wait,
    explore,
    read,
    write,
)
from interlace_verify.protocols.patterns import (
    PATTERNS,
    explore_pattern,
    pull,
    push,
    push_on_streams,
)

ROOT = pathlib.Path(__file__).parents[3]


def pairs(text: str) -> list[tuple[str, str]]:
    """Of each line, what stands before the colon and behind it."""
    lines = (line.partition(": ") for line in text.splitlines())
    return [(name, rest) for name, _, rest in lines]


_MODELLED, _NO_STEPS, _ORDERS = texts_beside(__file__, "models.txt").values()
MODELLED = {name: set(row.split()) for name, row in pairs(_MODELLED)}
NO_STEPS = set(_NO_STEPS.split())
ORDERS = pairs(_ORDERS)


# -- the patterns ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_clean(name: str) -> None:
    """Every step interleaved at small sizes; 4 ranks and 3 rounds, or 3 and 4, reduced."""
    pattern = PATTERNS[name]
    for ranks, rounds in [(2, 1), (2, 3), (3, 2)]:
        if name == "push on streams" and ranks == 3:
            continue  # 5 million states
        full = explore(pattern(ranks, rounds))
        reduced = explore(pattern(ranks, rounds), reduced=True)
        assert full.clean and reduced.clean, (full, reduced)
        assert reduced.states <= full.states
    # Where a rank is several processes, 4 ranks and 3 rounds take 4 to 7 s (``interlace verify`` has them).
    ranks, rounds = (3, 4) if len(pattern(4, 3).processes) > 4 else (4, 3)
    result = explore(pattern(ranks, rounds), reduced=True)
    assert result.clean, result
    assert result.states > 500


def test_other_ways_are_clean() -> None:
    for protocol in (push_on_streams(4, 3, channels=1), pull(3, 3, [0]), pull(3, 2, [1, 2])):
        result = explore(protocol, reduced=True)
        assert result.clean, result


def test_patterns_of_several_processes_per_rank_are_reduced() -> None:
    for name, pattern in PATTERNS.items():
        result = explore_pattern(name, 2, 2)
        assert result.clean and (result.ranks, result.rounds) == (2, 2)
        assert result.reduced == (len(pattern(2, 2).processes) > 2)


# -- patterns and code -------------------------------------------------------------------------

SIGNAL = "".join((ROOT / f"kernels/{name}.py").read_text() for name in ("signal", "slots"))


def calls_in(path: str, function: str) -> list[str]:
    """Names of what a function calls, in source order, without module or object."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            calls.sort(key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0))
            return [ast.unparse(call.func).rpartition(".")[2] for call in calls]
    raise AssertionError(f"{path} has no function {function}")


def test_every_function_of_signal_is_modelled() -> None:
    functions = {n.name for n in ast.walk(ast.parse(SIGNAL)) if isinstance(n, ast.FunctionDef)}
    modelled = set().union(*MODELLED.values())
    assert MODELLED.keys() == PATTERNS.keys()
    assert modelled <= functions, modelled - functions
    assert functions - modelled <= NO_STEPS, functions - modelled - NO_STEPS


@pytest.mark.parametrize(("where", "order"), ORDERS)
def test_the_code_takes_its_steps_in_the_order_of_the_models(where: str, order: str) -> None:
    names = order.split()
    assert [name for name in calls_in(*where.split()) if name in names] == names


# -- the explorer ------------------------------------------------------------------------------


def texts(found: Iterable[Counterexample]) -> set[str]:
    return {one.text for one in found}


def protocol_of(*programs: Sequence[ProtocolStep]) -> Protocol:
    processes = [Process(f"rank {rank}", tuple(steps)) for rank, steps in enumerate(programs)]
    return Protocol("made up", len(processes), 1, tuple(processes))


def test_all_interleavings_are_visited() -> None:
    """Two processes that share nothing: all pairs of positions, all steps from each of them."""
    result = explore(protocol_of(write(["a"], "x") * 2, write(["b"], "y") * 3))
    assert result.states == 5 * 7
    assert result.transitions == 4 * 7 + 5 * 6
    assert result.depth == 4 + 6
    assert explore(protocol_of([Wait("a", 0)] * 2, [Publish("b", 1)] * 3)).states == 3 * 4


def test_a_counterexample_reads_as_a_story() -> None:
    sender = [*write(["a"], "x"), Publish("s", 1), *write(["a"], "y")]
    result = explore(protocol_of(sender, [Wait("s", 1), *read(["a"], "x")]))
    assert texts(result.violations) == {
        "rank 0 begins to write y into a, which rank 1 is reading",
        "rank 1 begins to read a, which rank 0 is writing",
        "rank 1 reads y in a instead of x",
    }
    overlap = next(one for one in result.violations if "y into a" in one.text)
    assert str(overlap).splitlines() == [
        "rank 0 begins to write y into a, which rank 1 is reading",
        "    1  rank 0 begins to write x into a",
        "    2  rank 0 ends writing a",
        "    3  rank 0 publishes s = 1",
        "    4  rank 1 waits for s >= 1",
        "    5  rank 1 begins to read a",
        "    6  rank 0 begins to write y into a",
    ]
    assert f"first violation: {result.violations[0]}" in str(result)


def test_a_deadlock_says_who_waits_for_what() -> None:
    result = explore(
        protocol_of(
            [Publish("a", 1), Wait("b", 2)], [Publish("b", 1), Wait("a", 1)], [Wait("b", 1)]
        )
    )
    assert not result.violations
    assert texts(result.deadlocks) == {"rank 0 waits for b >= 2 (it is 1)"}
    assert len(result.deadlocks[0].steps) == 4


def test_reads_may_overlap_and_writes_may_not() -> None:
    assert explore(protocol_of(read(["a"], EMPTY), read(["a", "b"], EMPTY))).clean
    assert len(explore(protocol_of(write(["a"], "x"), write(["b", "a"], "x"))).violations) == 2


def random_protocol(draw: random.Random) -> Protocol:
    """A few steps on few words and cells, of which most are wrong in some interleaving."""

    def some(kinds: str) -> list[ProtocolStep]:
        word, cell, content = draw.choice("pqr"), draw.choice("ab"), draw.choice([EMPTY, "x"])
        match draw.choice(kinds):
            case "p":
                return [Publish(word, draw.randint(1, 2))]
            case "w":
                return [Wait(word, draw.randint(0, 2), exact=draw.random() < 0.2)]
            case "s":
                return [CompareAndSwap(word, draw.randint(0, 1), draw.randint(0, 1))]
            case "t":
                first, second = some("pr"), some("pw")
                gate = draw.choice([None, "q"])
                wait = Wait(word, 1, giving_up=len(first), only_after=gate)
                test = CompareAndSwap(word, 1, 1, otherwise=len(second))
                return [wait, *first, test, *second]
            case "r":
                begin, end = read([cell], content)
            case _:
                begin, end = write([cell], "x")
        inside = [draw.choice([Publish(word, 1), Wait(word, 1)])] if draw.random() < 0.3 else []
        return [begin, *inside, end]

    programs = [
        [step for _ in range(draw.randint(1, 4)) for step in some("pppwwsrrdt")]
        for _ in range(draw.randint(2, 3))
    ]
    return protocol_of(*programs)


def test_the_reduction_hides_nothing() -> None:
    """Random protocols: the same verdict with every step interleaved, and the same deadlocks."""
    draw = random.Random(11)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(2500):
        protocol = random_protocol(draw)
        full, reduced = explore(protocol), explore(protocol, reduced=True)
        assert full.clean == reduced.clean, protocol
        assert texts(reduced.violations) <= texts(full.violations), protocol
        assert reduced.states <= full.states
        if not full.violations:
            assert texts(full.deadlocks) == texts(reduced.deadlocks), protocol
        verdicts[bool(full.deadlocks), bool(full.violations)] += 1
    assert len(verdicts) == 4 and min(verdicts.values()) > 100, verdicts


def test_what_cannot_be_explored_is_refused() -> None:
    with pytest.raises(StateLimitError, match="more than 100 states"):
        explore(push(3, 1), max_states=100)
    with pytest.raises(ValueError, match="max_states: must be at least 1, got 0"):
        explore(push(2, 2), max_states=0)
    for pattern in PATTERNS.values():
        with pytest.raises(ValueError, match="ranks: must be at least 2, got 1"):
            pattern(1, 3)
        with pytest.raises(ValueError, match="rounds: must be at least 1, got 0"):
            pattern(2, 0)
    with pytest.raises(ValueError, match="channels: must be at least 1, got 0"):
        push_on_streams(2, 1, 0)
    for sources in ([], [2]):
        with pytest.raises(ValueError, match="sources: must be some of ranks 0 to 1"):
            pull(2, 1, sources)
    with pytest.raises(ValueError, match="'nothing at all' changes no step"):
        push(2, 2).rewritten("nothing at all", lambda process: process.steps)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], "has no steps"),
        ([EndRead(("a",))], "has not begun"),
        ([BeginRead(("a",), "x"), EndWrite(("a",))], "has not begun"),
        ([BeginWrite(("a",), "x")], "does not end the access"),
        ([BeginRead(("a",), "x"), *write(["a", "b"], "y")], "already accesses one of these cells"),
        ([Wait("a", 1, giving_up=1)], "cannot leave out 1 of 0 steps"),
        ([CompareAndSwap("a", 0, 1, otherwise=-1)], "cannot leave out -1"),
        ([Wait("a", 1, giving_up=1), *read(["a"], "x")], "the begin or the end of an access"),
        ([Publish("a", 256)], "must be at most 255"),
        ([Wait("a", -1)], "values from -1"),
        ([Publish("a", 1)] * 256, "256 steps"),
    ],
)
def test_what_is_no_protocol_is_refused(steps: list[ProtocolStep], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        explore(protocol_of(steps, []))
