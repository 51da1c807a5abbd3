"""Modules that stand for the packages whose device functions a kernel calls, so that it runs in a check.

A file that imports Iris, Triton-distributed or torch's NVSHMEM functions is checked as it is::

    python -m interlace verify --shims iris file.py::function

or, in a test, loaded and run within :func:`installed`. A shim has the signatures of the real device
functions, and each does what the real one is documented to do to memory: which stores it makes, and what
they are ordered with. Its docstring says which order that is, and where it was looked up.

=============  =====================================================  ==============================
name           modules that it stands for                             looked up in
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
