"""The mutants that ``interlace.verify`` must catch: one fault each, in our own protocols.

The table in docs/explanation/checks.md shows all checks that catch them (``python tests/mutant_table.py``
makes it). Here are mutants of publish and wait, of kernels that use them directly, and of kernels of users.
Mutants of other algorithms, of experts, attention, norms and scales are in ``algorithm_mutants.py``,
``expert_mutants.py``, ``attention_mutants.py``, ``norm_mutants.py`` and ``block_scale_mutants.py``.
"""

from mutants import (
    algorithm_mutants,
    attention_mutants,
    block_scale_mutants,
    expert_mutants,
    norm_mutants,
)
from mutants.mutations import Case, Mutant, mutant_of

_PUBLISH = 'tl.atomic_xchg(slot_ptr, epoch, sem="release", scope="sys")'
_POLL = 'seen = tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")'
_CREDIT = "return wait(peers, peer, (peer + _CREDIT) * 8, epoch - 1)"


_TURN = """\
                slot_byte = workspace.slot_offset + (rank * tiles - start) * 8
                publish_turn(workspace, owner, slot_byte, first, start + tiles, programs, epoch)
"""


def _signal(name: str, *edits: tuple[str, str]) -> Mutant:
    return mutant_of("kernels/signal.py", name, *edits)


def _slots(name: str, *edits: tuple[str, str]) -> Mutant:
    return mutant_of("kernels/slots.py", name, *edits)


_USER = "tests/sim/verify/user_exchange.py"
_RECIPE = "docs/examples/one_shot_all_reduce.py"
_COUNT = 'tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")'
_PUT, _TAKE = "atom.global.release.sys.cas.b32", "atom.global.acquire.sys.cas.b32"
_MEET = "    meet(pads_ptr, rank, WORLD_SIZE)\n"
_AG, _RS, _AR = "all_gather kernel", "matmul_reduce_scatter fused", "all_reduce kernel"
_PLAIN_RS = "reduce_scatter kernel"
_AGK = "all_gather_kernel"

