"""The modules that shims replace, and the context in which ``import`` finds the shims."""

import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.runtime.compat import stand_ins, torch_modes
from interlace.runtime.compiler.request import STOOD_FOR
from interlace.runtime.places.sim import place, user_code

_HERE = "interlace_verify.shims"
_EXTRA = "triton_dist.language.extra"
_TORCH = "torch.distributed._symmetric_memory"
_LIBRARIES = ("site-packages", "dist-packages")
_IMPORTED: set[str] = set()  # modules of checked files, which may stay for later ones

# By name: the replaced modules and their shims; parents come first, "" is an empty module.
SHIMS: dict[str, dict[str, str]] = {
    "iris": {
        "iris": f"{_HERE}.iris",
        "iris.mem": "",
        "iris.mem.triton": "",
        "iris.mem.triton.context": f"{_HERE}.iris",
    },
    "triton_dist": {
        "triton_dist": f"{_HERE}.triton_dist",
        "triton_dist.jit": f"{_HERE}.triton_dist.decorator",
        "triton_dist.tune": f"{_HERE}.triton_dist.tune",
        "triton_dist.utils": f"{_HERE}.triton_dist.utils",
        "triton_dist.language": f"{_HERE}.triton_dist.language",
        "triton_dist.language.smem_ops": f"{_HERE}.triton_dist.missing",
        "triton_dist.language.tma": f"{_HERE}.triton_dist.missing",
        _EXTRA: "",
        f"{_EXTRA}.libshmem_device": f"{_HERE}.triton_dist.libshmem_device",
        f"{_EXTRA}.language_extra": f"{_HERE}.triton_dist.language_extra",
        f"{_EXTRA}.cuda": "",
        f"{_EXTRA}.cuda.libnvshmem_device": f"{_HERE}.triton_dist.libshmem_device",
        f"{_EXTRA}.cuda.language_extra": f"{_HERE}.triton_dist.language_extra",
        f"{_EXTRA}.cuda.tma_language": f"{_HERE}.triton_dist.missing",
        # for other makers' GPUs; checked files may import these
        f"{_EXTRA}.hip": "",
        f"{_EXTRA}.maca": "",
        **{
            f"{_EXTRA}.{name}": f"{_HERE}.triton_dist.missing"
            for name in (
                "hip.language_extra",
                "hip.librocshmem_device",
                "hip.libmori_shmem_device",
                "maca.language_extra",
                "maca.libmxshmem_device",
            )
        },
        "nvshmem": "",
        "nvshmem.core": f"{_HERE}.triton_dist.nvshmem_host",
        "nvshmem.bindings": "",
        "nvshmem.bindings.nvshmem": f"{_HERE}.triton_dist.nvshmem_host",
    },
    "torch": {
        f"{_TORCH}._nvshmem_triton": f"{_HERE}.torch_nvshmem",
        "cuda": "",
        "cuda.bindings": "",
        "cuda.bindings.driver": f"{_HERE}.cuda_driver",
        "cuda.cuda": f"{_HERE}.cuda_driver",
        # values that files read at import, also in processes that only compile
        **{
            f"torch.cuda:{name}": f"{_HERE}.torch_cuda:{name}"
            for name in ("get_device_capability", "get_device_properties", "get_device_name")
        },
    },
}


@contextlib.contextmanager
def installed(*names: str) -> Iterator[None]:
    """Let ``import`` find the shims of ``names`` in this context, even if the real packages exist.

    Raises ValueError for a name that is not in :data:`SHIMS`.

    >>> from interlace_verify import shims
    >>> with shims.installed("iris"):
    ...     import iris
    >>> iris.__name__
    'interlace_verify.shims.iris'
    """
    for name in names:
        if name not in SHIMS:
            raise ValueError(f"names: there is no shim {name!r}; there are {', '.join(SHIMS)}")
    modules = {real: shim for name in names for real, shim in SHIMS[name].items()}
    with contextlib.ExitStack() as leaving:
        for real in modules:
            if real.isidentifier():
                STOOD_FOR.append(real)
                leaving.callback(STOOD_FOR.remove, real)
        leaving.enter_context(stand_ins.installing(modules))
        if "torch" in names:
            leaving.enter_context(_torch_of_a_gpu())
        yield


