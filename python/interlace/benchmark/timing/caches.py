"""The last cache before memory, and the number of sets of inputs that do not fit in it."""

import math
from pathlib import Path

import torch

FALLBACK_BYTES = 32 << 20
PAST = 2  # times the cache: what is used again was replaced meanwhile
MOST_SETS = 4096
MOST_BYTES = 2 << 30
_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def cache_bytes(device: torch.device) -> int:
    """Bytes of the largest cache: a GPU's L2, a CPU's last level; 32 MiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size or FALLBACK_BYTES
    return last_level(_CPU) or FALLBACK_BYTES


def last_level(folder: Path) -> int:
    """Bytes of the largest cache level that Linux lists in ``folder``; 0 if it lists none."""
    found = (0, 0)
    for index in folder.glob("index*"):
        try:
            level = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
            nbytes = int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        except (OSError, ValueError):
            continue
        found = max(found, (level, nbytes))
    return found[1]


def sets_needed(set_bytes: int, cache: int) -> int:
    """The number of sets to use in turn, so that ``cache`` holds no part of one when it comes again."""
    if not set_bytes:
        return 1
    wanted = math.ceil(PAST * cache / set_bytes)
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // set_bytes))
