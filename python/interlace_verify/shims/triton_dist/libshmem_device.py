"""``triton_dist.language.extra.libshmem_device`` on a CPU: NVSHMEM's functions, as ``nvshmem.py`` has them.

``..._rma`` copy as the functions without it do: those only avoid loads and stores of the own GPU.
Collectives, and what other libraries than NVSHMEM have, are not there.
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