def needed_for(error: BaseException) -> str | None:
    """Return the shim of the module that ``error`` misses, or in which ``error`` was raised."""
    if isinstance(error, ModuleNotFoundError):
        modules_there = {str(error.name)}
    else:
        frames = traceback.walk_tb(error.__traceback__)
        modules_there = {str(frame.f_globals.get("__name__")) for frame, _ in frames}
    return next(
        (name for name, modules in SHIMS.items() if not modules_there.isdisjoint(modules)), None
    )


def calls_a_shim(kernel: Any) -> bool:
    """Return whether a ``@triton.jit`` function, or one that it calls, calls a shim's device function."""
    todo, seen = [kernel.fn], set()
    while todo:
        function = todo.pop()
        seen.add(function)
        for name in function.__code__.co_names:
            named = function.__globals__.get(name)
            called = getattr(named, "fn", named)
            home = (
                called.__name__ if inspect.ismodule(called) else getattr(called, "__module__", "")
            )
            if str(home).startswith(f"{_HERE}.") or any(home in names for names in SHIMS.values()):
                return True
            if inspect.isfunction(called) and called is not named and called not in seen:
                todo.append(called)
    return False


@contextlib.contextmanager
def _torch_of_a_gpu() -> Iterator[None]:
    """In this context, code for one process and one GPU per rank runs on simulated ranks."""
    # imported here because few checks need it
    from interlace_verify.shims import torch_cuda, torch_distributed

    # torch imports this module lazily; it must not be unloaded after the check
    importlib.import_module("torch._dynamo")
    known = set(sys.modules) - _IMPORTED
    symmetric, c10d = sys.modules[_TORCH], dist.distributed_c10d
    of_torch: Any = sys.modules["torch._C._distributed_c10d"]
    memory_class = torch_distributed.MemoryOfTorch
    group = {"ProcessGroup": torch_distributed.SimulatedGroup}
    replaced: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.cuda, torch_cuda.REPLACED),
        (torch.cuda.nvtx, torch_cuda.NVTX),
        (dist, group),
        (c10d, group),
        (symmetric, {"_SymmetricMemory": memory_class, "is_nvshmem_available": lambda: True}),
        (of_torch, {"_SymmetricMemory": memory_class} | group),
    )
    real = {name: getattr(c10d, name) for name in torch_distributed.REPLACED}

    def modules() -> list[types.ModuleType]:
        of_user = {name: m for name, m in sys.modules.items() if name not in known and _is_own(m)}
        _IMPORTED.update(of_user)
        return [symmetric, *of_user.values()]

    setup = user_code.UserCode(
        modules,
        torch_distributed.state,
        lambda streams: [torch_cuda.OnOneCpu(streams)],
        torch_distributed.join,
    )
    token = place.AROUND.set(functools.partial(user_code.enclosing_run, setup))
    try:
        with contextlib.ExitStack() as leaving:

            def replace_functions(module: types.ModuleType) -> None:
                """Replace ``torch.distributed`` functions that a module of torch holds by name."""
                for name, value in torch_distributed.REPLACED.items():
                    if vars(module).get(name) is real[name]:
                        stand_ins.put(leaving, vars(module), name, value)

            leaving.enter_context(torch_modes.of_libraries())
            torch_distributed.replace_ops(leaving)
            for module, names in replaced:
                for name, value in names.items():
                    stand_ins.put(leaving, vars(module), name, value)
            for module in [m for name, m in sys.modules.items() if name.startswith("torch.")]:
                replace_functions(module)
            leaving.enter_context(stand_ins.imported_as_it_is("torch", replace_functions))
            yield
    finally:
        place.AROUND.reset(token)
        modules()


def _is_own(module: types.ModuleType) -> bool:
    path = pathlib.Path(getattr(module, "__file__", None) or sysconfig.get_path("stdlib"))
    libraries = sysconfig.get_path("stdlib"), pathlib.Path(interlace.__file__).parent
    inside = any(path.is_relative_to(library) for library in libraries)
    return not inside and not {*path.parts} & {*_LIBRARIES}
