"""Mutants of dispatch, combine, and grouped matmul + combine."""

from mutants.mutations import Case, mutant_of

_DISPATCH, _COMBINE = "kernels/experts/dispatch.py", "kernels/experts/combine.py"
_MATMUL, _SLOTS = "kernels/experts/combine.py", "kernels/slots.py"
_THERE, _BACK, _PRODUCTS = "dispatch fused", "combine fused", "grouped_matmul_combine fused"

CASES = [
    # -- kernels/experts/dispatch.py -----------------------------------------------------------------
    Case(mutant_of(_DISPATCH, "tokens sent without credit",
     ("        if wait_credit(workspace, peer, epoch) >= epoch - 1:\n            listed_ptr",
     "        if True:\n            listed_ptr")), "races", _THERE),
    Case(mutant_of(_DISPATCH, "one region for the tokens of all sources",
     ("first_row = tl.cast(workspace.rank, tl.int64) * sizes", "first_row = tl.cast(0, tl.int64) * sizes")),
     "races", _THERE),
    Case(mutant_of(_DISPATCH, "tokens of another sender waited for",
     ("sender = (block - start) % sizes.senders", "sender = (block + 1 - start) % sizes.senders")), "races",
     _THERE),
    Case(mutant_of(_DISPATCH, "counts of some ranks not waited for",
     ("wait_sources(workspace, workspace.slot_offset, 1, epoch) == 0",
     "wait(workspace, 0, workspace.slot_offset, epoch) >= epoch")), "races", _THERE),
    Case(mutant_of(_DISPATCH, "counts published before they are stored",
     ("            to_ptr = _region(workspace, peer, counts_byte, counts_ptr)\n",
     "            to_ptr = _region(workspace, peer, counts_byte, counts_ptr)\n"
     "            slot_byte = workspace.slot_offset + workspace.rank * 8\n"
     "            publish(peer_pointer(workspace, peer, slot_byte), epoch)\n")), "races", _THERE),
    # -- kernels/experts/combine.py ------------------------------------------------------------------
    Case(mutant_of(_COMBINE, "rows published before they are stored",
     ("            for expert in range(sizes.experts):\n",
     "            slot = workspace.rank * sizes.senders + sender\n"
     "            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)\n"
     "            for expert in range(sizes.experts):\n")), "races", _BACK),
    Case(mutant_of(_COMBINE, "one sender of each rank waited for",
     ("if wait_all(workspace, workspace.slot_offset, each,",
     "if wait_all(workspace, workspace.slot_offset, 1,")), "races", _BACK),
    # -- kernels/slots.py ----------------------------------------------------------------------------
    Case(mutant_of(_SLOTS, "one of many slots is enough", ("absent = tl.sum(late.to(tl.int32))",
     "absent = tl.min(late.to(tl.int32))")), "races", _BACK),
    Case(mutant_of("kernels/signal.py", "acquire of many slots dropped",
     ('return tl.atomic_add(slot_ptrs, nothing, mask=valid, sem="acquire", scope="sys")',
     'return tl.atomic_add(slot_ptrs, nothing, mask=valid, sem="relaxed", scope="sys")')), "races", _BACK),
    # -- kernels/experts/combine.py ---------------------------------------------------
    Case(mutant_of(_MATMUL, "products published before they are stored",
     ("            home_ptr = data_pointer(workspace, peer, combined.output_ptr)\n",
     "            home_ptr = data_pointer(workspace, peer, combined.output_ptr)\n"
     "            slot = workspace.rank * programs + tl.program_id(0)\n"
     "            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)\n")),
     "races", _PRODUCTS),
    Case(mutant_of(_MATMUL, "one slot for all programs of a rank",
     ("slot = workspace.rank * programs + tl.program_id(0)", "slot = workspace.rank * programs")),
     "schedules", _PRODUCTS),
    Case(mutant_of(_MATMUL, "products of all ranks at one home",
     ("home_ptr = data_pointer(workspace, peer,", "home_ptr = data_pointer(workspace, 0,")), "races",
     _PRODUCTS),
]  # fmt: skip
