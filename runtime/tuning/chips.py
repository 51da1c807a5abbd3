"""GPU architectures: limits of a program, and round figures of speed.

Limits are those of the CUDA programming guide. Speeds are data sheets times a guess of what can be had
(0.85 of the matmul rate, 0.9 of memory, 0.83 of NVLink); nothing here was measured by this project. They
serve the cost model (``cost_model.py``), which only ranks configurations that are all valid.
"""

from dataclasses import dataclass

KIB = 1 << 10
ANYWHERE_KIB = 48
"""Shared memory that a program gets on every CUDA GPU without asking for more."""

SHARED_KIB = {
    75: 64,
    **dict.fromkeys((80, 87), 163),
    **dict.fromkeys((86, 89, 120, 121), 99),
    **dict.fromkeys((90, 100, 103), 227),
}
"""What one program can have, by compute capability (90 is 9.0)."""
BUILDABLE = tuple(sorted(arch for arch in SHARED_KIB if arch >= 80))
"""What kernels are compiled for: older ones have no bfloat16."""


def shared_bytes(capability: int) -> int:
    """Bytes of shared memory that one program can have; of an unknown chip, those that all have.

    >>> shared_bytes(90), shared_bytes(999)
    (232448, 49152)
    """
    return KIB * SHARED_KIB.get(capability, ANYWHERE_KIB)


@dataclass(frozen=True)
class Chip:
    """Round figures of an architecture with NVLink; ``tflops`` by bytes per element, 4 without TF32.

    ``copy_gbs``: of one SM that copies to a peer. ``small_tile_rate``: of a tile half as large as
    128 x 256, relative to that. ``tile_us``: of a tile, what does not overlap. ``chunk_us``: of a chunk
    that a program has tiles of: the wait, and a pipeline that runs empty and fills again. ``copy_us``:
    before each copy of a copy engine, with its signal.
    """

    name: str
    sms: int
    tflops: dict[int, float]
    memory_gbs: float
    link_gbs: float
    l2_mb: float
    copy_gbs: float = 4.6  # published: arXiv 2511.13940, on Hopper
    small_tile_rate: float = 0.83  # published: symm-mem-recipes, cuBLAS against Triton, on Hopper
    tile_us: float = 2.0
    chunk_us: float = 3.0
    copy_us: float = 3.0


CHIPS = {
    80: Chip("A100", 108, {4: 16.5, 2: 265.0}, 1830.0, 250.0, 40.0),
    90: Chip("H100", 132, {4: 57.0, 2: 750.0, 1: 1500.0}, 3000.0, 375.0, 50.0),
    100: Chip("B200", 148, {4: 64.0, 2: 1900.0, 1: 3800.0}, 7200.0, 750.0, 126.0),
}
"""Of 8.6, 8.9 and 12.x there are chips of all sizes, mostly without NVLink: nothing is predicted there."""


def chip_of(capability: int) -> Chip | None:
    """Its figures, if there are any.

    >>> chip_of(90).name, chip_of(120)
    ('H100', None)
    """
    return CHIPS.get({103: 100}.get(capability, capability))
