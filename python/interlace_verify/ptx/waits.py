"""PTX that orders or waits: fences, barriers, sleep, and asynchronous copies.

The interpreter has no asynchronous copies or proxies, so a wait for a copy and a proxy fence do nothing.
When a whole kernel runs, proxy fences are reported to observers.
"""

import re
from collections.abc import Callable
from urllib.parse import unquote

import numpy as np

from interlace.runtime.core.errors import InterlaceError
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import SCOPES
from interlace_verify.ptx.special import WARP, Threads
from interlace_verify.ptx.types import TYPES

BLOCK_BARRIER, WARP_BARRIER, MBARRIER_WAIT, ARRIVAL = -1, -2, -3, -4
"""The result of a barrier's action. Threads meet in ``inline_assembly.py`` and ``machine.py``."""
BARRIERS = 16  # the most in a program
CLUSTER = -1  # the number of a cluster's barrier, besides these

WAITS, builds = builders()


@builds("fence", "membar")
def build_fence(instruction: Instruction) -> Action:
    if instruction.flag("proxy"):
        return _fence_of_proxies(instruction)
    if instruction.flag("mbarrier_init"):
        return _nothing
    if instruction.mnemonic == "membar":
        sem, scopes = "sc", {"cta": "cta", "gl": "gpu", "sys": "sys"}
    else:
        sems = ("sc", "acq_rel", "acquire", "release")
        sem, scopes = instruction.choose(*sems) or "acq_rel", SCOPES
    scope = instruction.choose(*scopes)
    instruction.finish(0)
    if scope is None:
        raise instruction.error(f"'{instruction.opcode}' needs a scope")
    within = scopes[scope]
    return lambda threads: threads.session.hooks.fence(sem, within, threads.who())


def _fence_of_proxies(instruction: Instruction) -> Action:
    alias = instruction.flag("alias")
    if not alias and not instruction.flag("async"):
        return _nothing

    def fence(threads: Threads) -> None:
        if alias or threads.told_apart:
            threads.session.hooks.proxy_fence(threads.who(), alias=alias)

    return fence


