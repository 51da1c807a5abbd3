"""Limits of a program on GPUs, from the CUDA programming guide.

Without imports: the command names architectures in its help, without loading torch or Triton.
"""

ANYWHERE_KIB = 48
"""Shared memory that a program gets on every CUDA GPU without a request for more."""

SHARED_KIB = {
    75: 64,
    **dict.fromkeys((80, 87), 163),
    **dict.fromkeys((86, 89, 120, 121), 99),
    **dict.fromkeys((90, 100, 103), 227),
}
"""The most shared memory of one program, by compute capability (90 is 9.0)."""


def shared_bytes(capability: int) -> int:
    """Return the bytes of shared memory that one program can have; for an unknown chip, the common minimum.

    >>> shared_bytes(90), shared_bytes(999)
    (232448, 49152)
    """
    return SHARED_KIB.get(capability, ANYWHERE_KIB) << 10
