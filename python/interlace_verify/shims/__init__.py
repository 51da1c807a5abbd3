"""Stand-ins for packages whose device functions a kernel calls, so that the kernel runs in a check.

A file that imports Iris, Triton-distributed or torch's NVSHMEM functions is checked unchanged::

    python -m interlace verify --shims iris file.py::function

or, in a test, loaded and run within :func:`installed`. A shim has the real device functions' signatures.
Each function has the documented effect of the real one on memory: the stores, and the order of these
stores. Its docstring states this order, and the table states the source. The page of the shims is
docs/how-to/check/peers.md.

=============  =====================================================  ==============================
name           modules that it replaces                               source
=============  =====================================================  ==============================
iris           ``iris``                                               ROCm/iris
triton_dist    ``triton_dist``, its ``language``, ``language.extra``  ByteDance-Seed/Triton-distributed
               (``libshmem_device``, ``language_extra``), ``utils``,  and NVIDIA/nvshmem
               ``tune``; ``nvshmem.core``, ``nvshmem.bindings``
torch          ``torch.distributed._symmetric_memory`` (the handle    torch 2.13 and NVIDIA/nvshmem
               is interlace's), its ``_nvshmem_triton``
=============  =====================================================  ==============================
"""

from interlace_verify.shims.imports import SHIMS, installed

__all__ = ["SHIMS", "installed"]
