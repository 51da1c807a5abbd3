"""Sizes as they are written on a command line: ``64K``, ``4K,1M,64M``, ``1K:1G:x4``, ``1M:4M:+1M``.

K, M and G are 2**10, 2**20 and 2**30.
"""

import re

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST = 1000
_NUMBER = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str, where: str = "size") -> int:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{where}: {text!r} is no size; write 100, 64K, 1M or 1G")
    size = int(found[1]) * UNITS[found[2].upper()]
    if size < 1:
        raise ValueError(f"{where}: must be positive, got {text!r}")
    return size


def parse_sizes(text: str, where: str = "--sizes") -> list[int]:
    """All sizes of a list whose entries are sizes or ranges; a range includes both ends if it meets them.

    Raises ValueError that quotes the part that is wrong.

    >>> parse_sizes("1K:20K:x4")
    [1024, 4096, 16384]
    >>> parse_sizes("100,1K:3K:+1K")
    [100, 1024, 2048, 3072]
    """
    sizes: list[int] = []
    for entry in text.split(","):
        parts = entry.split(":")
        if len(parts) == 1:
            sizes.append(parse_size(entry, where))
        elif len(parts) == 3:
            sizes += _range(entry, parts, where)
        else:
            raise ValueError(
                f"{where}: {entry!r} must be a size or first:last:step, as 1K:1G:x4 or 1M:4M:+1M"
            )
        if len(sizes) > MOST:
            raise ValueError(f"{where}: {text!r} has more than {MOST} sizes")
    return list(dict.fromkeys(sizes))


def _range(entry: str, parts: list[str], where: str) -> list[int]:
    first, last = parse_size(parts[0], where), parse_size(parts[1], where)
    step = parts[2].strip()
    if first > last:
        raise ValueError(f"{where}: {entry!r} begins with {first}, which is more than {last}")
    if step[:1] not in ("x", "+"):
        raise ValueError(f"{where}: the step of {entry!r} must be like x4 or +1M, got {step!r}")
    by = parse_size(step[1:], where)
    if step[0] == "x" and by < 2:
        raise ValueError(f"{where}: the factor of {entry!r} must be at least 2, got {by}")
    sizes = [first]
    while len(sizes) <= MOST:
        following = sizes[-1] * by if step[0] == "x" else sizes[-1] + by
        if following > last:
            break
        sizes.append(following)
    return sizes


def format_size(nbytes: int) -> str:
    """The shortest exact way to write it.

    >>> format_size(65536), format_size(1536), format_size(1000)
    ('64 KiB', '1.5 KiB', '1000 B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % (scale // 4) == 0:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"
