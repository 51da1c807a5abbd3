"""User code that was written for one process and one GPU per rank: its streams and its modules.

Normally a user's torch code runs at once, in the user task. Here it behaves as with a GPU: its computations
and launches go to the current stream of its rank, one of ``SimStream``'s queues, and the host goes on. Each
stream has its order; the scheduler interleaves streams with each other and with the host. The race detector
orders an item after the host's work before it was enqueued, after the earlier items, and after the events
that its stream waited for; after nothing else. An op that only makes a view runs at once, and ``copy_``
copies in pieces. Any other op is an item, whose results have the shapes and strides that meta tensors get.
An op without such a shape, as ``item()``, runs when the stream has reached it: the host waits.

Globals of modules are per rank (:class:`RankGlobals`): one module in this process stands for one module in
each process of a job. A rank that continues finds its modules' names as it has left them, and so the
dictionaries, lists and sets that they hold. A rank begins with their state before the run, and after the
run they have this state again.

Only contents are exchanged: a dictionary stays the same object, for all who refer to it. The search covers
module globals, attributes of classes and of objects whose class belongs to one of the modules, defaults and
attributes of functions, and everything in these. The results of ``functools.cache`` cannot be reached, so
each rank gets new copies of such functions, and new locks. The search does not cover variables of closures,
nor modules imported during a run.
"""

import contextvars
import functools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.runtime.compat.torch_modes import DispatchMode, called_directly
from interlace.runtime.compat.triton_interpreter import triton_interpreter
from interlace.runtime.places.sim.place import SimPlace, SimStream, SimWorld

_CACHED = type(functools.lru_cache(lambda: None))
_OF_PROCESSES: dict[object, Any] = {
    type(make()): make for make in (threading.Lock, threading.RLock, threading.local)
}
_CONTAINERS = (dict, list, set, deque)


class RankGlobals:
    """The contents of the objects in ``modules`` and of ``more``, by rank; the caller's under None."""

    def __init__(self, modules: Sequence[ModuleType], more: Sequence[object] = ()) -> None:
        self._cells = _find_objects(modules, more)
        self._kept: dict[int | None, list[object]] = {}
        self._rank: int | None = None

    def turn_to(self, rank: int | None) -> None:
        if rank == self._rank or not self._cells:
            return
        self._kept[self._rank] = [_content(cell) for cell in self._cells]
        self._rank = rank
        if rank not in self._kept:
            self._kept[rank] = _anew(self._kept[None])
        for cell, content in zip(self._cells, self._kept[rank], strict=True):
            _put(cell, content)


def _find_objects(modules: Sequence[ModuleType], more: Sequence[object]) -> list[object]:
    names = {module.__name__ for module in modules}
    cells: dict[int, object] = {id(sys.modules): None}  # all ranks share it
    waiting: list[object] = [*more, *modules]
    while waiting:
        each = waiting.pop()
        if id(each) in cells:
            continue
        kind = each if isinstance(each, (type, FunctionType)) else type(each)
        is_users = (each.__name__ if isinstance(each, ModuleType) else kind.__module__) in names
        if isinstance(each, FunctionType) and is_users:
            waiting += [each.__defaults__, each.__kwdefaults__, vars(each)]
        elif isinstance(each, tuple):
            waiting += each
        elif isinstance(each, _CONTAINERS) or (isinstance(each, (type, ModuleType)) and is_users):
            cells[id(each)] = each
            content = _content(each)
            waiting += content.values() if isinstance(content, dict) else content
        elif is_users and hasattr(each, "__dict__"):
            waiting.append(vars(each))
    return [cell for cell in cells.values() if cell is not None]


def _content(cell: Any) -> Any:
    if isinstance(cell, (type, ModuleType)):
        return {name: value for name, value in vars(cell).items() if not name.startswith("__")}
    return dict(cell) if isinstance(cell, dict) else list(cell)


