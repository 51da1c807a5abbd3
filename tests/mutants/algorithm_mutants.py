"""Mutants of algorithms with special rules: grouped matmuls, words with flags, the switch."""

from mutants.mutations import Case, mutant_of

_GROUPED = "kernels/experts/grouped_matmul.py"
_LOW, _SIGNAL = "kernels/collectives/low_latency.py", "kernels/signal.py"
_SWITCH = "kernels/collectives/multimem.py"
_A2A = "all_to_all_grouped_matmul fused"
_WAIT_ROWS = "                    wait(workspace, source, slot_byte, epoch, COMPILED"
_WORD = 'tl.atomic_xchg(pointers, word, sem="relaxed", scope="sys")'

CASES = [
    # -- kernels/experts/grouped_matmul.py -----------------------------------------------------------------
    Case(mutant_of(_GROUPED, "grouped rows of some ranks not waited for", (_WAIT_ROWS,
     f"                    if source > workspace.rank:\n    {_WAIT_ROWS}")), "races", _A2A),
    Case(mutant_of(_GROUPED, "one slot for all chunks of a segment",
     ("slot = first_slot + first_row // chunk_rows", "slot = first_slot")), "races", _A2A),
    Case(mutant_of(_GROUPED, "slot of another source", ("first_slot = segment + arrived_row",
     "first_slot = segment - 1 + arrived_row")), "races", _A2A),
    Case(mutant_of(_GROUPED, "table of segments not waited for",
     ("if wait(workspace, workspace.rank, table_byte, epoch) < epoch:", "if epoch < 0:")), "races", _A2A),
    Case(mutant_of(_GROUPED, "rows of another source's region",
     ("region = tl.cast(source, tl.int64)", "region = tl.cast(workspace.rank, tl.int64)")), "races", _A2A),
    Case(mutant_of(_GROUPED, "fence of grouped descriptor loads dropped",
     ("                    fence_descriptor_loads(TILES.COMPILED)\n", "                    pass\n")),
     "lint", _A2A, "grouped_matmul_kernel"),
    # -- words that carry their flag -----------------------------------------------------------------
    Case(mutant_of(_SIGNAL, "flag of two epochs before taken", ("(words >> 32).to(tl.int32) != flag",
     "(words >> 32).to(tl.int32) < flag - 2")), "schedules", "all_gather low_latency"),
    Case(mutant_of(_SIGNAL, "word stored plainly", (_WORD, "tl.store(pointers, word)")), "races",
     "all_gather low_latency"),
    Case(mutant_of(_LOW, "one set of words", ("block * 2 + lot.epoch % 2", "block * 2")), "schedules",
     "all_reduce low_latency"),
    Case(mutant_of(_LOW, "epoch of words used again",
     ("    tl.store(epoch_ptr, tl.where(missing == 0, epoch, -epoch))", "    pass")), "schedules",
     "all_reduce low_latency"),
    Case(mutant_of(_LOW, "root waits for nobody", ("words, first + 1)", "words, first)")), "schedules",
     "broadcast low_latency"),
    Case(mutant_of(_LOW, "one set of words for all sources",
     ("(block * 2 + lot.epoch % 2) * world_size + source", "(block * 2 + lot.epoch % 2)")), "schedules",
     "all_gather low_latency"),
    # -- by the switch ---------------------------------------------------------------------------------
    Case(mutant_of(_SWITCH, "sum before all have come",
     ("wait_sources(workspace, slot_byte, blocks, epoch) == 0",
     "wait(workspace, 0, slot_byte, epoch) >= epoch")), "races", "all_reduce multimem"),
    Case(mutant_of(_SWITCH, "credit of one rank for all",
     ("wait_credits(workspace, epoch) == 0",
     "wait(workspace, workspace.rank, (64 + workspace.rank) * 8, epoch - 1) >= epoch - 1")), "races",
     "all_gather multimem"),
    Case(mutant_of(_SWITCH, "sums told to one rank",
     ("publish_to_all(workspace, sums_slot + block * 8, epoch)",
     "publish(peer_pointer(workspace, 0, sums_slot + block * 8), epoch)")), "schedules",
     "all_reduce multimem"),
]  # fmt: skip
