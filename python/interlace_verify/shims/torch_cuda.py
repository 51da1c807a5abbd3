"""``torch.cuda`` on a CPU, for code that was written for a GPU per rank: streams, events, devices.

A rank's GPU is ``cuda:rank``, an sm_90. It has one SM for each program that may wait for others here, so
only a few. Its tensors are made on the CPU. In checked files their ``device`` and ``is_cuda`` have the
values of a GPU tensor. Streams come from ``runtime/places/sim/user_code.py``. There is no clock: the time
between events raises NotImplementedError. Outside a run there is no GPU, but its properties can be read
there, because files read them when they are imported.
"""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from interlace.groups import groups
from interlace.runtime.compat.triton_launcher import PROGRAMS
from interlace.runtime.core.stream import Event as Point
from interlace.runtime.places.sim.user_code import UserStream, UserStreams

MOST_QUERIES = 100
_OURS = ("interlace.", "interlace_verify.", "torch.", "triton.", "numpy")
_SITE = {torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__}  # type: ignore[attr-defined]
# functions by name, as a run replaces some of them
_READ_BY_HOST = {"tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"}
_Tensor: Any = torch.Tensor


def run_streams() -> UserStreams:
    """Return the run's streams. Outside a run raise RuntimeError, as torch does without a GPU."""
    try:
        found = groups.default_group().place.world.user_streams  # type: ignore[attr-defined]
    except Exception as error:
        raise RuntimeError("a GPU exists only on the ranks of a check") from error
    assert isinstance(found, UserStreams)
    return found


def _current() -> UserStream:
    stream = run_streams().current()
    if stream is None:
        raise RuntimeError(
            "only a rank's own code has streams, not a kernel or an item of a stream"
        )
    return stream


class RankStream:
    def __init__(self, device: object = None, priority: int = 0, **known: UserStream) -> None:
        self.device, self.priority = torch.device("cuda", current_device()), priority
        self.of_run = known.get("of_run") or run_streams().add(_place())
        self.stream_id = self.of_run.number
        self.cuda_stream = self.of_run.number  # 0 is the default stream, as in CUDA
        self._entered: list[Any] = []

    def wait_stream(self, stream: "RankStream") -> None:
        """Order later work of this stream after the present work of ``stream``."""
        self.of_run.wait_event(stream.of_run.record())

    def wait_event(self, event: "RankEvent") -> None:
        event.wait(self)

    def record_event(self, event: "RankEvent | None" = None) -> "RankEvent":
        event = RankEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.of_run.synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def __enter__(self) -> "RankStream":
        within = self.of_run.current()
        within.__enter__()
        self._entered.append(within)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankStream) and self.of_run is other.of_run

    def __hash__(self) -> int:
        return hash(self.of_run)


class RankEvent:
    """A point in a stream: the last one that was recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._point: Point | None = None
        self._asked = 0

    def record(self, stream: RankStream | None = None) -> None:
        self._asked = 0
        self._point = (_current() if stream is None else stream.of_run).record()

    def wait(self, stream: RankStream | None = None) -> None:
        if self._point is not None:  # in CUDA an event that was never recorded is complete
            (_current() if stream is None else stream.of_run).wait_event(self._point)

    def synchronize(self) -> None:
        if self._point is not None:
            self._point.synchronize()

    def query(self) -> bool:
        """Return whether it is reached. A polling loop lets other tasks run, and in the end waits."""
        if self._point is None or self._point.is_completed():
            return True
        self._asked += 1
        if self._asked > MOST_QUERIES:
            self._point.synchronize()
        _place().world.scheduler.pause()
        return self._point.is_completed()

    def elapsed_time(self, end: "RankEvent") -> float:
        raise NotImplementedError("a check has no clock, so there is no time between two events")


def _place() -> Any:
    return groups.default_group().place


def current_stream(device: object = None) -> RankStream:
    return RankStream(of_run=_current())


def default_stream(device: object = None) -> RankStream:
    return RankStream(of_run=run_streams().mine()[0])


def set_stream(stream: RankStream) -> None:
    stream.of_run.make_current()


def stream(stream: RankStream | None) -> Any:
    """Make ``stream`` the current one in this context. None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: object = None) -> None:
    for each in run_streams().mine():
        each.synchronize()