CASES = [
    # -- kernels/signal.py -----------------------------------------------------------------------
    Case(_signal("release dropped", (_PUBLISH, _PUBLISH.replace("release", "relaxed"))), "races", _AG,
     _AGK),
    Case(_signal("acquire dropped", (_POLL, _POLL.replace("acquire", "relaxed"))), "races", _AG, _AGK),
    Case(_signal("barrier dropped", ("    tl.debug_barrier()\n", "")), "races", _AG, _AGK),
    Case(_signal("barrier after the release", (f"    tl.debug_barrier()\n    {_PUBLISH}",
     f"    {_PUBLISH}\n    tl.debug_barrier()")), "lint", _AG, _AGK),
    Case(_signal("publish with gpu scope", (_PUBLISH, _PUBLISH.replace("sys", "gpu"))), "races", _AG, _AGK),
    Case(_signal("wait with gpu scope", (_POLL, _POLL.replace("sys", "gpu"))), "lint", _AG, _AGK),
    Case(_signal("flag stored plainly", (_PUBLISH, "tl.store(slot_ptr, epoch)")), "races", _AG, _AGK),
    Case(_signal("flag read volatile", (_POLL, "seen = tl.load(slot_ptr, volatile=True)")), "lint", _AG,
     _AGK),
    Case(_signal("wait for the epoch before", ("seen < epoch", "seen < epoch - 1")), "races", _AG, _AGK),
    Case(_signal("wait without a loop", ("while (seen < epoch)", "while (seen < epoch - 1)"),
     ("        if seen < epoch:\n            give_up", "        if seen < 0:\n            give_up")),
     "races", _AG, _AGK),
    Case(_signal("credit not waited for", (_CREDIT, "return epoch")), "races", _PLAIN_RS),
    Case(_signal("credit of an op too early", (_CREDIT, _CREDIT.replace("- 1)", "- 2) + 1"))), "races",
     _PLAIN_RS),
    Case(_signal("epoch of the op before", ("0) + _EPOCH) + 1", "0) + _EPOCH)")), "races", _AG, _AGK),
    Case(_signal("barrier of many publishes dropped", ("    tl.debug_barrier()\n    tl.atomic_xchg(slot_ptrs",
     "    tl.atomic_xchg(slot_ptrs")), "races", _RS, "matmul_reduce_scatter_kernel"),
    Case(_signal("release of many slots dropped", ('epoch, 0), mask=valid, sem="release"',
     'epoch, 0), mask=valid, sem="relaxed"')), "races", _RS, "matmul_reduce_scatter_kernel"),
    # -- kernels/slots.py --------------------------------------------------------------------------
    Case(_slots("epoch used again", ("    tl.store(peer_pointer(peers, peers.rank, 0) + _EPOCH, epoch)\n",
     "    pass\n")), "races", "signal kernels"),
    Case(_slots("credit kept from one rank", ("& is_mapped(peers, peer)", "& (peer > 0)")), "schedules",
     "signal kernels"),
    Case(_slots("credits of all not waited for", ("return wait_sources(peers, _CREDIT * 8, 1, epoch - 1)",
     "return peers.world_size * 0")), "races", _AR),
    Case(_slots("last contribution not waited for", ("slot_bytes, source < peers.world_size,",
     "slot_bytes, source < peers.world_size - 1,")), "races", _RS),
    Case(_slots("last tiles of a turn not published", ("tile < end, epoch)", "tile < end - programs, epoch)")),
     "schedules", _RS),
    # -- kernels/transfer.py ---------------------------------------------------------------------
    Case(mutant_of("kernels/transfer.py", "published before the copy",
     ("            to_ptr = data_pointer(workspace, peer, input.ptr) + gathered_row",
     "            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)\n" "            to_ptr = data_pointer(workspace, peer, input.ptr) + gathered_row"),
     ("rows, 128)\n            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)\n",
     "rows, 128)\n")), "races", _AG, _AGK),
    Case(mutant_of("kernels/transfer.py", "wrong slot", ("slot_offset + slot * 8), epoch)",
     "slot_offset + slot * 8 + 8), epoch)")), "races", _AG),
    Case(mutant_of("kernels/transfer.py", "wrong peer signalled",
     ("            publish(peer_pointer(workspace, peer, workspace.slot_offset",
     "            publish(peer_pointer(workspace, (peer + 1) % workspace.world_size, workspace.slot_offset")),
     "races", _AG),
    Case(mutant_of("kernels/transfer.py", "one rank not waited for",
     ("            if source != workspace.rank:\n                wait(",
     "            if source != workspace.rank:\n                if source > 0:\n                  wait(")),
     "races", _AG),
    Case(mutant_of("kernels/transfer.py", "wait after the load",
     ("                wait(workspace, source, workspace.slot_offset + slot * 8, epoch)\n", ""),
     ("            copy_elements(output_ptr + gathered_row, from_ptr, rows, BLOCK, _IN_FLIGHT)\n",
     "            copy_elements(output_ptr + gathered_row, from_ptr, rows, BLOCK, _IN_FLIGHT)\n" "            if source != workspace.rank:\n" "                wait(workspace, source, workspace.slot_offset + slot * 8, epoch)\n")),
     "races", _AG),
    Case(mutant_of("kernels/transfer.py", "credit of another rank", ("wait_credit(workspace, peer, epoch)",
     "wait_credit(workspace, workspace.rank, epoch)")), "races", _AG),
    # -- sums --------------------------------------------------------------------------------------
    Case(mutant_of("kernels/matmul/matmul_reduce_scatter.py", "one region for all sources",
     (" + rank * rows * N", "")), "races", _RS),
    Case(mutant_of("kernels/matmul/matmul_reduce_scatter.py", "tiles published before their stores",
     (_TURN, ""), ("                produce_part(input", f"{_TURN}                produce_part(input")),
     "races", _RS),
    Case(mutant_of("kernels/matmul/matmul_reduce_scatter.py", "one slot for all tiles",
     ("(rank * tiles - start) * 8", "(rank * tiles - start - first) * 8")), "schedules", _RS),
    Case(mutant_of("kernels/matmul/matmul_reduce_scatter.py", "descriptor store published",
     ("    complete_descriptor_stores(COMPILED_STORES)\n", "")), "lint", _RS,
     "matmul_reduce_scatter_kernel"),
    # -- kernels/matmul/all_gather_matmul.py --------------------------------------------------------------
    Case(mutant_of("kernels/matmul/all_gather_matmul.py", "fence of descriptor loads dropped",
     ("                    fence_descriptor_loads(TILES.COMPILED)\n", "                    pass\n")),
     "lint", "all_gather_matmul fused", "all_gather_matmul_kernel"),
    Case(mutant_of("kernels/matmul/all_gather_matmul.py", "copiers wait before they have sent",
     ('            SCALED: tl.constexpr = TILES.SCALES == "row"\n',
     '            SCALED: tl.constexpr = TILES.SCALES == "row"\n' "            last = chunks.ptr + (chunks.count - 1) * _CHUNK\n" "            slot_byte = workspace.slot_offset + tl.load(last + 4) * 8\n" "            wait(workspace, tl.load(last), slot_byte, epoch)\n")),
     "schedules", "all_gather_matmul fused"),
    Case(
        mutant_of(
            "kernels/products.py",
            "descriptor beyond a chunk that ends within a tile",
            # only for the first rank's chunk, as its rows are not the last
            ("rows % TILES.BLOCK_M == 0", "(rows % TILES.BLOCK_M == 0) | (first_row == 16)"),
        ),
        "races",
        "all_gather_matmul fused",
    ),
    Case(
        mutant_of(
            "kernels/epilogue.py",
            "descriptor stores beyond a chunk that ends within a tile",
            # only for the first rank's chunk, as its rows are not the last
            ("rows % TILES.BLOCK_M == 0", "(rows % TILES.BLOCK_M == 0) | (first_row == 16)"),
        ),
        "races",
        "all_gather_matmul switch",
    ),
    *algorithm_mutants.CASES,
    *expert_mutants.CASES,
    *attention_mutants.CASES,
    *norm_mutants.CASES,
    *block_scale_mutants.CASES,
    # -- a counter that elects the last program, in a user's kernel ----------------------------------
    Case(mutant_of(_USER, "last program counter relaxed", (_COUNT, _COUNT.replace("acq_rel", "relaxed"))),
     "races", "last_program"),
    Case(mutant_of(_USER, "last program counter only releases", (_COUNT, _COUNT.replace("acq_rel",
     "release"))), "races", "last_program"),
    Case(mutant_of(_USER, "last program counter of cta scope", (_COUNT, _COUNT.replace("gpu", "cta"))),
     "races", "last_program"),
    Case(mutant_of(_USER, "last program counter without barrier", ("    tl.debug_barrier()\n    before",
     "    before")), "races", "last_program"),
    # -- a recipe with inline PTX ------------------------------------------------------------------
    Case(mutant_of(_RECIPE, "recipe put relaxed", (_PUT, _PUT.replace("release", "relaxed"))), "races",
     "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe take relaxed", (_TAKE, _TAKE.replace("acquire", "relaxed"))), "races",
     "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe put of gpu scope", (_PUT, _PUT.replace("sys", "gpu"))), "races",
     "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe without barrier before put", ("    tl.debug_barrier()\n    pads =",
     "    pads =")), "races", "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe without barrier after take",
     ("        take(rank_pads + first + peers)\n    tl.debug_barrier()\n",
     "        take(rank_pads + first + peers)\n")), "races", "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe without trailing meeting",
     (f"    tl.store(output_ptr + offsets, total)\n{_MEET}",
     "    tl.store(output_ptr + offsets, total)\n")), "races", "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe in a buffer that is too small",
     ("symmetric_memory.empty(programs * block,", "symmetric_memory.empty(programs * block - 8,")), "races",
     "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe reads too far", ("total += tl.load(peer_buffer + offsets)",
     "total += tl.load(peer_buffer + offsets + 8)")), "races", "three_rounds"),
    Case(mutant_of(_RECIPE, "recipe without its copy",
     ("    tl.store(rank_buffer + offsets, tl.load(input_ptr + offsets))\n", "")), "races", "three_rounds"),
]  # fmt: skip
