"""The GPU of this process, and why it cannot run kernels there, if it cannot."""

import torch

from interlace.runtime.compat.launchers import local_rank


def gpu_problem() -> str:
    """Why this process cannot run kernels on a GPU; "" if it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from interlace.runtime.compat.triton_launcher import knobs

    return "TRITON_INTERPRET is set, which compiles no kernels" if knobs.runtime.interpret else ""


def own_gpu() -> torch.device:
    """The GPU of this process: its current one, which is made that of its number on the host if it was
    never chosen and ``torchrun`` has given it one."""
    local = local_rank()
    if local is not None and not torch.cuda.is_initialized():
        torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