def _put(cell: Any, content: Any) -> None:
    if isinstance(cell, (type, ModuleType)):
        now = _content(cell)
        for name in now.keys() - content.keys():
            if vars(triton_interpreter).get(name) is not now[name]:  # kernels put this name there
                delattr(cell, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                setattr(cell, name, value)
        return
    cell.clear()
    (cell.update if isinstance(cell, (dict, set)) else cell.extend)(content)


def _anew(contents: list[Any]) -> list[Any]:
    """Return contents for a rank that begins, with new, empty copies of ``functools.cache`` functions.

    Locks are new as well. Ranks share a thread, so a rank that yields while it holds one would block all.
    """

    @functools.cache
    def forgetful(cached: Any) -> Any:
        if type(cached) in _OF_PROCESSES:
            return _OF_PROCESSES[type(cached)]()
        options = cached.cache_parameters()
        return functools.update_wrapper(
            functools.lru_cache(**options)(cached.__wrapped__), cached.__wrapped__
        )

    def change(value: object) -> Any:
        return forgetful(value) if type(value) in (_CACHED, *_OF_PROCESSES) else value

    return [
        {name: change(value) for name, value in content.items()}
        if isinstance(content, dict)
        else list(content)
        for content in contents
    ]


_current: contextvars.ContextVar["UserStream | None"] = contextvars.ContextVar(
    "interlace_user_stream", default=None
)
_C: Any = torch._C
_WITHOUT_DATA = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
_WAITING = ("c10d", "_c10d_functional")  # their ops handle streams, by the place's events


@dataclass(frozen=True)
class UserCode:
    """How ranks run such code: ``modules`` whose globals are per rank, and other ``state``. ``contexts``
    returns contexts around the run, given its streams; each rank calls ``begin`` before its code."""

    modules: Callable[[], Sequence[ModuleType]]
    state: Callable[[], Sequence[object]]
    contexts: Callable[["UserStreams"], Sequence[AbstractContextManager[object]]]
    begin: Callable[[SimPlace], None]


class UserStream(SimStream):
    """A stream of user code. An item runs after the host's work before it was enqueued."""

    number = 0

    @property
    def rank(self) -> int:
        return self._place.global_rank

    @property
    def busy(self) -> bool:
        return self._busy

    def _enqueue(
        self, label: str, item: Callable[[], object], copied_to: torch.Tensor | None = None
    ) -> None:
        host = self._place.host_point()

        def after_host() -> None:
            self._observer.on_wait_event(self._scheduler.current, host)
            item()

        super()._enqueue(label, after_host, copied_to)

    def wait_value(self, word: torch.Tensor, until: Callable[[int], bool], value: int) -> None:
        """Hold the stream until ``until`` accepts the one element of ``word``; acquires."""

        def item() -> None:
            seen = word.numpy()
            if not until(int(seen[0])):
                memory, address = self._scheduler.memory, word.data_ptr()
                memory.of_number(address, self.rank)  # this may find its tensor
                awaited = f"a value at {memory.name(address)}"
                self._block(lambda: until(int(seen[0])), awaited, lambda: (int(seen[0]), value))
            self._observer.on_signals_seen(self._scheduler.current, word)

        self._enqueue(f"wait for the value {value}", item)

    def synchronize(self) -> None:
        """Block the host until all enqueued items have ended."""
        self.record().synchronize()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the caller enqueue on this stream within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def make_current(self) -> None:
        _current.set(self)


class UserStreams:
    """The streams of all ranks of a run; each rank's first stream is the default one."""

    def __init__(self, world: SimWorld) -> None:
        self._scheduler = world.scheduler
        self.kept: list[object] = []  # freed when the run ends
        self._used: defaultdict[int, list[object]] = defaultdict(list)
        self._of_rank: defaultdict[int, list[UserStream]] = defaultdict(list)

    def add(self, place: SimPlace) -> UserStream:
        streams = self._of_rank[place.global_rank]
        stream = UserStream(place, str(len(streams)))
        stream.number = len(streams)
        streams.append(stream)
        return stream

    def keep(self, stream: UserStream, tensors: object) -> None:
        """Keep the memory of ``tensors`` while a stream of the rank may still use it."""
        rank = stream.rank
        if not any(each.busy for each in self._of_rank[rank]):
            self._used[rank].clear()
        self._used[rank].append(tensors)

    def mine(self) -> list[UserStream]:
        """Return the streams of the rank whose user code is running; none outside of user code."""
        scheduler = self._scheduler
        task = scheduler.current if scheduler.inside else None
        if task is None or task.program is not None or task.owner is not None:
            return []
        return self._of_rank[task.rank]

    def current(self) -> UserStream | None:
        """Return the stream on which running user code enqueues; None outside of user code."""
        streams = self.mine()
        return (_current.get() or streams[0]) if streams else None


@contextmanager
def enclosing_run(chosen: UserCode, world: SimWorld) -> Iterator[Callable[[SimPlace], None]]:
    """Enclose a run; yield the function that each rank calls before its code. For ``place.AROUND``."""
    streams = world.user_streams = UserStreams(world)
    world.scheduler.rank_states.append(RankGlobals(chosen.modules(), chosen.state()))
    world.scheduler.user_stream = streams.current

    def begin(place: SimPlace) -> None:
        streams.add(place)
        chosen.begin(place)

    with ExitStack() as stack:
        stack.enter_context(called_directly(lambda: streams.current() is not None))
        stack.enter_context(Asynchronous(streams))
        for context in chosen.contexts(streams):
            stack.enter_context(context)
        yield begin


class Asynchronous(DispatchMode):
    """Puts the work of torch operators in user code on the current stream."""

    def __init__(self, streams: UserStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._streams.current()
        if stream is None or func.namespace in _WAITING:
            return func(*args, **kwargs)
        result = self._enqueue_op(stream, func, args, kwargs)
        self._streams.keep(stream, result)
        return result

    def _enqueue_op(self, stream: UserStream, func: OpOverload, args: Any, kwargs: Any) -> Any:
        if _touches_nothing(func):
            if not _is_composite(func):
                return func(*args, **kwargs)
            with self:  # such as a reshape within another library's op: it may copy
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if keys := _users(func):
            with self:  # the ops that it calls go to the stream
                return func.redispatch(keys, *args, **kwargs)
        if func.namespace != "aten":  # it cannot be run, and its error says why
            return func(*args, **kwargs)
        strided = func is torch.ops.aten.copy_.default and args[1].layout == torch.strided
        if strided and args[0].layout == torch.strided:
            stream.copy(args[0].data, args[1].data.expand_as(args[0]), name)
            return args[0]
        if written := _written(func):
            if torch.Tag.nondeterministic_seeded in func.tags:  # the host draws numbers, in order
                func(drawn := torch.empty_like(args[0]), *args[1:], **kwargs)
                func, args, kwargs = torch.ops.aten.copy_.default, (args[0], drawn), {}
            stream.call(partial(_run, func, args, kwargs), name)
            return _chosen(func, written, args, kwargs)
        results = _allocate_results(func, args, kwargs)
        if results is None:
            stream.synchronize()
            return func(*args, **kwargs)
        outputs, source = results
        stream.call(partial(_fill, outputs, source or partial(func, *args, **kwargs)), name)
        return outputs


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with _C._AutoDispatchBelowADInplaceOrView():  # the host has already run autograd
        return func(*args, **kwargs)


def _fill(outputs: object, source: Callable[[], object]) -> None:
    with _C._AutoDispatchBelowADInplaceOrView():
        for output, result in zip(tree_leaves(outputs), tree_leaves(source()), strict=True):
            if isinstance(output, torch.Tensor):
                output.data.copy_(result)


@cache
def _is_composite(func: Any) -> bool:
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


@cache
def _users(func: Any) -> Any:
    """Return the dispatch key of another library's op; None for torch's ops."""
    for key in ("CPU", "CUDA") if func.namespace != "aten" else ():
        if _C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
            return _C.DispatchKeySet(getattr(_C.DispatchKey, key))
    return None


@cache
def _touches_nothing(func: OpOverload) -> bool:
    """Return whether the op only makes views or undefined memory, or only changes shapes."""
    aliases = [value.alias_info for value in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    name = func.overloadpacket.__name__
    return bool(views or torch.Tag.inplace_view in func.tags or name in _WITHOUT_DATA)


@cache
def _written(func: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that the op writes, if it returns nothing else."""
    schema = func._schema
    names = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    sets = [value.alias_info and frozenset(value.alias_info.before_set) for value in schema.returns]
    return tuple(names.values()) if all(each in names for each in sets) else ()


def _chosen(func: OpOverload, written: tuple[str, ...], args: Sequence[object], kwargs: Any) -> Any:
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    found = [arguments[name] for name in written]
    if not func._schema.returns:
        return None
    return found[0] if len(func._schema.returns) == 1 else tuple(found)


def _allocate_results(
    func: Any, args: Any, kwargs: Any
) -> tuple[Any, Callable[[], Any] | None] | None:
    """Return the op's results, allocated, and their source if it is not the op; None if it has to run."""
    tags, operands = (
        func.tags,
        [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)],
    )
    writes = any(a.alias_info is not None for a in func._schema.arguments)
    if writes or any(t.layout != torch.strided for t in operands):
        return None
    if not operands or torch.Tag.nondeterministic_seeded in tags:
        now = func(*args, **kwargs)  # a constant, or numbers that the host draws
        return tree_map_only(torch.Tensor, torch.empty_like, now), lambda: now
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return None
    try:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        on_meta = tree_map_only(torch.Tensor, partial(_strided_as, device="meta"), args)
        shapes = func(*on_meta, **kwargs)
    except Exception:  # the op's own error is better
        return None
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(shapes)):
        return None
    return tree_map_only(torch.Tensor, _strided_as, shapes), None


def _strided_as(model: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    shape, strides = model.shape, model.stride()
    return torch.empty_strided(shape, strides, dtype=model.dtype, device=device)
