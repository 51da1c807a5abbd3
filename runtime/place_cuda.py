"""The place ``cuda`` with virtual ranks: several ranks of one process share one GPU.

Symmetric memory is one plain allocation per rank; all of them are in one address space, so the kernels
run as they would between GPUs, publishing and waiting included. Every rank has its own streams.

What keeps it from blocking:

- persistent grids share the SMs, so the kernels of all ranks are resident together (``program_limit``);
- the launches of one op happen together: ranks first allocate and compile, then meet, then launch, then
  meet again. No rank does anything that might synchronize the device (an allocation, a module load)
  while a kernel of another rank polls for a launch that is still to come;
- every stream gets a hardware queue of its own (``CUDA_DEVICE_MAX_CONNECTIONS``, up to 32).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from interlace.kernels import signal
from interlace.runtime.errors import (
    CollectiveTimeoutError,
    InterlaceError,
    PlaceUnavailableError,
)
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import SymmetricBuffer, Workspace
from interlace.runtime.place import Place
from interlace.runtime.stream import Event, Stream
from interlace.runtime.virtual_ranks import Turns, run_threads

POLLS_PER_SECOND = 1_000_000
SCRATCH_BYTES = 1 << 20


class CudaEvent(Event):
    """A CUDA event; ``recorded`` turns true when its stream item has been submitted."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.recorded = False

    def is_completed(self) -> bool:
        return self.recorded and bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream(Stream):
    """A ``torch.cuda.Stream``. Items go to the place, which submits them when all ranks are ready."""

    def __init__(self, place: CudaPlace, stream: torch.cuda.Stream) -> None:
        self._place = place
        self._stream = stream

    def _submit(self, run: Callable[[], Any], prepare: Callable[[], None] | None = None) -> None:
        def on_stream() -> None:
            with torch.cuda.stream(self._stream):
                run()

        self._place.submit_item(on_stream, prepare)

    def _keep(self, *tensors: Any) -> None:
        """Tell the caching allocator that this stream uses memory of another one."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(self._stream)

    def launch(self, launch: KernelLaunch) -> None:
        def prepare() -> None:
            launch.compile_only()
            with torch.cuda.stream(self._stream):
                # descriptors take scratch memory at launch; have it cached before anyone polls
                torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._place.device)

        def run() -> None:
            launch.compiled()
            self._keep(*launch.arguments.values())

        self._submit(run, prepare)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        def run() -> None:
            destination.copy_(source, non_blocking=True)
            self._keep(destination, source)

        self._submit(run)

    def call(self, function: Callable[[], Any], label: str) -> None:
        self._submit(function)

    def _signal(self, kernel: Any, workspace: Workspace, **arguments: int) -> None:
        self.launch(
            KernelLaunch(
                kernel,
                1,
                {"peers_ptr": workspace.buffer.peers, "rank": workspace.rank, **arguments},
                workspace.op,
                num_warps=1,
            )
        )

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        self._signal(
            signal.publish_kernel, workspace, peer=peer, slot_byte=workspace.slot_byte(slot)
        )

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        self._signal(
            signal.wait_kernel,
            workspace,
            world_size=workspace.world_size,
            source=source,
            slot_byte=workspace.slot_byte(slot),
        )

    def wait_credits(self, workspace: Workspace) -> None:
        self._signal(signal.wait_credits_kernel, workspace, world_size=workspace.world_size)

    def finish(self, workspace: Workspace) -> None:
        self._signal(signal.finish_kernel, workspace, world_size=workspace.world_size)

    def record(self) -> Event:
        event = CudaEvent()

        def run() -> None:
            event.event.record(self._stream)
            event.recorded = True

        self._submit(run)
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._submit(lambda: self._stream.wait_event(event.event))


class CudaPlace(Place):
    """One virtual rank of one group. ``members`` are ranks of the run, in group order."""

    name = "cuda"
    interpreted = False
    direct_access = False

    def __init__(
        self,
        turns: Turns,
        members: tuple[int, ...],
        rank: int,
        key: Any,
        virtual_ranks: int,
        poll_seconds: float,
    ) -> None:
        self.rank = rank
        self.world_size = len(members)
        self.device = current_device()
        self._turns = turns
        self._members = members
        self._key = key
        self._virtual_ranks = virtual_ranks
        self._poll_seconds = poll_seconds
        self._meetings = 0
        self._deferred: list[tuple[Callable[[], Any], Callable[[], None] | None]] | None = None
        self._buffers: list[SymmetricBuffer] = []

    # -- meeting the other ranks ---------------------------------------------------------------

    def _meet(self, bring: Any, doing: str) -> list[Any]:
        number, self._meetings = self._meetings, self._meetings + 1
        answers = self._turns.meet((self._key, number), self.rank, self.world_size, bring, doing)
        self._turns.forget((self._key, number - 2))
        return answers

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return self._meet(payload, doing)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream().synchronize()  # peers may write as soon as they know the address
        peer_bytes = self._meet(mine, "an allocation of symmetric memory")
        addresses = torch.tensor([part.data_ptr() for part in peer_bytes], dtype=torch.int64)
        buffer = SymmetricBuffer(self.rank, nbytes, addresses.to(self.device), peer_bytes)
        self._buffers.append(buffer)
        return buffer

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        members = tuple(self._members[rank] for rank in ranks)
        return CudaPlace(
            self._turns,
            members,
            ranks.index(self.rank),
            (self._key, members, generation),
            self._virtual_ranks,
            self._poll_seconds,
        )

    # -- streams -------------------------------------------------------------------------------

    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        return CudaStream(self, torch.cuda.Stream(self.device, priority=-1 if priority else 0))

    def record_current(self) -> Event:
        event = CudaEvent()
        event.event.record()
        event.recorded = True
        return event

    def hold_current(self, event: Event, waiting_for: str) -> None:
        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream().wait_event(event.event)

    def submit_item(self, run: Callable[[], Any], prepare: Callable[[], None] | None) -> None:
        """Run a stream item now, or with the rest of its op."""
        if self._deferred is not None:
            self._deferred.append((run, prepare))
            return
        if prepare is not None:
            prepare()
        run()

    @contextmanager
    def launching(self) -> Iterator[None]:
        self._deferred = []
        try:
            yield
            items = self._deferred
        finally:
            self._deferred = None
        for _, prepare in items:
            if prepare is not None:
                prepare()
        self._meet(None, "the launch of an op")
        for run, _ in items:
            run()
        self._meet(None, "the launch of an op")

    def program_limit(self) -> int:
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return max(2, sms // self._virtual_ranks - 1)

    def poll_limit(self) -> int:
        return int(self._poll_seconds * POLLS_PER_SECOND)

    def check(self) -> None:
        if self._turns.failed is not None:
            raise InterlaceError(f"rank {self.rank}: the group has failed: {self._turns.failed}")

    def abort(self, reason: str) -> None:
        self._turns.fail(reason)
        for buffer in self._buffers:
            for rank in range(self.world_size):
                header = buffer.view(rank, 0, (signal.HEADER_WORDS,), torch.int64)
                header[signal.ABORT_WORD] = 1

    def give_up_report(self) -> CollectiveTimeoutError | None:
        """What a wait on this rank has written down when it gave up. Synchronizes the device."""
        for buffer in self._buffers:
            header = buffer.view(self.rank, 0, (signal.HEADER_WORDS,), torch.int64).cpu()
            error = signal_report(self.rank, header.tolist())
            if error is not None:
                return error
        return None

    def close(self) -> None:
        self._buffers.clear()


def signal_report(rank: int, header: list[int]) -> CollectiveTimeoutError | None:
    """The error that the status record in a channel's header describes, if there is one."""
    first = signal.CLAIMED_WORD
    claimed, source, slot, expected, seen, program = header[first : first + 6]
    if not claimed or not expected:
        return None
    return CollectiveTimeoutError(
        f"rank {rank}: program {program} gave up waiting for rank {source}: slot at byte {slot} "
        f"was {seen}, expected {expected}",
        (source,),
    )


