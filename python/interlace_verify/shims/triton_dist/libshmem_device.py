"""``triton_dist.language.extra.libshmem_device`` on a CPU: NVSHMEM's functions from ``nvshmem.py``.

Functions with ``_rma`` copy like the functions without it; the real ones only avoid loads and stores of
this GPU. Collectives, and functions that only other libraries than NVSHMEM have, are missing.
"""

from interlace_verify.shims import nvshmem
from interlace_verify.shims.triton_dist import missing

for _name, _value in [*vars(nvshmem).items()]:
    if not _name.startswith("_"):
        globals()[_name] = _value
        if _name.startswith("putmem"):
            _signal = "_signal" if _name.startswith("putmem_signal") else ""
            globals()[f"putmem{_signal}_rma" + _name.removeprefix(f"putmem{_signal}")] = _value

__getattr__ = missing.of("triton_dist.language.extra.libshmem_device")
