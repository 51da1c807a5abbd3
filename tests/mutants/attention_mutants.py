"""Mutants of the attention over a sharded sequence, and of decoding."""

from mutants.mutations import Case, mutant_of

_FORWARD, _DECODE = "kernels/attention/forward.py", "kernels/attention/decode.py"
_HEADS = "kernels/attention/head_exchange.py"
_SLOTS = "for slot in range(first_slot, first_slot + slots):"
_FUSED = "attention all_gather fused"

CASES = [
    Case(mutant_of(_FORWARD, "last chunk of keys not waited for", (_SLOTS, _SLOTS.replace("+ slots)",
     "+ slots - 1)"))), "races", _FUSED),
    Case(mutant_of(_FORWARD, "keys of one rank not waited for", (_SLOTS, _SLOTS.replace("+ slots)",
     "+ tl.where(source == 0, 0, slots))"))), "races", _FUSED),
    Case(mutant_of(_FORWARD, "keys read where those of another rank lie",
     ("(gathered_ptr + row * keys.stride)", "(gathered_ptr + (row - 4) * keys.stride)")), "races",
     "attention all_gather fused"),
    Case(mutant_of(_DECODE, "results of a rank taken before all have come", ("valid = data | sums",
     "valid = data & (lane == 0)")), "schedules", "decode fused"),
    Case(mutant_of(_HEADS, "columns of another rank's rows not waited for",
     ("(first_slot + tile) * 8, epoch)", "(first_slot + tile) * 8, epoch - 1)")), "races",
     "matmul_all_to_all fused"),
    Case(mutant_of(_HEADS, "columns stored without the credit of their rank",
     ("if wait_credit(workspace, owner, epoch) >= epoch - 1:", "if epoch > 0:")), "races",
     "matmul_all_to_all fused"),
    Case(mutant_of(_HEADS, "rows multiplied before they have come", ("slot * 8, epoch)",
     "slot * 8, epoch - 1)")), "races", "all_to_all_matmul fused"),
    Case(mutant_of(_HEADS, "one slot for the rows of all ranks", ("slot = source * own.chunks + chunk",
     "slot = own.chunks * (source // 2) + chunk")), "races", "all_to_all_matmul fused"),
]  # fmt: skip
