"""The ordering rules. Each is a function from a PTX program to faults; an empty list is good.

The rules follow the branches of the PTX. They do not know which memory is remote, nor which wait belongs to
which data. Memory of unknown kind counts as remote; ``RULES`` says when to ignore a rule. Instructions are
recognised by the words of their operation, because Triton writes ``ld.global.sys.acquire.b64`` where people
write ``ld.acquire.sys.global.b64``.
"""

from collections.abc import Callable

from interlace.runtime.compiler.lint.faults import Fault, FrameChain, describe, later
from interlace.runtime.compiler.lint.ptx import PtxInstruction, PtxModule

Rule = Callable[[PtxModule], list[Fault]]

_NARROW = {"gpu", "cta", "cluster", "gl"}
_ORDERED = {"acquire", "release", "acq_rel", "sc"}


def is_release(one: PtxInstruction) -> bool:
    ordered = not one.parts.isdisjoint({"release", "acq_rel"})
    return ordered and one.kind in ("atom", "red", "st", "multimem") and one.is_global


def is_acquire(one: PtxInstruction) -> bool:
    """Return whether it waits: a load or an atomic. ``acq_rel`` counts: a counter may elect a program."""
    ordered = not one.parts.isdisjoint({"acquire", "acq_rel"})
    return ordered and one.kind in ("ld", "atom", "multimem") and one.is_global


def _is_descriptor_load(one: PtxInstruction) -> bool:
    """Return whether it is a TMA copy into shared memory."""
    return _bulk_spaces(one) == ["shared", "global"]


def _is_descriptor_store(one: PtxInstruction) -> bool:
    """Return whether it is a TMA copy, or reduction, out of shared memory."""
    return _bulk_spaces(one) == ["global", "shared"]


def _bulk_spaces(one: PtxInstruction) -> list[str]:
    bulk = one.operation.startswith(("cp.async.bulk.", "cp.reduce.async.bulk."))
    spaces = [part.split("::")[0] for part in one.operation.split(".")] if bulk else []
    return [space for space in spaces if space in ("global", "shared")]


def _is_plain_load(one: PtxInstruction) -> bool:
    return one.kind == "ld" and one.is_global and one.parts.isdisjoint(_ORDERED)


def _is_data_load(one: PtxInstruction) -> bool:
    copies = one.operation.startswith(("cp.async.ca.", "cp.async.cg.", "multimem.ld_reduce."))
    return copies or _is_plain_load(one) or _is_descriptor_load(one)


def _is_data_store(one: PtxInstruction) -> bool:
    if _is_descriptor_store(one):
        return True
    writes = one.kind in ("st", "atom", "red") or one.operation.startswith(
        ("multimem.st", "multimem.red")
    )
    return writes and one.is_global and one.parts.isdisjoint({*_ORDERED, "async"})


def _is_signal(one: PtxInstruction) -> bool:
    """Return whether it is an access that fences turn into an acquire or a release."""
    strong = one.kind in ("atom", "red") or not one.parts.isdisjoint({"relaxed", "volatile"})
    return strong and one.is_global


def _is_fence(one: PtxInstruction) -> bool:
    """Return whether it is a fence between generic accesses, which every thread executes for itself."""
    kind, _, rest = one.operation.partition(".")
    return kind == "membar" or (kind == "fence" and rest.split(".")[0] in _ORDERED)


def _waits(program: PtxModule) -> list[int]:
    """Return the acquires. One that also releases counts only if its value is used."""
    used = program.read_registers
    return program.where(
        lambda one: is_acquire(one) and ("acquire" in one.parts or not used.isdisjoint(one.results))
    )


def _reaching(
    rule: str,
    message: str,
    starts: Callable[[PtxModule], list[int]],
    stop: Callable[[PtxInstruction], bool],
    wrong: Callable[[PtxInstruction], bool],
) -> Rule:
    """Return a fault for each ``wrong`` instruction that one of ``starts`` reaches without a ``stop``."""

    def check(program: PtxModule) -> list[Fault]:
        code = program.instructions
        reached = program.flow.reach(starts(program), lambda i: stop(code[i]))
        return [
            Fault(rule, message.format(code[i].operation), describe(code[i].chain))
            for i in sorted(reached)
            if wrong(code[i])
        ]

    return check


release_without_barrier = _reaching(
    "release without barrier",
    "no bar.sync between the data stores and {}",
    lambda program: program.where(_is_data_store),
    lambda one: one.operation.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")),
    is_release,
)
published_descriptor_store = _reaching(
    "published descriptor store",
    "{} publishes a descriptor store that may not be complete",
    lambda program: program.where(_is_descriptor_store),
    lambda one: str(one) == "cp.async.bulk.wait_group 0",
    is_release,
)
unfenced_descriptor_load = _reaching(
    "unfenced descriptor load",
    "no fence.proxy.async between a wait and this load",
    _waits,
    lambda one: one.operation in ("fence.proxy.async", "fence.proxy.async.global"),
    _is_descriptor_load,
)


