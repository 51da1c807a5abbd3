"""Hooks of a group: functions called before and after each of its ops, and when the group is aborted.

While a group has hooks, ``watching`` is set, and the communicator passes each op to :class:`OpHooks`, which
calls the op again between the hooks. Without hooks, an op only reads ``watching`` in addition.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from interlace.runtime.compat import torch_modes
from interlace.runtime.core.call import Call, Start
from interlace.runtime.core.context import OpRanges, profile_range
from interlace.runtime.core.errors import DifferentOpsError, InterlaceError, PlaceUnavailableError
from interlace.runtime.core.work import ZERO, Work

log = logging.getLogger("interlace")

# Arguments that an op fills and does not read, for all ops and for these; ops that read their outputs.
FILLED = [
    "output",
    "outputs",
    "output_tensor_list",
    "output_tensor_lists",
    "gather_list",
    "gathered",
    "received",
]
FILLED_BY = (("scatter", "tensor"), ("recv", "tensor"))
_NOTHING = contextlib.nullcontext()
IN_PLACE = ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast")


@dataclass(frozen=True, slots=True, eq=False)
class HookedOp:
    """One op of a group as its hooks see it. Raises AttributeError if a field is set.

    Attributes
    ----------
    op : its name, "all_reduce"; all messages are "send" and "recv".
    group : the group, ``interlace.Group``.
    sequence : its number on this rank, from 1, since the group has had hooks.
    inputs, outputs : the tensors, of any shape, that it reads and that it fills, by argument; ``name[i]``
        for a list. A tensor that is reduced in place is in both. A fused op's names are those in
        ``torch.ops.interlace``. In ``after`` also ``result``, the tensors that the op made.
    options : its other arguments, by name. A fused op's options include None if None was passed.
    seconds : in ``after``, its duration, until its end was noticed.
    error : in ``after``, the error of the op; otherwise None.

    >>> def on_rank():
    ...     with interlace.new_group().register_hook(lambda call: None) as handle:
    ...         return type(handle).__name__
    >>> interlace.run(on_rank, 1)
    ['RemovableHandle']
    """

    op: str
    group: Any
    sequence: int
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    seconds: float = 0.0
    error: BaseException | None = None


class Hook(NamedTuple):
    before: Callable[[HookedOp], object] | None
    after: Callable[[HookedOp], object] | None
    on_abort: Callable[[Any, BaseException], object] | None


class Form(NamedTuple):
    """An internal form: its name, its ``check``, ``fills`` (see ``internal_form``), names, and itself."""

    op: str
    check: Callable[..., object]
    fills: bool | None
    names: Sequence[str]
    call: Callable[..., Any]

    def named(self, tensors: Sequence[Any], options: Sequence[Any]) -> Iterator[tuple[str, object]]:
        """Yield its arguments by name, except absent ones; yield the fields of a record of arguments.

        The arguments of a fused op have names, and its options that are None are yielded as well.
        """
        names = self.names or [*inspect.signature(self.check).parameters][1:]
        options_from = len(tensors) if self.names else len(names)
        for number, (name, value) in enumerate(zip(names, (*tensors, *options), strict=False)):
            if is_dataclass(value):
                for field in fields(value):
                    argument = getattr(value, field.name)
                    if "Tensor" not in str(field.type) or not _is_absent(argument):
                        yield field.name, argument
            elif name and (number >= options_from or not _is_absent(value)):
                yield name, value


_all: weakref.WeakSet[OpHooks] = weakref.WeakSet()
_profiled = False


class OpHooks:
    """The hooks of one communicator, called in the order in which they were registered."""

    def __init__(self, communicator: Any, shared: OpHooks | None = None) -> None:
        """``shared``: hooks of another communicator, which this one uses as well."""
        self._of, self._count = weakref.ref(communicator), 0
        self._registered: OrderedDict[int, Hook] = shared._registered if shared else OrderedDict()
        self._over = self._within = False
        self.watching = False
        """Whether hooks see the next op."""
        self.naming = False
        """Whether the current op has ranges in a profile."""
        self._ranges: OpRanges | None = None  # ranges of the last op
        _all.add(self)
        if log.isEnabledFor(logging.DEBUG) and not shared:
            self.register(Hook(None, _log, None))
        elif self._registered or _profiled:
            self.watch()

    @property
    def _communicator(self) -> Any:
        return self._of()

    def register(self, hook: Hook) -> RemovableHandle:
        for name, function in hook._asdict().items():
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable or None, got {function!r}")
        if not any(hook):
            raise ValueError("before, after and on_abort are all None; pass at least one of them")
        handle = RemovableHandle(self._registered)
        self._registered[handle.id] = hook
        self.watch()
        return handle

    def watch(self) -> None:
        """See ops from the next one on, for as long as there are hooks or a profile."""
        self.watching = not self._within

    def named(self, op: str, start: Start) -> Start:
        """Return ``start``, the launch side of ``op``, with ranges in the current profile."""
        self._ranges = OpRanges(op)
        return functools.partial(self._ranges.around, start)

    # -- calls that the communicator passes on while ``watching`` --------------------------------

    def form(
        self, form: Form, tensors: Sequence[object], options: tuple[object, ...], async_op: bool
    ) -> Any:
        call = self._call(form.op, form.named(tensors, options))
        arguments = call.group, tensors, options, async_op
        return self._around(call, functools.partial(form.call, *arguments))

    def run(self, op: str, *arguments: object) -> Any:
        call = self._call(op, ())
        return self._around(call, lambda: call.group.run(op, *arguments))

    def transfer(self, call: Call, start: object, *given: object) -> Any:
        seen = self._call(call.op, zip(("tensor", "peer", "tag"), given, strict=True))
        return self._around(seen, lambda: seen.group.transfer(call, start, *given))

    def _call(self, op: str, named: Iterable[tuple[str, object]]) -> HookedOp:
        self._count += 1
        inputs, outputs, options = {}, {}, {}
        for name, value in named:
            tensors = dict(_tensors(name, value))
            if hasattr(value, "_asdict"):
                options.update(value._asdict())
            elif not tensors:
                options[name] = value
            filled = name in FILLED or (op, name) in FILLED_BY
            if not filled:
                inputs.update(tensors)
            if filled or op in IN_PLACE:
                outputs.update(tensors)
        if op == "broadcast" and not self._is_source(**options):
            inputs = {}
        views = [MappingProxyType(each) for each in (inputs, outputs, options)]
        return HookedOp(op, self._communicator, self._count, views[0], views[1], views[2])

    def _is_source(self, src: object = None, group_src: object = None, **_: object) -> bool:
        group = self._communicator
        return bool(group.rank == group_src if src is None else group.ranks[group.rank] == src)

    def _around(self, call: HookedOp, run: Callable[[], object]) -> Any:
        self.watching, self._within = False, True  # hooks do not see ops within ops
        self.naming = profiled = _profiled
        self._ranges = None
        hooks = list(self._registered.values())
        begun: list[Hook] = []  # ``after`` is called for each of these
        ended = functools.partial(self._ended, begun, call, time.perf_counter())
        try:
            whole = f"{call.op} on {_ranks_in_words(call.group.ranks)}"
            with profile_range(whole) if profiled else _NOTHING:
                try:
                    for hook in hooks:
                        (hook.before or _nothing)(call)
                        begun.append(hook)
                except Exception as error:
                    self._refuse(call, error)
                    ended(error)
                    raise
                try:
                    result = run()
                except Exception as error:
                    ended(error)
                    raise
            if isinstance(result, Work):
                ranges, self._ranges = self._ranges, None
                return WatchedWork(result, ended, ranges) if hooks or ranges else result
            ended(None, result)
            return result
        finally:
            self._within = self.naming = False
            if self._registered or _profiled:
                self.watch()

    def _refuse(self, call: HookedOp, error: Exception) -> None:
        """Refuse the op on the other ranks, because a hook has refused it. A message aborts the group."""
        message = "peer" in call.options
        self._communicator.refuse("" if message else call.op, error)
        if message:
            self._communicator.place.abort(f"{call.op} was refused by a hook: {error}")

    def _ended(
        self,
        hooks: Sequence[Hook],
        call: HookedOp,
        started: float,
        error: BaseException | None,
        result: object = None,
    ) -> None:
        seconds = time.perf_counter() - started
        outputs = MappingProxyType({**call.outputs, **dict(_tensors("result", result))})
        call = replace(call, outputs=outputs, seconds=seconds, error=error)
        if isinstance(error, (InterlaceError, DifferentOpsError)) and not (
            isinstance(error, PlaceUnavailableError) or self._communicator.closed
        ):
            self.over(error)
        for hook in hooks:
            (hook.after or _nothing)(call)

    def over(self, cause: BaseException) -> None:
        """Call ``on_abort`` of the hooks: ``cause`` aborted the group. Only the first call counts."""
        over, self._over = self._over, True
        for hook in [] if over else list(self._registered.values()):
            try:
                (hook.on_abort or _nothing)(self._communicator, cause)
            except Exception:  # the caller must see the cause
                log.exception("a hook on_abort failed")


class WatchedWork(Work):
    """The handle of an op that has hooks: ``ended`` is called once, when the op's end is noticed.

    ``ranges``, if it is profiled: repeated around the wait, as the profile may not record the op's thread.
    """

    def __init__(self, work: Work, ended: Callable[..., None], ranges: OpRanges | None) -> None:
        super().__init__(work._op, work._place, work._outcome, work._outputs)
        self._ended: Callable[..., None] | None = ended
        self._raised: Exception | None = None
        self._names = ranges.names if ranges else []
        self._once = threading.RLock()
        if self._outcome is not None:
            self._outcome.add_done_callback(lambda _: self._at_end())

    def _at_end(self, *, ordered: bool = False) -> None:
        """Call the hooks if the op has ended, or if their work is ``ordered`` after it on a GPU."""
        if self._outcome is None or self._ended is None:
            return
        if not ordered and not super().is_completed():
            return
        with self._once:
            if self._ended is not None:
                ended, self._ended = self._ended, None
                error = super().exception()
                try:
                    ended(error, None if error else self._outcome.result().result)
                except Exception as raised:
                    self._raised = raised

    def wait(self, timeout: timedelta | float | None = ZERO) -> Any:
        ordered, known = False, len(self._names)
        try:
            with contextlib.ExitStack() as stack:
                for name in self._names[known - 1 : known]:
                    stack.enter_context(profile_range(name))
                result = super().wait(timeout)
            for name in self._names[known:]:  # algorithms chosen during the wait
                with profile_range(name):
                    pass
            ordered = True
        finally:
            self._at_end(ordered=ordered)
            with self._once:  # wait until the hooks have ended, in any thread
                pass
        if self._raised is not None:
            raise self._raised
        return result

    def is_completed(self) -> bool:
        completed = super().is_completed()
        self._at_end()
        return completed

    def exception(self) -> BaseException | None:
        return super().exception() or self._raised


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif hasattr(value, "__dlpack__"):
        with contextlib.suppress(Exception):  # the op itself refuses the argument, if it is wrong
            yield name, from_dlpack(value)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each)


def _is_absent(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and not value)


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> _ranks_in_words(range(8)), _ranks_in_words((0, 2)), _ranks_in_words((5,))
    ('0-7', '0,2', '5')
    """
    if len(ranks) > 1 and list(ranks) == [*range(ranks[0], ranks[-1] + 1)]:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _nothing(*_: object) -> None:
    pass


def _log(call: HookedOp) -> None:
    shapes = [
        f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}"
        for name, each in {**call.inputs, **call.outputs}.items()
    ]
    end = f"{call.seconds:.6f} s" if call.error is None else f"{type(call.error).__name__}"
    facts = call.op, call.sequence, ", ".join(shapes) or "no tensors", end
    log.debug("rank %d of group %s: %s %d: %s: %s", call.group.rank, list(call.group.ranks), *facts)


def _profile(starts: bool) -> None:
    """Let the ops of all groups write their names into torch's profile, which has started or ended."""
    global _profiled
    _profiled = starts
    for hooks in list(_all):
        if starts:
            hooks.watch()


torch_modes.when_profiled(_profile)
