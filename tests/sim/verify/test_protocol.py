"""The protocol explorer, and the patterns of kernels/signal.py: clean, true to the code, with faults."""

import ast
import pathlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

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
    credit,
    explore_pattern,
    flag_barrier,
    giving_up,
    pull,
    push,
    push_after_pull,
    push_on_streams,
    slot,
    two_shot,
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


def test_a_violation_of_the_first_step_is_found() -> None:
    (found,) = explore(protocol_of(read(["a"], "x"))).violations
    assert (found.text, len(found.steps)) == ("rank 0 reads nothing in a instead of x", 1)


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


# -- faults in the patterns --------------------------------------------------------------------

# Each is the pattern with its steps rewritten by a rule.
Rule = Callable[[Process], Iterable[ProtocolStep]]
Test = Callable[[Any], bool]


def waits(step: ProtocolStep, kind: str = "") -> bool:
    return isinstance(step, Wait) and step.word.startswith(kind)


def publishes(step: ProtocolStep, kind: str) -> bool:
    return isinstance(step, Publish) and step.word.startswith(kind)


def swaps(step: ProtocolStep) -> bool:
    return isinstance(step, CompareAndSwap)


def without(unwanted: Test) -> Rule:
    return lambda process: [step for step in process.steps if not unwanted(step)]


def each(change: Callable[[Any], ProtocolStep]) -> Rule:
    return lambda process: [change(step) for step in process.steps]


def changed(wanted: Test, **changes: Any) -> Rule:
    return each(lambda step: replace(step, **changes) if wanted(step) else step)


def renamed(name: Callable[[str], str]) -> Rule:
    def rename(step: Any) -> ProtocolStep:
        if isinstance(step, Publish | Wait | CompareAndSwap):
            return replace(step, word=name(step.word))
        return replace(step, cells=tuple(map(name, step.cells)))

    return each(rename)


def in_one_place(wanted: Test) -> Rule:
    def rule(process: Process) -> Iterable[ProtocolStep]:
        short = renamed(lambda name: name.partition(" on ")[0])(process)
        for step, other in zip(process.steps, short, strict=True):
            yield other if wanted(step) else step

    return rule


def epoch_never_advances(process: Process) -> Iterable[ProtocolStep]:
    for step in process.steps:
        if waits(step, "credit"):
            yield replace(step, value=0)
        else:
            yield replace(step, value=1) if isinstance(step, Publish | Wait) else step


def too_early(moved: str, before: type[ProtocolStep]) -> Rule:
    """Publishes of such words come before the end of the access that they come right after."""

    def rule(process: Process) -> Iterable[ProtocolStep]:
        end: ProtocolStep | None = None
        for step in process.steps:
            if end is not None and not publishes(step, moved):
                yield end
                end = None
            if isinstance(step, before):
                end = step
            else:
                yield step
        if end is not None:
            yield end

    return rule


def credit_of_the_receiver_only(process: Process) -> Iterable[ProtocolStep]:
    """What a push does by itself; the host's wait for all credits is left out before it."""
    steps = process.steps
    pushing = False
    for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True):
        pushing = pushing or (waits(step, "credit") and step.value == 1)
        if not pushing or not waits(step, "credit") or isinstance(following, BeginWrite):
            yield step


def flags_become_epochs(process: Process) -> Iterable[ProtocolStep]:
    """The same barrier in interlace's way: put number n publishes n, and is waited for by ``>=``."""
    times: Counter[str] = Counter()
    for step in process.steps:
        if isinstance(step, CompareAndSwap):
            times[step.word] += 1
            kind = Publish if step.new == 1 else Wait
            yield kind(step.word, times[step.word])
        else:
            yield step


def epochs_are_reset(process: Process) -> Iterable[ProtocolStep]:
    """0 and 1, reset by who has waited, instead of epochs that grow."""
    for step in process.steps:
        if isinstance(step, Publish | Wait):
            yield replace(step, value=1)
            if isinstance(step, Wait):
                yield Publish(step.word, 0)
        else:
            yield step