def run_virtual_ranks(
    host: Callable[[Place], Any], world_size: int, *, timeout: float
) -> list[Any]:
    """Run ``host(place)`` on ``world_size`` virtual ranks of the current GPU; results by rank."""
    if not torch.cuda.is_available():
        raise PlaceUnavailableError(
            'place "cuda" needs a CUDA device, and torch sees none; use place="sim" or "shm"'
        )
    # read when the CUDA context is made; ranks beyond it would share queues and could block
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import triton

    if triton.knobs.runtime.interpret:
        raise PlaceUnavailableError(
            'place "cuda" compiles kernels, but TRITON_INTERPRET is set; start without it'
        )
    device = torch.cuda.current_device()
    turns = Turns(world_size, timeout)
    members = tuple(range(world_size))
    places: list[CudaPlace] = []

    def main(rank: int) -> Any:
        torch.cuda.set_device(device)
        triton.set_allocator(_scratch)  # a context variable, so once per thread
        place = CudaPlace(turns, members, rank, "world", world_size, min(timeout, 20.0))
        places.append(place)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            result = host(place)
            place.exchange(b"", "the end of the run")
            torch.cuda.synchronize()
        error = place.give_up_report()
        if error is not None:
            raise error
        return result

    with _failing(places):
        return run_threads(main, world_size, turns)


def current_device() -> torch.device:
    """The GPU that all virtual ranks share."""
    return torch.device("cuda", torch.cuda.current_device())


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device=current_device())


@contextmanager
def _failing(places: list[CudaPlace]) -> Iterator[None]:
    """On an error, wake every kernel that still polls, and give the GPU back in order."""
    try:
        yield
    except BaseException:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for place in places:
                place.abort("the run failed")
        torch.cuda.synchronize()
        raise
