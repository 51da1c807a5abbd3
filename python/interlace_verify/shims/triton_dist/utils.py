"""``triton_dist.utils`` on a CPU: symmetric tensors, and a node whose GPUs reach each other by NVLink.

Its other functions, for example to measure, raise an error when they are called.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace import symmetric_memory
from interlace_verify.shims import cuda_driver as cuda
from interlace_verify.shims.triton_dist import cudart, missing

__all__ = ["cuda", "cudart"]
__getattr__ = missing.of("triton_dist.utils")

NVSHMEM_SIGNAL_DTYPE = torch.int64


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: a group and memory end with the run, and a sleep orders nothing."""


finalize_distributed = nvshmem_free_tensor_sync = init_nvshmem_by_torch_process_group = _nothing
dist_print = sleep_async = init_seed = wait_until_max_gpu_clock_or_warning = _nothing


def CUDA_CHECK(err: Any) -> None:
    if int(err):
        raise RuntimeError(f"Cuda Error: {err}")


# -- groups and symmetric memory -------------------------------------------------------------------------


def initialize_distributed(*args: object, **kwargs: object) -> Any:
    """Return the group of all ranks, if the shim of torch is also installed."""
    return dist.group.WORLD


def get_triton_dist_world() -> Any:
    return dist.group.WORLD


def nvshmem_create_tensor(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    tensor = symmetric_memory.empty(math.prod(extents), dtype=dtype)
    symmetric_memory.rendezvous(tensor)
    return tensor.view(extents)


def peers_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """Return the memory of rank ``peer`` that corresponds to this rank's ``tensor``."""
    if peer == interlace.get_rank():
        return tensor
    handle: Any = symmetric_memory.rendezvous(tensor)
    at = tensor.data_ptr() - handle.buffer_ptrs[handle.rank]
    return handle.get_buffer(peer, tensor.shape, tensor.dtype, at // tensor.element_size())  # type: ignore[no-any-return]


def nvshmem_create_tensors(
    shape: int | Sequence[int], dtype: torch.dtype, rank: int, local_world_size: int
) -> list[torch.Tensor]:
    """Return symmetric tensors, one for each rank of the node; this rank's one is new."""
    local_tensor = nvshmem_create_tensor(shape, dtype)
    first = rank - rank % local_world_size
    return [peers_tensor(local_tensor, first + peer) for peer in range(local_world_size)]


def nvshmem_barrier_all_on_stream(stream: Any = None) -> None:
    """Order all ranks' work before it before all work after it; on ``stream`` or on the current one."""
    with torch.cuda.stream(stream):
        interlace.barrier()


# -- the machine -----------------------------------------------------------------------------------------


def is_cuda() -> bool:
    return True


def is_hip() -> bool:
    return False


is_maca = is_ascend = is_rocshmem = is_mori_shmem = is_hip
has_fullmesh_nvlink = supports_p2p_native_atomic = support_launch_cooperative_grid = is_cuda


def has_tma() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


is_nvshmem_multimem_supported = has_tma


def get_device_property(device_id: int = 0) -> Any:
    return torch.cuda.get_device_properties(device_id)


def get_device_max_shared_memory_size(device_id: int) -> int:
    return int(get_device_property(device_id).shared_memory_per_block_optin)


def get_group_numa_world_size(pg: Any) -> int:
    """Return the number of the group's ranks at one processor: all."""
    return int(pg.size())


def launch_cooperative_grid_options() -> dict[str, bool]:
    """Return options of a launch whose programs wait for each other."""
    return {"launch_cooperative_grid": True}


def torch_stream_max_priority() -> int:
    return -1


def requires(
    condition_func: Callable[[], bool],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> Any:
            if not condition_func():
                raise AssertionError(f"{function.__name__} needs {condition_func.__name__}")
            return function(*args, **kwargs)

        return checked

    return decorate


def requires_p2p_native_atomic(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function unchanged: the GPUs here have atomics on each other's memory."""
    return function


# -- data ------------------------------------------------------------------------------------------------


def is_fp8_dtype(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def rand_tensor(shape: Sequence[int], dtype: torch.dtype, device: Any = "cuda") -> Any:
    """Return random numbers: in [-1, 1) for floating-point types, otherwise over the whole type."""
    if dtype.is_floating_point:
        wide = torch.float32 if is_fp8_dtype(dtype) else dtype
        return (2 * torch.rand(shape, dtype=wide, device=device) - 1).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype, device=device)


def generate_data(configs: Sequence[Any]) -> Iterator[object]:
    """Yield random tensors for (shape, dtype, (scale, bias), device), None for None, without end."""
    while True:
        yield (_random(*config) if config else None for config in configs)


def _random(shape: Any, dtype: torch.dtype, scale_and_bias: Any, device: Any = "cuda") -> Any:
    (scale, bias), extents = scale_and_bias, [n() if callable(n) else n for n in shape]
    if dtype.is_floating_point:
        return (rand_tensor(extents, torch.float32, device) * scale + bias).to(dtype)
    return torch.randint(-scale, scale, extents, dtype=dtype, device=device) + bias