def is_available() -> bool:
    with contextlib.suppress(RuntimeError):
        return bool(run_streams().mine())
    return False


def device_count() -> int:
    return groups.get_world_size() if is_available() else 0


def current_device() -> int:
    return int(_place().global_rank)


def _in_a_run() -> bool:
    try:
        return bool(_place())
    except RuntimeError:
        return False


def get_device_capability(device: object = None) -> tuple[int, int]:
    return divmod((_in_a_run() and _place().world.scheduler.compiled_for) or 90, 10)


def get_device_properties(device: object = None) -> Any:
    """Return an H100's properties, except for the number of SMs: the number of programs that may wait."""
    major, minor = get_device_capability()
    return SimpleNamespace(
        name=get_device_name(),
        major=major,
        minor=minor,
        multi_processor_count=_place().program_limit if _in_a_run() else PROGRAMS,
        total_memory=80 << 30,
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )


def get_device_name(device: object = None) -> str:
    return "simulated sm_{}{}".format(*get_device_capability())


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, as this has no meaning here."""


class RankDevice(contextlib.nullcontext[None]):
    def __init__(self, device: object = None) -> None:
        super().__init__()


class MemoryPool:
    id = (0, 0)

    def __init__(self, *args: object, **kwargs: object) -> None: ...


REPLACED: dict[str, object] = {
    "Stream": RankStream,
    "Event": RankEvent,
    "device": RankDevice,
    **{
        each.__name__: each
        for each in (
            *(current_stream, default_stream, set_stream, stream, synchronize),
            *(is_available, device_count, current_device),
            *(get_device_capability, get_device_properties, get_device_name),
        )
    },
    **dict.fromkeys(
        ("_sleep", "set_device", "empty_cache", "init", "_lazy_init", "reset_peak_memory_stats"),
        _nothing,
    ),
    "use_mem_pool": lambda *args, **kwargs: contextlib.nullcontext(),
    "device_of": RankDevice,
    **dict.fromkeys(
        (f"{most}memory_{what}" for most in ("", "max_") for what in ("allocated", "reserved")),
        lambda device=None: 0,
    ),
    "MemPool": MemoryPool,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": is_available,
    "is_bf16_supported": lambda *args, **kwargs: True,
}
"""Names of ``torch.cuda`` and their replacements."""


NVTX = dict.fromkeys(("mark", "range_push", "range_pop", "range_start", "range_end"), _nothing)


class OnOneCpu(TorchFunctionMode):
    """Makes GPU tensors on the CPU, and reports the properties of GPU tensors for them.

    Before the host reads from a tensor, it waits for the work of its current stream.
    """

    def __init__(self, streams: UserStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _SITE:
            is_users = bool(self._streams.mine()) and not _asked_by_us()
            where = torch.device("cuda", current_device()) if is_users else torch.device("cpu")
            return is_users if func == _Tensor.is_cuda.__get__ else where
        if func in (_Tensor.cuda, _Tensor.pin_memory):
            return args[0]
        if func is _Tensor.record_stream:
            return None
        if func is _Tensor.cpu:
            func, args = torch.clone, args[:1]
        if getattr(func, "__name__", "") in _READ_BY_HOST:
            current = self._streams.current()
            if current is not None:
                current.synchronize()
            return func(*args, **kwargs)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs
            kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        return func(*map(_on_cpu, args), **kwargs)


def _asked_by_us() -> bool:
    """Return whether the mode was called by the simulator or a library, which get the real device."""
    caller = sys._getframe(2)
    return str(caller.f_globals.get("__name__", "")).startswith(_OURS)


def _on_cpu(value: object) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value
