"""``nvshmem.core`` and ``nvshmem.bindings.nvshmem`` on a CPU: host functions on simulated streams."""

import enum

import interlace
from interlace_verify.shims import cuda_driver, nvshmem, symmetric
from interlace_verify.shims.triton_dist import cudart, missing
from interlace_verify.shims.triton_dist.utils import peers_tensor as get_peer_tensor

__all__ = ["get_peer_tensor"]
__getattr__ = missing.of("nvshmem")


class Teams(enum.IntEnum):
    TEAM_WORLD = 0
    TEAM_SHARED = 1
    TEAM_NODE = 2


class SignalOp(enum.IntEnum):
    SIGNAL_SET = 9
    SIGNAL_ADD = 10


my_pe, n_pes, team_n_pes = interlace.get_rank, interlace.get_world_size, nvshmem.team_size


def team_my_pe(team: int) -> int:
    nvshmem.team_size(team)
    return interlace.get_rank()


def finalize() -> None: ...


def putmem_on_stream(dest: int, source: int, bytes: int, pe: int, stream: object) -> None:
    """Copy to rank ``pe`` after all earlier work of the stream."""
    cudart.cudaMemcpyAsync(
        symmetric.address_at(int(dest), pe),
        source,
        bytes,
        cudart.cudaMemcpyKind.cudaMemcpyDefault,
        stream,
    )


def putmem_signal_on_stream(
    dest: int,
    source: int,
    bytes: int,
    sig_addr: int,
    signal: int,
    sig_op: int,
    pe: int,
    stream: object,
) -> None:
    if sig_op != SignalOp.SIGNAL_SET:
        raise NotImplementedError(f"sig_op must be SIGNAL_SET (9) here, got {sig_op}")
    putmem_on_stream(dest, source, bytes, pe, stream)
    cuda_driver.cuStreamWriteValue64(stream, symmetric.address_at(int(sig_addr), pe), signal, 0)
