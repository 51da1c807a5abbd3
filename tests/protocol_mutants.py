"""The mutants that ``interlace.verify`` must catch: one fault each, in our own protocols.

``check`` is the check that must catch it in every test run; the table in docs/verify.md shows all that do
(``python tests/mutant_table.py`` makes it). ``target`` names what is run, as "op algorithm" of
``interlace.verify.targets`` or a function of the mutated file; lint compiles ``kernel`` of the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutations import Edit, Mutant

_PUBLISH = 'tl.atomic_xchg(slot_ptr, epoch, sem="release", scope="sys")'
_POLL = 'seen = tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")'
_CREDIT = "return wait(peers_ptr, rank, world_size, peer, (peer + _CREDIT) * 8, epoch - 1)"


@dataclass(frozen=True)
class Case:
    mutant: Mutant
    check: str  # "races", "schedules", "late stores" or "lint"
    target: str
    kernel: str = ""


def _in(file: str, name: str, *edits: tuple[str, str]) -> Mutant:
    return Mutant(name, file, tuple(Edit(*edit) for edit in edits))


def _signal(name: str, *edits: tuple[str, str]) -> Mutant:
    return _in("kernels/signal.py", name, *edits)


_USER = "tests/sim/user_exchange.py"
_RECIPE = "docs/examples/one_shot_all_reduce.py"
_COUNT = 'tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")'
_PUT, _TAKE = "atom.global.release.sys.cas.b32", "atom.global.acquire.sys.cas.b32"
_MEET = "    meet(pads_ptr, rank, WORLD_SIZE)\n"
_AG, _RS, _AR = "all_gather kernel", "matmul_reduce_scatter fused", "all_reduce kernel"
_A2A = "all_to_all_grouped_matmul fused"
_WAIT_ROWS = (
    "                    wait(peers_ptr, rank, world_size, source, slot_byte, epoch, COMPILED"
)
_AGK, _PUB, _WAIT = "all_gather_kernel", "publish_kernel", "wait_kernel"
_LOW, _SWITCH = "kernels/low_latency.py", "kernels/multimem.py"
_WORD = 'tl.atomic_xchg(pointers, word, sem="relaxed", scope="sys")'

CASES = [
    # -- kernels/signal.py -----------------------------------------------------------------------
    Case(
        _signal("release dropped", (_PUBLISH, _PUBLISH.replace("release", "relaxed"))),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _signal("acquire dropped", (_POLL, _POLL.replace("acquire", "relaxed"))),
        "races",
        _AG,
        _AGK,
    ),
    Case(_signal("barrier dropped", ("    tl.debug_barrier()\n", "")), "races", _AG, _AGK),
    Case(
        _signal(
            "barrier after the release",
            (f"    tl.debug_barrier()\n    {_PUBLISH}", f"    {_PUBLISH}\n    tl.debug_barrier()"),
        ),
        "lint",
        _AG,
        _AGK,
    ),
    Case(
        _signal("publish with gpu scope", (_PUBLISH, _PUBLISH.replace("sys", "gpu"))),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _signal("wait with gpu scope", (_POLL, _POLL.replace("sys", "gpu"))),
        "lint",
        _AG,
        _AGK,
    ),
    Case(
        _signal("flag stored plainly", (_PUBLISH, "tl.store(slot_ptr, epoch)")),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _signal("flag read plainly", (_POLL, "seen = tl.load(slot_ptr, volatile=True)")),
        "lint",
        _AG,
        _AGK,
    ),
    Case(
        _signal("wait for the epoch before", ("seen < epoch", "seen < epoch - 1")),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _signal(
            "wait without a loop",
            ("while (seen < epoch)", "while (seen < epoch - 1)"),
            (
                "        if seen < epoch:\n            _give_up",
                "        if seen < 0:\n            _give_up",
            ),
        ),
        "races",
        _AG,
        _AGK,
    ),
    Case(_signal("credit not waited for", (_CREDIT, "return epoch")), "races", _AR),
    Case(
        _signal("credit of an op too early", (_CREDIT, _CREDIT.replace("- 1", "- 2"))), "races", _AR
    ),
    Case(
        _signal("epoch of the op before", ("0) + _EPOCH) + 1", "0) + _EPOCH)")),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _signal(
            "epoch used again",
            ("    tl.store(peer_pointer(peers_ptr, rank, 0) + _EPOCH, epoch)\n", "    pass\n"),
        ),
        "races",
        "signal kernels",
    ),
    Case(
        _signal(
            "credit kept from one rank",
            (
                "        if is_mapped(peers_ptr, peer):\n            publish(peer_pointer(peers_ptr, peer, (_CREDIT",
                "        if peer > 0:\n            publish(peer_pointer(peers_ptr, peer, (_CREDIT",
            ),
        ),
        "schedules",
        "signal kernels",
    ),
    # -- kernels/transfer.py ---------------------------------------------------------------------
    Case(
        _in(
            "kernels/transfer.py",
            "published before the copy",
            (
                "            to_ptr = data_pointer(peers_ptr, peer, data_offset, input_ptr) + gathered_row",
                "            publish(peer_pointer(peers_ptr, peer, slot_offset + slot * 8), epoch)\n"
                "            to_ptr = data_pointer(peers_ptr, peer, data_offset, input_ptr) + gathered_row",
            ),
            (
                "rows, 128)\n            publish(peer_pointer(peers_ptr, peer, slot_offset + slot * 8), epoch)\n",
                "rows, 128)\n",
            ),
        ),
        "races",
        _AG,
        _AGK,
    ),
    Case(
        _in(
            "kernels/transfer.py",
            "wrong slot",
            ("slot_offset + slot * 8), epoch)", "slot_offset + slot * 8 + 8), epoch)"),
        ),
        "races",
        _AG,
    ),
    Case(
        _in(
            "kernels/transfer.py",
            "wrong peer signalled",
            (
                "            publish(peer_pointer(peers_ptr, peer, slot_offset",
                "            publish(peer_pointer(peers_ptr, (peer + 1) % world_size, slot_offset",
            ),
        ),
        "races",
        _AG,
    ),
    Case(
        _in(
            "kernels/transfer.py",
            "one rank not waited for",
            (
                "            if source != rank:\n                wait(",
                "            if source != rank:\n                if source > 0:\n                  wait(",
            ),
        ),
        "races",
        _AG,
    ),
    Case(
        _in(
            "kernels/transfer.py",
            "wait after the load",
            (
                "                wait(peers_ptr, rank, world_size, source, slot_offset + slot * 8, epoch)\n",
                "",
            ),
            (
                "            copy_elements(output_ptr + gathered_row, from_ptr, rows, BLOCK)\n",
                "            copy_elements(output_ptr + gathered_row, from_ptr, rows, BLOCK)\n"
                "            if source != rank:\n"
                "                wait(peers_ptr, rank, world_size, source, slot_offset + slot * 8, epoch)\n",
            ),
        ),
        "races",
        _AG,
    ),
    Case(
        _in(
            "kernels/transfer.py",
            "credit of another rank",
            (
                "wait_credit(peers_ptr, rank, world_size, peer, epoch)",
                "wait_credit(peers_ptr, rank, world_size, rank, epoch)",
            ),
        ),
        "races",
        _AG,
    ),
    # -- sums --------------------------------------------------------------------------------------
    Case(
        _in(
            "kernels/reduction.py",
            "last contribution not waited for",
            (
                "    for source in range(world_size):\n        slot =",
                "    for source in range(world_size - 1):\n        slot =",
            ),
        ),
        "races",
        _RS,
    ),
    Case(
        _in(
            "kernels/matmul_reduce_scatter.py",
            "one region for all sources",
            (" + rank * rows * N", ""),
        ),
        "races",
        _RS,
    ),
    Case(
        _in(
            "kernels/matmul_reduce_scatter.py",
            "tiles published before their stores",
            (
                "                complete_descriptor_stores(COMPILED_STORES)\n"
                "                for number in range(first, start + tiles, programs):\n"
                "                    slot_byte = slot_offset + (rank * tiles + number - start) * 8\n"
                "                    publish(peer_pointer(peers_ptr, owner, slot_byte), epoch)\n",
                "",
            ),
            (
                "                for number in tl.range(\n",
                "                for number in range(first, start + tiles, programs):\n"
                "                    slot_byte = slot_offset + (rank * tiles + number - start) * 8\n"
                "                    publish(peer_pointer(peers_ptr, owner, slot_byte), epoch)\n"
                "                for number in tl.range(\n",
            ),
        ),
        "races",
        _RS,
    ),
    Case(
        _in(
            "kernels/matmul_reduce_scatter.py",
            "one slot for all tiles",
            (
                "slot_offset + (rank * tiles + number - start) * 8",
                "slot_offset + rank * tiles * 8",
            ),
        ),
        "races",
        _RS,
    ),
    Case(
        _in(
            "kernels/matmul_reduce_scatter.py",
            "descriptor store published",
            (
                "                complete_descriptor_stores(COMPILED_STORES)\n",
                "",
            ),
        ),
        "lint",
        _RS,
        "matmul_reduce_scatter_kernel",
    ),
    # -- kernels/all_gather_matmul.py --------------------------------------------------------------
    Case(
        _in(
            "kernels/all_gather_matmul.py",
            "fence of descriptor loads dropped",
            (
                "                    fence_descriptor_loads(COMPILED)\n",
                "                    pass\n",
            ),
        ),
        "lint",
        "all_gather_matmul fused",
        "all_gather_matmul_kernel",
    ),
    # -- kernels/grouped_matmul.py -----------------------------------------------------------------
    Case(
        _in(
            "kernels/grouped_matmul.py",
            "grouped rows of some ranks not waited for",
            (_WAIT_ROWS, f"                    if source > rank:\n    {_WAIT_ROWS}"),
        ),
        "races",
        _A2A,
    ),
    Case(
        _in(
            "kernels/grouped_matmul.py",
            "one slot for all chunks of a segment",
            ("(first_slot + first_row // chunk_rows) * 8", "first_slot * 8"),
        ),
        "races",
        _A2A,
    ),
    Case(
        _in(
            "kernels/grouped_matmul.py",
            "slot of another source",
            ("first_slot = segment + segment_row", "first_slot = segment - 1 + segment_row"),
        ),
        "races",
        _A2A,
    ),
    Case(
        _in(
            "kernels/grouped_matmul.py",
            "fence of grouped descriptor loads dropped",
            (
                "                        fence_descriptor_loads(COMPILED)\n",
                "                        pass\n",
            ),
        ),
        "lint",
        _A2A,
        "grouped_matmul_kernel",
    ),
    # -- words that carry their flag -----------------------------------------------------------------
    Case(
        _signal(
            "flag of two epochs before taken",
            ("(words >> 32).to(tl.int32) != flag", "(words >> 32).to(tl.int32) < flag - 2"),
        ),
        "schedules",
        "all_gather low_latency",
    ),
    Case(
        _signal("word stored plainly", (_WORD, "tl.store(pointers, word)")),
        "races",
        "all_gather low_latency",
    ),
    Case(
        _in(_LOW, "one set of words", ("program * 2 + epoch % 2", "program * 2")),
        "schedules",
        "all_reduce low_latency",
    ),
    Case(
        _in(
            _LOW,
            "epoch of words used again",
            ("    tl.store(epoch_ptr, tl.where(missing == 0, epoch, -epoch))", "    pass"),
        ),
        "schedules",
        "all_reduce low_latency",
    ),
    Case(
        _in(_LOW, "root waits for nobody", ("words, first + 1)", "words, first)")),
        "schedules",
        "broadcast low_latency",
    ),
    Case(
        _in(
            _LOW,
            "one set of words for all sources",
            ("(program * 2 + epoch % 2) * world_size + source", "(program * 2 + epoch % 2)"),
        ),
        "schedules",
        "all_gather low_latency",
    ),
    # -- by the switch ---------------------------------------------------------------------------------
    Case(
        _in(
            _SWITCH,
            "sum before all have come",
            (
                "arrived = arrived & (wait(peers_ptr, rank, world_size, source, slot, epoch) >= epoch)",
                "if source > 0:\n            wait(peers_ptr, rank, world_size, source, slot, epoch)",
            ),
        ),
        "races",
        "all_reduce multimem",
    ),
    Case(
        _in(
            _SWITCH,
            "credit of one rank for all",
            (
                "    for peer in range(world_size):\n        free =",
                "    for peer in range(rank, rank + 1):\n        free =",
            ),
        ),
        "races",
        "all_gather multimem",
    ),
    Case(
        _in(
            _SWITCH,
            "sums told to one rank",
            (
                "            for peer in range(world_size):\n"
                "                publish(peer_pointer(peers_ptr, peer, sums_slot",
                "            for peer in range(1):\n"
                "                publish(peer_pointer(peers_ptr, peer, sums_slot",
            ),
        ),
        "schedules",
        "all_reduce multimem",
    ),
    # -- a counter that elects the last program, in a user's kernel ----------------------------------
    Case(
        _in(_USER, "last program counter relaxed", (_COUNT, _COUNT.replace("acq_rel", "relaxed"))),
        "races",
        "last_program",
    ),
    Case(
        _in(
            _USER,
            "last program counter only releases",
            (_COUNT, _COUNT.replace("acq_rel", "release")),
        ),
        "races",
        "last_program",
    ),
    Case(
        _in(_USER, "last program counter of cta scope", (_COUNT, _COUNT.replace("gpu", "cta"))),
        "races",
        "last_program",
    ),
    Case(
        _in(
            _USER,
            "last program counter without barrier",
            ("    tl.debug_barrier()\n    before", "    before"),
        ),
        "races",
        "last_program",
    ),
    # -- a recipe with inline PTX ------------------------------------------------------------------
    Case(
        _in(_RECIPE, "recipe put relaxed", (_PUT, _PUT.replace("release", "relaxed"))),
        "races",
        "three_rounds",
    ),
    Case(
        _in(_RECIPE, "recipe take relaxed", (_TAKE, _TAKE.replace("acquire", "relaxed"))),
        "races",
        "three_rounds",
    ),
    Case(
        _in(_RECIPE, "recipe put of gpu scope", (_PUT, _PUT.replace("sys", "gpu"))),
        "races",
        "three_rounds",
    ),
    Case(
        _in(
            _RECIPE,
            "recipe without barrier before put",
            ("    tl.debug_barrier()\n    pads =", "    pads ="),
        ),
        "races",
        "three_rounds",
    ),
    Case(
        _in(
            _RECIPE,
            "recipe without barrier after take",
            (
                "        take(own + first + peers)\n    tl.debug_barrier()\n",
                "        take(own + first + peers)\n",
            ),
        ),
        "races",
        "three_rounds",
    ),
    Case(
        _in(
            _RECIPE,
            "recipe without trailing meeting",
            (
                f"    tl.store(output_ptr + offsets, total)\n{_MEET}",
                "    tl.store(output_ptr + offsets, total)\n",
            ),
        ),
        "races",
        "three_rounds",
    ),
]
