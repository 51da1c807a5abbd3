"""Limits of a program on GPUs, as the CUDA programming guide has them.

Without imports: the command names architectures in its help, for which it loads neither torch nor Triton.
"""

ANYWHERE_KIB = 48
"""Shared memory that a program gets on every CUDA GPU without asking for more."""

SHARED_KIB = {
    75: 64,
    **dict.fromkeys((80, 87), 163),
    **dict.fromkeys((86, 89, 120, 121), 99),
    **dict.fromkeys((90, 100, 103), 227),
}
"""What one program can have, by compute capability (90 is 9.0)."""


def shared_bytes(capability: int) -> int:
    """Bytes of shared memory that one program can have; of an unknown chip, those that all have.

    >>> shared_bytes(90), shared_bytes(999)
    (232448, 49152)
    """
    return SHARED_KIB.get(capability, ANYWHERE_KIB) << 10
