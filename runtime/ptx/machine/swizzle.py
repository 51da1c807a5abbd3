"""The swizzle of tiles in shared memory: TMA and ``wgmma`` swap their 16-byte pieces alike.

Rows of 128 bytes follow each other; of eight rows every one has its pieces at other places, so that a
column of pieces meets every bank once. It depends on the address alone: bits 4 to 6 are xor bits 7 to 9,
all three of them in the 128-byte mode, the lower two or one in those of 64 and 32 bytes.
"""

from interlace.runtime.ptx.types import Array


def swizzled(addresses: Array, nbytes: int, first_row: int = 0) -> Array:
    """Where what belongs to ``addresses`` in shared memory (of any integer dtype) lies, in bytes.

    ``nbytes``: the mode, 32, 64 or 128; 16 leaves all as it is. ``first_row``: the row of 128 bytes, modulo
    8, that a pattern begins at; 0 if it is aligned to its own size.
    """
    kind = addresses.dtype.type
    rows = (addresses >> kind(7)) - kind(first_row)
    return addresses ^ (rows << kind(4) & kind(nbytes - 16))
