"""Makes torch know interlace's backends, of torch.distributed and torch.compile. Loads nothing before use.

torch calls :func:`register` at the end of its own import (entry point of the group ``torch.backends``),
which is why this is a module of its own: ``import interlace`` takes longer than torch should wait for.
``import interlace`` calls it too, for what is not installed, or with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

from typing import Any

NAME = "interlace"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register the backend with torch.distributed, if this torch has it. Idempotent."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: Any) -> Any:
    """Called by ``init_process_group`` and ``new_group`` on every rank that is a member."""
    from interlace.process_group.group import create

    return create(options, backend_options)


def compile_graph(graph_module: Any, inputs: Any, **options: Any) -> Any:
    """The backend of ``torch.compile(backend="interlace")`` where nothing of interlace was imported."""
    from interlace.compile.backend import backend

    return backend(graph_module, inputs, **options)