@builds("bar", "barrier")
def build_barrier(instruction: Instruction) -> Action:
    warp, cluster = instruction.flag("warp"), instruction.flag("cluster")
    if cluster:
        return _of_a_cluster(instruction)
    if not warp:
        instruction.flag("cta")
        instruction.flag("aligned")
    form = instruction.choose("sync") if warp else instruction.choose("sync", "arrive", "red")
    if form is None or (form != "sync" and instruction.symbols is None):
        raise instruction.unknown(f"'{instruction.opcode}'", ["bar.sync", "bar.warp.sync"])
    counted = _counting_barrier(instruction) if form == "red" else None
    instruction.finish(*((1,) if warp else (1, 2)))
    reads = [instruction.reader(operand, TYPES["u32"]) for operand in instruction.operands]
    instruction.members = reads[0] if warp else None

    def barrier(threads: Threads) -> int:
        if warp:
            return WARP_BARRIER
        came = np.stack([threads.active(read(threads)) for read in reads], axis=1)
        differ = came.shape[0] > 1 and (came != came[0]).any()
        barriers, whole = [], -(-threads.block // WARP) * WARP  # count all lanes as present
        for each in np.unique(came, axis=0) if differ else came[:1]:
            number, count = (*map(int, each), 0)[:2]
            if number >= BARRIERS or count % WARP:
                raise instruction.error(
                    f"barrier {number} of {count} threads: a program has {BARRIERS}, of whole warps"
                )
            if count not in (0, whole) and not threads.told_apart:
                raise instruction.error(
                    f"only barriers of all threads are known, here of {threads.block}"
                )
            mask = threads.everyone().copy()
            mask[mask] = (came == each).all(axis=1)
            barriers.append((number, 0 if count == whole else count, mask))
        threads.session.barriers, threads.session.counted = barriers, counted
        return ARRIVAL if form == "arrive" else BLOCK_BARRIER

    return barrier


def _counting_barrier(instruction: Instruction) -> Callable[[Threads], None]:
    """Return the action of ``bar.red``: it combines the predicates of all threads that have met."""
    name = instruction.choose("popc", "and", "or")
    kind = instruction.take_type(("u32",) if name == "popc" else ("pred",))
    target, *instruction.operands, predicate_text = instruction.operands
    write, read = (
        instruction.writer(target, kind),
        instruction.reader(predicate_text, TYPES["pred"]),
    )

    def count(threads: Threads) -> None:
        values = threads.active(read(threads))
        total = values.sum(dtype=np.uint32) if name == "popc" else values.any()
        write(threads, np.bool_(values.all()) if name == "and" else total)

    return count


def _of_a_cluster(instruction: Instruction) -> Action:
    """Build a cluster barrier. A cluster is one program; its wait passes on all before ``arrive``."""
    waits = instruction.flag("wait")
    if waits:
        instruction.flag("acquire")
    else:
        instruction.flag("arrive")
    tells = not waits and instruction.choose("release", "relaxed") != "relaxed"
    instruction.flag("aligned")
    instruction.finish(0)

    def meet(threads: Threads) -> int | None:
        if tells and threads.told_apart:
            threads.session.hooks.arrival(-1 - CLUSTER, threads.active(threads.numbers))
        threads.session.barriers = [(CLUSTER, 0, threads.everyone())]
        threads.session.counted = None
        return BLOCK_BARRIER if waits else None

    return meet


def _nothing(threads: Threads) -> None:
    """There is nothing to wait for."""


_NOTHING_TO_WAIT_FOR = {
    "cp": {
        "async.commit_group": 0,
        "async.wait_group": 1,
        "async.wait_all": 0,
        "async.bulk.commit_group": 0,
        "async.bulk.wait_group": 1,
        "async.bulk.wait_group.read": 1,
    },
    "griddepcontrol": {"wait": 0, "launch_dependents": 0},
    "setmaxnreg": {f"{way}.sync.aligned.u32": 1 for way in ("inc", "dec")},
}


@builds(*_NOTHING_TO_WAIT_FOR)
def build_wait(instruction: Instruction) -> Action:
    known = _NOTHING_TO_WAIT_FOR[instruction.mnemonic]
    count = known.get(".".join(instruction.qualifiers))
    if count is None:
        names = [f"{instruction.mnemonic}.{rest}" for rest in known]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", names)
    instruction.qualifiers.clear()
    instruction.finish(count)
    return _nothing


_HINT = re.compile(r"global|local|L[12]|L2::evict_\w+|L2::cache_hint|fractional|range|cvt")


@builds("prefetch", "prefetchu", "discard", "applypriority", "createpolicy")
def build_hint(instruction: Instruction) -> Action:
    """Build a hint for caches, which do not exist here. The value of a policy is never used."""
    for name in filter(_HINT.fullmatch, list(instruction.qualifiers)):
        instruction.flag(name)
    if instruction.mnemonic != "createpolicy":
        instruction.finish(1, 2)
        return _nothing
    kind = instruction.take_type(("b64",))
    instruction.finish(1, 2, 4)
    write = instruction.writer(instruction.operands[0], kind)
    return lambda threads: write(threads, np.uint64(0))


@builds("nanosleep")
def build_sleep(instruction: Instruction) -> Action:
    instruction.take_type(("u32",))
    instruction.finish(1)
    return lambda threads: threads.session.hooks.pause()


@builds("ret", "exit")
def build_end(instruction: Instruction) -> Action:
    """Build an end of threads, which the machine handles."""
    instruction.finish(0)
    return _nothing


@builds("check")
def build_check(instruction: Instruction) -> Action:
    """Build a check of a kernel, as ``compat/triton_launcher.py`` writes it; GPUs do not have it."""
    form = ".".join(instruction.qualifiers)
    instruction.qualifiers.clear()
    condition, *message = instruction.operands
    read, message_text = (
        instruction.reader(condition, TYPES["u32"]),
        ": ".join(map(unquote, message)),
    )

    def check(threads: Threads) -> None:
        if not (holds := threads.active(read(threads))).all():
            first = threads.active(threads.numbers)[holds == 0][0]
            problem = (
                f"{form} fails in {(holds == 0).sum()} of {holds.size} threads, the first {first}"
            )
            raise AssertionError(f"{problem}: {message_text}" if message_text else problem)

    return check


@builds("trap")
def build_trap(instruction: Instruction) -> Action:
    instruction.finish(0)

    def trap(threads: Threads) -> None:
        raise InterlaceError(
            f"PTX: the kernel stopped at '{instruction.text}'; line {instruction.line}, thread "
            f"{threads.active(threads.numbers)[0]} of program "
            f"{tuple(threads.session.builder.grid_idx)}"
        )

    return trap
