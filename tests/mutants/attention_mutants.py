"""Mutants of the attention over a sharded sequence, and of decoding."""

from mutants.mutations import Case, mutant_of

_FORWARD, _DECODE = "kernels/attention/forward.py", "kernels/attention/decode.py"
_SLOTS = "for slot in range(first_slot, first_slot + slots):"
_FUSED = "attention all_gather fused"

CASES = [
    Case(
        mutant_of(
            _FORWARD,
            "last chunk of keys not waited for",
            (_SLOTS, _SLOTS.replace("+ slots)", "+ slots - 1)")),
        ),
        "races",
        _FUSED,
    ),
    Case(
        mutant_of(
            _FORWARD,
            "keys of one rank not waited for",
            (_SLOTS, _SLOTS.replace("+ slots)", "+ tl.where(source == 0, 0, slots))")),
        ),
        "races",
        _FUSED,
    ),
    Case(
        mutant_of(
            _FORWARD,
            "keys read where those of another rank lie",
            ("(gathered_ptr + row * keys.stride)", "(gathered_ptr + (row - 4) * keys.stride)"),
        ),
        "races",
        "attention all_gather fused",
    ),
    Case(
        mutant_of(
            _DECODE,
            "results of a rank taken before all have come",
            ("valid = data | sums", "valid = data & (lane == 0)"),
        ),
        "schedules",
        "decode fused",
    ),
]