def only_the_first_barrier(process: Process) -> Iterable[ProtocolStep]:
    held = False
    for step in process.steps:
        if isinstance(step, EndRead | BeginWrite):
            held = isinstance(step, EndRead)
        if not (held and isinstance(step, CompareAndSwap)):
            yield step


def claim_without_swap(process: Process) -> Iterable[ProtocolStep]:
    for step in process.steps:
        if isinstance(step, CompareAndSwap) and step.word.startswith("claim"):
            yield replace(step, new=0, otherwise=step.otherwise + 1)
            yield Publish(step.word, 1)
        else:
            yield replace(step, giving_up=step.giving_up + 1) if isinstance(step, Wait) else step


def credit_before_collecting(process: Process) -> Iterable[ProtocolStep]:
    """The copy stream gives the credit of an op, when its own pushes are over."""
    if process.name.endswith("computing"):
        return [step for step in process.steps if not publishes(step, "credit")]
    rank, steps = int(process.name.split()[1]), list[ProtocolStep]()
    for step in process.steps:
        steps.append(step)
        if publishes(step, "slot"):
            where = step.word.partition(" on ")[2]
            steps.append(Publish(f"credit {rank} of rank {1 - rank} on {where}", step.value))
    return steps


def no_wait(kind: str) -> Rule:
    return without(lambda step: waits(step, kind))


def no_publish(word: str) -> Rule:
    return without(lambda step: isinstance(step, Publish) and step.word == word)


def stored(step: Any) -> ProtocolStep:
    """A flag that is raised is stored, not swapped."""
    return Publish(step.word, 1) if swaps(step) and step.new == 1 else step


waits_exactly = changed(waits, exact=True)
last_epoch = each(lambda step: replace(step, value=step.value - 1) if waits(step, "slot") else step)
# nobody waits for the slot that is for rank 2 itself
out_of_place = changed(lambda step: publishes(step, slot(2, 1)), word=slot(2, 2))
told_nobody = changed(lambda step: step == Publish("abort of rank 1", 1), word="abort of nobody")
patient = changed(lambda step: waits(step) and step.only_after, only_after="abort of nobody")
nothing_recorded = changed(lambda step: isinstance(step, BeginWrite), content=EMPTY)
no_wait_for_inputs = without(lambda step: waits(step) and "staged" in step.word)
rank_2_skips_rank_0 = without(lambda step: step == CompareAndSwap("flag 2 of rank 0", 0, 1))
one_memory = in_one_place(
    lambda step: isinstance(step, BeginRead | BeginWrite | EndRead | EndWrite)
)
one_set_of_slots = in_one_place(lambda step: waits(step, "slot") or publishes(step, "slot"))
same_slot = renamed(lambda name: name.replace("slot 1 of", "slot 2 of"))
sums_are_staged = renamed(lambda name: name.replace(", summed", ", staged"))

PUSH, STREAMS, PULL, BROADCAST = push(3, 2), push_on_streams(2, 3), pull(3, 2), pull(3, 3, [0])
MIXED, TWO_SHOT, GIVING_UP = push_after_pull(3, 2), two_shot(3, 2), giving_up(3, 2)
FLAGS = flag_barrier(3, 2)
EPOCHS = FLAGS.rewritten("by epochs", flags_become_epochs)