def narrow_scope(program: PtxModule) -> list[Fault]:
    """Find acquires, releases and fences that other ranks may not see.

    A fence orders for others only together with a signal: before it to acquire, after it to release. The
    scope of a fence between loads of data cannot be observed.
    """
    code, reach = program.instructions, program.flow.reach
    every = _is_signal, _is_data_load, _is_data_store
    accesses = program.where(lambda one: any(is_one(one) for is_one in every))
    signals = [i for i in accesses if _is_signal(code[i])]

    def next_to_a_signal(fence: int) -> bool:
        later = reach([fence], lambda i: False)
        acquires = fence in reach(signals, lambda i: False) and not later.isdisjoint(accesses)
        releases = fence in reach(accesses, lambda i: False) and not later.isdisjoint(signals)
        return acquires or releases

    def narrow(i: int) -> bool:
        if _is_fence(code[i]):
            return not code[i].parts.isdisjoint(_NARROW) and next_to_a_signal(i)
        return (is_acquire(code[i]) or is_release(code[i])) and "sys" not in code[i].parts

    return [
        Fault("narrow scope", f"{one.operation} is not of scope sys", describe(one.chain))
        for i, one in enumerate(code)
        if narrow(i)
    ]


def early_load(program: PtxModule) -> list[Fault]:
    """Find loads that follow a wait in the source and precede its first instruction in the PTX.

    Only its first instruction counts, because in an unrolled or pipelined loop a load of one round may
    correctly come before the wait of the next.
    """
    waits: dict[FrameChain, list[int]] = {}
    for i in _waits(program):
        waits.setdefault(program.instructions[i].chain, []).append(i)
    before = program.flow.before
    found = []
    for load in program.where(_is_data_load):
        one = program.instructions[load]
        for chain, places in waits.items():
            if (
                later(one.chain, chain)
                and any(before(load, wait) for wait in places)
                and not any(before(wait, load) for wait in places)
            ):
                message = f"{one.operation} comes before the wait at {describe(chain)}"
                found.append(Fault("early load", message, describe(one.chain)))
    return found


def weak_poll(program: PtxModule) -> list[Fault]:
    """Find loads without acquire that decide whether their loop ends, if loads follow before any acquire.

    Loads of a later kernel do not count: the end of this kernel orders them.
    """
    found, code = polls(program), program.instructions

    def orders(i: int) -> bool:
        return ("sys" in code[i].parts and _is_fence(code[i])) or is_acquire(code[i])

    def is_unordered(poll: int) -> bool:
        reached = program.flow.reach([poll], orders) - set(found)
        return any(_is_data_load(code[i]) for i in reached)

    return [
        Fault("weak poll", f"{code[i].operation} acquires nothing", describe(code[i].chain))
        for i in found
        if is_unordered(i)
    ]


def polls(program: PtxModule) -> list[int]:
    """Return the loads without acquire that decide whether their loop ends."""

    def may_poll(one: PtxInstruction) -> bool:
        relaxed = one.kind in ("ld", "atom") and "relaxed" in one.parts and one.is_global
        return _is_plain_load(one) or relaxed

    return [i for i in program.where(may_poll) if _decides(program, i)]


def _decides(program: PtxModule, poll: int) -> bool:
    """Return whether the loop around a load of one address is left depending on the loaded value.

    The value may pass through shared memory, by which one thread tells the others. A plain load may also be
    the bound of a counter; such a loop does not wait for it.
    """
    loop = program.flow.loop(poll)
    code = program.instructions
    written = {name for i in loop for name in code[i].results}
    if not loop or not written.isdisjoint(set(code[poll].inputs) - {code[poll].predicate}):
        return False
    plain = _is_plain_load(code[poll]) and "volatile" not in code[poll].parts
    known, is_stored = set(code[poll].results), False
    while True:
        before = (len(known), is_stored)
        for i in loop:
            one, shared = code[i], not code[i].is_global
            counts = plain and one.kind == "setp" and not (written - known).isdisjoint(one.inputs)
            reads = not known.isdisjoint(one.inputs) and not counts
            if reads or (is_stored and shared and one.kind == "ld"):
                known.update(one.results)
                is_stored = is_stored or (shared and one.kind == "st")
        if (len(known), is_stored) == before:
            break
    return any(code[i].predicate.lstrip("!") in known for i in program.flow.exits(loop))


PTX_RULES: tuple[Rule, ...] = (
    release_without_barrier,
    narrow_scope,
    weak_poll,
    published_descriptor_store,
    unfenced_descriptor_load,
    early_load,
)
