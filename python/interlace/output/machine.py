"""Facts about this machine, for ``interlace doctor``: versions, GPUs, links, kernel features.

No probe starts, awaits or writes anything. Optional packages are looked up without importing them, because
a broken package must not end the doctor. A probe that fails leaves its reason as a fact.
"""

import ctypes.util
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.runtime.compat.launchers import variables
from interlace.runtime.compat.releases import installed_release, untried_releases
from interlace.runtime.core.errors import PlaceUnavailableError

MachineFacts = dict[str, Any]
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
DEVICE_LIBRARY = "libnvshmem_device.bc"


def inspect_machine() -> MachineFacts:
    """Return all facts, as values that JSON can hold."""
    return {
        "python": installed_release("Python"),
        "interlace": _version("interlace"),
        "torch": _probe(_torch),
        "triton": {"version": _version("triton"), "interpreted": _is_interpreted()},
        "untried": untried_releases(),
        "numpy": _version("numpy"),
        "greenlet": _version("greenlet"),
        "cupy": next((f"{name} {v}" for name in CUPY if (v := _version(name))), None),
        "gpus": _probe(_gpus),
        "peer_access": _probe(_peer_access),
        "multicast": _probe(_multicast),
        "nvshmem": {
            "torch_backend": _probe(_nvshmem_backend),
            "device_library": _probe(_nvshmem_library),
            "host_library": ctypes.util.find_library("nvshmem_host"),
        },
        "host": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "memory_bytes": _probe(_memory),
            "sealed_memfd": _probe(_sealed_memfd),
            "pidfd_open": _probe(_pidfd_open),
            "pass_descriptors": _probe(_pass_descriptors),
            "machine_code": _probe(_machine_code),
            "proc_self_fd": os.path.isdir("/proc/self/fd"),
        },
        "hosts": {
            "this_host": _probe(_this_host),
            "launched": _probe(_launcher_in_words),
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
    }


def _probe(probe: Callable[[], object]) -> Any:
    """Return the result of ``probe``, or {"error": the reason why it failed}."""
    try:
        return probe()
    except Exception as error:  # any exception of a broken driver or package is a result
        return {"error": f"{type(error).__name__}: {error}"}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    # A source tree on PYTHONPATH has no metadata, but it has the module.
    found = getattr(sys.modules.get(distribution), "__version__", None)
    return str(found) if found else None


def _is_interpreted() -> bool:
    """Return whether interlace's kernels are interpreted, as decided when they were imported."""
    from interlace.kernels import signal
    from interlace.runtime.compat.triton_interpreter import InterpretedFunction

    return any(isinstance(value, InterpretedFunction) for value in vars(signal).values())


def _torch() -> MachineFacts:
    return {"version": torch.__version__, "cuda_build": torch.version.cuda}


def _gpus() -> list[MachineFacts]:
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        facts = {"name": about.name, "capability": [about.major, about.minor]}
        found.append({"index": index, **facts, "memory_bytes": about.total_memory})
    return found


def _peer_access() -> str | None:
    """Return a summary of the matrix of devices that can reach each other's memory."""
    pairs = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    if not pairs:
        return None
    cut = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"all {len(pairs)} pairs" if not cut else f"not {', '.join(cut)}"


def _multicast() -> bool | None:
    from torch._C._autograd import DeviceType

    from interlace.runtime.compat.torch_groups import c10d

    count = torch.cuda.device_count()
    if not count:
        return None
    ask = c10d._SymmetricMemory.has_multicast_support
    return all(ask(DeviceType.CUDA, i) for i in range(count))


def _machine_code() -> bool:
    from interlace.runtime.places.shm.machine_code import available

    return available()


def _nvshmem_backend() -> bool:
    from interlace.runtime.compat.torch_groups import nvshmem_available

    return bool(nvshmem_available())


def _nvshmem_library() -> str | None:
    """Return the path of the bitcode that kernels for sm_90 are linked with."""
    from interlace.runtime.compiler.nvshmem_library import device_library

    try:
        return device_library(90)
    except PlaceUnavailableError:
        return None


def _this_host() -> str:
    """Return the name of this host, and a digest that is equal for ranks that can share its memory."""
    from interlace.runtime.places.hosts.host_map import this_host

    digest = hashlib.sha256(this_host().encode()).hexdigest()[:8]
    return f"{platform.node()} ({digest})"


def _launcher_in_words() -> str | None:
    """Describe the ranks that a launcher has put on this host; return None if this is not a rank."""
    found = variables(os.environ)
    here = f"{found['LOCAL_WORLD_SIZE']} " if "LOCAL_WORLD_SIZE" in found else ""
    if not found:
        return None
    return f"{here}of {found['WORLD_SIZE']} ranks, this is rank {found['RANK']}"


def refuse_size(subject: str, nbytes: int, world_size: int, place: str) -> None:
    """Raise ValueError if ``subject``, of ``nbytes`` on each rank, needs more memory than there is."""
    if place == "cuda":
        devices = torch.cuda.device_count()
        most = torch.cuda.get_device_properties(0).total_memory
        most *= devices if devices >= world_size else 1
    elif "SC_PHYS_PAGES" in os.sysconf_names:
        most = _memory()
    else:
        return
    if world_size * nbytes > most:
        raise ValueError(
            f"{subject} on {world_size} ranks needs {world_size * nbytes / 2**30:,.0f} GiB, there are "
            f"{most / 2**30:,.0f} in place {place}"
        )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _sealed_memfd() -> bool:
    """Return whether a memfd can be made, and after sealing refuses to shrink."""
    import fcntl

    descriptor = os.memfd_create("interlace-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return True
        return False
    finally:
        os.close(descriptor)


def _pidfd_open() -> bool:
    os.close(os.pidfd_open(os.getpid()))
    return True


def _pass_descriptors() -> bool:
    """Return whether a descriptor travels through an abstract unix socket, as ranks send theirs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(1)
        listener.settimeout(0.5)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(0.5)
                socket.send_fds(sender, [b"x"], [listener.fileno()])
                _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1)
    for descriptor in descriptors:
        os.close(descriptor)
    return len(descriptors) == 1