# Each with what is found, and a part of its text.
FAULTS: list[tuple[Protocol, str, Rule, str, str]] = [
    (PUSH, "no wait", no_wait("slot"), "violation", "read"),
    (PUSH, "no credit", no_wait("credit"), "violation", "is reading"),
    (PUSH, "epoch never advances", epoch_never_advances, "violation", "is reading"),
    (PUSH, "waits for the last epoch", last_epoch, "violation", "read"),
    (PUSH, "slot out of place", out_of_place, "deadlock", slot(2, 1)),
    (PUSH, "one slot for two sources", same_slot, "violation", "read"),
    (PUSH, "rank 0 skips rank 1", no_publish(slot(1, 0)), "deadlock", slot(1, 0)),
    (PUSH, "rank 2 gives rank 0 no credit", no_publish(credit(0, 2)), "deadlock", credit(0, 2)),
    (PUSH, "published too early", too_early("slot", EndWrite), "violation", "is writing"),
    (PUSH, "credit too early", too_early("credit", EndRead), "violation", "is reading"),
    (STREAMS, "no wait", no_wait("slot"), "violation", "reads nothing"),
    (STREAMS, "no credit", no_wait("credit"), "violation", "is reading"),
    (STREAMS, "credit too early", credit_before_collecting, "violation", "is reading"),
    (STREAMS, "one memory for both channels", one_memory, "violation", "is writing"),
    (STREAMS, "one set of slots", one_set_of_slots, "violation", "is writing"),
    (PULL, "no wait", no_wait("slot"), "violation", "read"),
    (PULL, "no credit", no_wait("credit"), "violation", "is reading"),
    (PULL, "rank 1's credit not waited for", no_wait("credit 1"), "violation", "rank 1 is reading"),
    (PULL, "told before it is staged", too_early("slot", EndWrite), "violation", "is writing"),
    (PULL, "credit too early", too_early("credit", EndRead), "violation", "is reading"),
    (PULL, "rank 0 skips rank 1", no_publish(slot(1, 0)), "deadlock", slot(1, 0)),
    (BROADCAST, "waits exactly", waits_exactly, "deadlock", "== 0 (it is 1)"),
    (MIXED, "receiver's credit only", credit_of_the_receiver_only, "violation", "is reading"),
    (TWO_SHOT, "one set of slots", sums_are_staged, "violation", "sums"),
    (TWO_SHOT, "no wait for inputs", no_wait_for_inputs, "violation", "input"),
    (FLAGS, "stored, not swapped", each(stored), "deadlock", "from 1 to 0 (it is 0)"),
    (FLAGS, "never reset", changed(swaps, new=1), "deadlock", "from 0 to 1 (it is 1)"),
    (FLAGS, "no barrier after reading", only_the_first_barrier, "violation", "is reading"),
    (FLAGS, "rank 2 skips rank 0", rank_2_skips_rank_0, "deadlock", "flag 2 of rank 0"),
    (EPOCHS, "waits exactly", waits_exactly, "deadlock", "=="),
    (EPOCHS, "reset by who waits", epochs_are_reset, "deadlock", ">= 1 (it is 0)"),
    (GIVING_UP, "claim without swap", claim_without_swap, "violation", "record of rank 0"),
    (GIVING_UP, "rank 1 is not told", told_nobody, "deadlock", "rank 1 program 0"),
    (GIVING_UP, "abort not looked at", patient, "deadlock", "rank 1 program 0"),
    (GIVING_UP, "nothing recorded", nothing_recorded, "violation", "no rank has recorded"),
]


@pytest.mark.parametrize(
    ("protocol", "fault", "rule", "kind", "text"),
    FAULTS,
    ids=[f"{protocol.name}: {fault}" for protocol, fault, *_ in FAULTS],
)
def test_faults_are_found(protocol: Protocol, fault: str, rule: Rule, kind: str, text: str) -> None:
    """By either way of exploring; a fault that only blocks is blocked in the same states."""
    mutant = protocol.rewritten(fault, rule)
    full, reduced = explore(mutant), explore(mutant, reduced=True)
    for result in (full, reduced):
        found = result.deadlocks if kind == "deadlock" else result.violations
        assert any(text in one.text for one in found), result
        assert all(one.steps for one in found)
    if kind == "deadlock":
        assert not full.violations and not reduced.violations
        assert {one.text for one in full.deadlocks} == {one.text for one in reduced.deadlocks}


def test_other_ways_are_clean() -> None:
    for protocol in (push_on_streams(4, 3, channels=1), BROADCAST, pull(3, 2, [1, 2]), EPOCHS):
        result = explore(protocol, reduced=True)
        assert result.clean, result


def test_two_ranks_cannot_show_that_a_push_after_a_pull_needs_all_credits() -> None:
    """The reader that is harmed is a third rank: sizes matter, and 2 would say nothing."""
    fault = "receiver's credit only"
    assert explore(push_after_pull(2, 2).rewritten(fault, credit_of_the_receiver_only)).clean
