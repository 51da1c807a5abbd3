"""Triton's interpreter as a library: one patched session, exact arithmetic, and hooks.

Stock Triton patches its language for every call of every device function and runs the programs of a
grid one after another. Here a *session* patches once. Programs are plain callables that a scheduler may
run in any interleaving, and every memory access and atomic passes through the session's hooks. All of this
is done by instance attributes on ``triton.runtime.interpreter.interpreter_builder``, which are removed when
the session ends.

The builder is global to the process, so only one session exists at a time; a second thread waits.

The origin of a pointer is an attribute, ``origin``, of the type in its handle. Operations that compute with
pointers, shift, broadcast or reshape them keep the handle's type, and so the origin. An origin begins where
a tensor becomes an argument, and where one number becomes a pointer: there the hooks return the memory that
the number means. A block of numbers, such as the addresses of all ranks, has no origin; nor has a choice
between pointers of different origins. Their accesses are looked up one by one.
"""

import difflib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl

from interlace.runtime.compat.stand_ins import Replacement, replacing
from interlace.runtime.compat.triton_interpreter import (
    NO_POLICY,
    Autotuner,
    InterpretedFunction,
    JITFunction,
    KernelInterface,
    TensorHandle,
    atomics,
    bare,
    ir,
    triton_interpreter,
    unchecked_handle,
)
from interlace.runtime.compat.triton_launcher import unknown_options
from interlace.runtime.core.accesses import (
    Atomic,
    Handle,
    Hooks,
    Mask,
    Numbers,
    origin_of,
    with_origin,
)
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.laboratory import laboratory
from interlace.runtime.core.launch import checked_grid, constants, kind_of, leaves
from interlace.runtime.places.sim.interpreter.exact import exact_arithmetic
from interlace.runtime.places.sim.interpreter.shortcuts import arithmetic_shortcuts, call_shortcuts

Asked = Callable[[str, Any], object]
"""Maps (path of an argument, tensor) to its origin."""


def mark(path: str, argument: Any, stand_in: Any, ask: Asked) -> None:
    """Set the origins of pointers in ``stand_in``, which stands for the argument ``argument``."""
    if isinstance(argument, tuple):
        for index, (each, part) in enumerate(zip(argument, stand_in, strict=True)):
            name = getattr(argument, "_fields", range(len(argument)))[index]
            mark(f"{path}.{name}", each, part, ask)
    elif hasattr(argument, "block_shape"):  # a descriptor
        mark(path, argument.base, stand_in.handle.base, ask)
    elif hasattr(argument, "data_ptr"):
        handle = getattr(stand_in, "handle", stand_in)
        handle.dtype = with_origin(handle.dtype, ask(path, argument))


def overrides(builder: Any, hooks: Hooks) -> list[Replacement]:
    """Return replacements of builder methods that make pointers, or make one pointer of several."""
    stock_bitcast = builder.create_bitcast

    def create_bitcast(source: Handle, kind: object) -> TensorHandle:
        result = stock_bitcast(source, kind)
        if result.dtype.is_ptr():
            if source.dtype.is_ptr():
                origin = origin_of(source)
            else:
                origin = hooks.origin(int(result.data.item())) if result.data.size == 1 else None
            result.dtype = with_origin(result.dtype, origin)
        return result

    def merge_pointers(stock: Callable[..., Any], first: int) -> Callable[..., Any]:
        def merge(*handles: Handle) -> TensorHandle:
            result = stock(*handles)
            if result.dtype.is_ptr():
                one, other = map(origin_of, handles[first : first + 2])
                result.dtype = with_origin(result.dtype, one if one is other else None)
            return result

        return merge

    def create_int_to_ptr(source: Handle, kind: object) -> TensorHandle:
        # An argument below 2**31 is an int32, and some processes have memory there.
        wide = source.data.view(f"u{source.data.itemsize}").astype(np.uint64)
        return create_bitcast(TensorHandle(wide, tl.uint64), kind)

    return [
        (builder, "create_bitcast", create_bitcast),
        (builder, "create_int_to_ptr", create_int_to_ptr),
        (builder, "create_select", merge_pointers(builder.create_select, 1)),
        (builder, "create_cat", merge_pointers(builder.create_cat, 0)),
        (builder, "create_join", merge_pointers(builder.create_join, 0)),
    ]


ALIGNMENT = 16  # bytes


def checked_descriptor(stock: Callable[..., object]) -> Callable[..., Any]:
    """Return ``create_make_tensor_descriptor``, checked: ValueError for descriptors a GPU would refuse."""

    def make(base: Any, shape: object, strides: Any, *rest: object, **named: object) -> Any:
        size = base.dtype.element_ty.primitive_bitwidth // 8
        argument = getattr(origin_of(base), "argument", "")
        of = f"a tensor descriptor{f' of {argument}' if argument else ''}"
        address, steps = int(base.data.item()), [int(stride.data.item()) for stride in strides]
        if address % ALIGNMENT:
            raise ValueError(
                f"{of}: its base, address {address:#x}, is not a multiple of {ALIGNMENT} bytes"
            )
        for dim, step in enumerate(steps[:-1]):
            if step * size % ALIGNMENT:
                raise ValueError(
                    f"{of}: stride {dim} is {step} elements, {step * size} bytes, and not a multiple of "
                    f"{ALIGNMENT} bytes"
                )
        if steps[-1] != 1:
            raise ValueError(f"{of}: its last stride must be 1, got {steps[-1]}")
        return stock(base, shape, strides, *rest, **named)

    return make


def require_interpreter(kernel: object) -> None:
    """Raise unless ``kernel`` was decorated while Triton was in interpreter mode."""
    kind = InterpretedFunction
    if isinstance(kernel, kind) and isinstance(tl.zeros, kind):  # the language was loaded first
        return
    raise PlaceUnavailableError(
        "this place runs kernels in Triton's interpreter, but they were loaded for the compiler: "
        "set TRITON_INTERPRET=1 before Python starts. interlace sets it by itself when no CUDA device "
        "is visible and triton has not been imported yet; if triton was imported before interlace, "
        "import interlace first"
    )


def program_function(
    kernel: Any, arguments: dict[str, object], origin: Asked = lambda path, tensor: None
) -> Callable[[], None]:
    """Return one program of ``kernel`` (its id: the builder's grid index), made and run in a session."""
    require_interpreter(kernel)
    names = kernel.arg_names
    unknown = set(arguments) - set(names)
    assert not unknown, f"{kernel.__name__} has no argument {sorted(unknown)}"
    fixed = constants(kernel)
    converted = {
        name: value if name in fixed else triton_interpreter._implicit_cvt(value)
        for name, value in arguments.items()
    }
    for name in arguments.keys() - fixed:
        mark(name, arguments[name], converted[name], origin)
    body = kernel.rewrite()
    return lambda: body(**converted)


_session_lock = threading.RLock()


def is_open() -> bool:
    """Return whether a session exists; for the holder of the lock, whether this thread has one."""
    return "create_inline_asm" in vars(triton_interpreter.interpreter_builder)


@contextmanager
def session(hooks: Hooks, *, shortcuts: bool = True) -> Iterator[Any]:
    """Patch the language, yield the builder. Without ``shortcuts`` the builder sees every operation."""
    builder = triton_interpreter.interpreter_builder
    with _session_lock, ExitStack() as stack:
        if is_open():
            raise PlaceUnavailableError(
                "a kernel is already being interpreted in this thread: ranks of place 'sim' cannot "
                "start another interlace.run"
            )
        stack.enter_context(replacing(*_language()))
        nothing = SimpleNamespace(restore=lambda: None)
        changes: list[Replacement] = [
            # The language stays patched. Kernels that user code launches meanwhile must not patch and
            # restore it in another order.
            (triton_interpreter, "_patch_lang", lambda function: nothing),
            # without the stock re-patching (206 us against 16 us per call)
            (InterpretedFunction, "__call__", lambda jit, *a, **named: jit.rewrite()(*a, **named)),
            # for a block, for example in an assert; stock Triton's result is always True
            (tl.tensor, "__bool__", lambda tensor: bool(tensor.handle.data.all())),
            # triton 3.6 converts an array of one element in a way that numpy 2.4 refuses
            (tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.squeeze())),
            (triton_interpreter, "_get_np_dtype", _numpy_dtype),
            (triton_interpreter, "_implicit_cvt", _as_int1),
            *(
                (kind, "run", _replacement_of_run(hooks))
                for kind in (InterpretedFunction, JITFunction)
            ),
            # no configuration is timed, so the first remaining one is used
            (Autotuner, "do_bench", lambda *call, **how: (0.0,) * 3),
        ]
        shortcuts = shortcuts and not builder.options.debug
        if not builder.options.debug:
            # Triton checks every integer operation for overflow, then drops the result of the check.
            unchecked = replace(builder.options, sanitize_overflow=False)
            changes.append((builder, "options", unchecked))
        changes += [
            (triton_interpreter.interpreter_semantic, "device_assert", _device_assert),
            (tl, "multiple_of", functools.partial(_multiple_of, tl.multiple_of)),
            (builder, "create_assume", lambda condition: _check("assume", condition.data, "")),
        ]
        stack.enter_context(replacing(*exact_arithmetic(), *changes))
        if shortcuts:
            stack.enter_context(replacing(*arithmetic_shortcuts()))
        stack.enter_context(replacing(*_install_hooks(builder, hooks)))
        if shortcuts:
            stack.enter_context(replacing(*call_shortcuts(builder)))
        yield builder


def _as_int1(argument: object) -> tl.tensor:
    """Return a bool as int1; stock Triton makes it an int32."""
    if isinstance(argument, bool):
        return tl.tensor(TensorHandle(np.array([argument]), tl.int1), tl.int1)
    return _stock_converted(argument)


def _device_assert(condition: tl.tensor, message: object, mask: tl.tensor | None) -> None:
    """Check the condition always; Triton checks it only if it compiles with ``debug``."""
    holds = condition.handle.data.astype(np.bool_)
    _check("device_assert", holds if mask is None else holds | ~mask.handle.data, message)


def _multiple_of(stock: Callable[..., object], input: Any, values: object, **named: object) -> Any:
    """Check a block's first element: the statement is about where contiguous elements begin."""
    result = stock(input, values, **named)
    if isinstance(result, tl.tensor):
        first = int(result.handle.data.flat[0])
        for each in result.handle.attr["tt.divisibility"]:
            wrong = f"{first} is not a multiple of {each}"
            _check("multiple_of", np.bool_(first % each == 0), wrong)
    return result


def _check(condition: str, holds: Any, message: object) -> None:
    if not holds.all():
        problem = f"{condition} fails"
        if holds.size > 1:
            shape, first = "x".join(map(str, holds.shape)), np.argwhere(~holds)[0].tolist()
            problem += (
                f" for {(~holds).sum()} elements, the first {(*first,)} of a block of {shape}"
            )
        raise AssertionError(f"{problem}: {message}" if message else problem)


@functools.cache  # a search through the language takes as long as a small run
def _language() -> list[Replacement]:
    """Return Triton's replacements in its language for interpreted functions, found by making them."""
    modules = [tl, *(var for var in vars(tl).values() if inspect.ismodule(var))]
    kinds = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    before = [(each, dict(vars(each))) for each in (*modules, *kinds)]
    for function in (_uses_language, tl.zeros.fn):
        triton_interpreter._patch_lang(function)
    changed = [
        (each, name, value)
        for each, names in before
        for name, value in vars(each).items()
        if names.get(name) is not value and name != "__annotations__"  # created when read
    ]
    for each, names in before:
        for name in [name for place, name, _ in changed if place is each]:
            if name in names:
                setattr(each, name, names[name])
            else:
                delattr(each, name)
    return changed


def _uses_language() -> None:
    """Stand for a function that uses ``tl``: the patcher looks for it in a function's globals."""


_stock_converted = triton_interpreter._implicit_cvt
_stock_numpy_dtype = triton_interpreter._get_np_dtype
_numpy_dtypes: dict[str, object] = {}


def _numpy_dtype(dtype: tl.dtype) -> Any:
    """Look the type up by name; the stock function builds a table of all types at every call."""
    if isinstance(dtype, (tl.pointer_type, tl.block_type)):
        return _stock_numpy_dtype(dtype)
    found = _numpy_dtypes.get(dtype.name)
    if found is None:
        found = _numpy_dtypes[dtype.name] = _stock_numpy_dtype(dtype)
    return found


def _install_hooks(builder: Any, hooks: Hooks) -> list[Replacement]:
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

    def masked_load(pointers: Handle, mask: Handle, other: Any, *rest: Any, **named: object) -> Any:
        def perform(mask: Handle = mask) -> TensorHandle:
            if other is not None:
                return load(pointers, mask, other, *rest, **named)
            element = pointers.get_element_ty()
            kind = _numpy_dtype(element)
            zeros = np.zeros(pointers.data.shape, kind)
            return unchecked_handle(atomics.load(pointers.data, mask.data, zeros, kind), element)

        if named["is_volatile"] if named else rest[-1]:
            # PTX: "treated as a relaxed operation with system scope"
            return hooks.atomic(Atomic(pointers, mask, "load", "relaxed", "sys", True), perform)
        return hooks.load(pointers, mask, perform)

    def masked_store(pointers: Handle, value: Any, mask: Mask, *rest: Any, **named: object) -> Any:
        def perform(mask: Mask = mask) -> TensorHandle:
            return store(pointers, value, mask, *rest, **named)

        return hooks.store(pointers, value, mask, perform)

    def atomic_cas(pointers: Handle, compare: Any, value: Any, sem: object, scope: object) -> Any:
        reads_only = bool((compare.data == value.data).all())
        atomic = Atomic(pointers, None, "cas", _SEMS[sem], _SCOPES[scope], reads_only, compare)

        def perform(mask: Mask = None) -> TensorHandle:
            if mask is None:
                return cas(pointers, compare, value, sem, scope)
            return TensorHandle(np.zeros_like(value.data), value.dtype)

        return hooks.atomic(atomic, perform)

    def atomic_rmw(op: Any, pointers: Handle, value: Any, mask: Mask, sem: Any, scope: Any) -> Any:
        kind = _KINDS[op]
        reads_only = kind == "add" and not value.data.any()
        atomic = Atomic(pointers, mask, kind, _SEMS[sem], _SCOPES[scope], reads_only)

        def perform(mask: Mask = mask) -> TensorHandle:
            return rmw(op, pointers, value, mask, sem, scope)

        return hooks.atomic(atomic, perform)

    def atomic_load(pointers: Handle, mask: Mask, sem: object, scope: object) -> TensorHandle:
        atomic = Atomic(pointers, mask, "load", _SEMS[sem], _SCOPES[scope], True)

        def perform(mask: Mask = mask) -> TensorHandle:
            return load(pointers, mask, None, *NO_POLICY, True)

        return hooks.atomic(atomic, perform)

    def atomic_store(pointers: Handle, value: Any, mask: Mask, sem: object, scope: object) -> Any:
        return atomic_rmw(ir.ATOMIC_OP.XCHG, pointers, value, mask, sem, scope)

    def atomic_poll(pointers: Handle, expected: Any, timeout: Any, sem: Any, scope: object) -> Any:
        # Without the timeout, which uses a GPU's clock: a wait that cannot end is reported anyway.
        everywhere = TensorHandle(np.ones(1, np.bool_), tl.int1)
        values = np.broadcast_to(expected.data, pointers.data.shape)
        for address, value in zip(pointers.data.ravel(), values.ravel(), strict=True):
            one = TensorHandle(np.array([address]), pointers.dtype)
            while atomic_load(one, everywhere, sem, scope).data[0] != value:
                pass
        return TensorHandle(np.ones(pointers.data.shape, np.bool_), tl.int1)

    since_39 = [
        (builder, function.__name__.replace("atomic", "create_atomic"), function)
        for function in (atomic_load, atomic_store, atomic_poll)
    ]

    @functools.cache
    def inline_assembly() -> Any:
        return laboratory("ptx.inline_assembly").InlineAssembly(builder, hooks)

    def create_inline_asm(*given: object) -> Any:
        return inline_assembly().create(*given)

    return [
        *(each for each in since_39 if hasattr(builder, each[1])),
        *overrides(builder, hooks),
        (builder, _DESCRIPTOR, checked_descriptor(getattr(builder, _DESCRIPTOR))),
        (builder, "create_masked_load", masked_load),
        (builder, "create_masked_store", masked_store),
        (builder, "create_atomic_cas", atomic_cas),
        (builder, "create_atomic_rmw", atomic_rmw),
        (builder, "create_barrier", hooks.barrier),
        (builder, "create_inline_asm", create_inline_asm),
    ]


_DESCRIPTOR = "create_make_tensor_descriptor"
_SEMS = {
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_SCOPES = {
    ir.MEM_SYNC_SCOPE.CTA: "cta",
    ir.MEM_SYNC_SCOPE.GPU: "gpu",
    ir.MEM_SYNC_SCOPE.SYSTEM: "sys",
}
_KINDS = {
    getattr(ir.ATOMIC_OP, name): name.lstrip("FU").lower()  # "add" for FADD, "min" for UMIN
    for name in ["ADD", "FADD", "MIN", "UMIN", "MAX", "UMAX", "AND", "OR", "XOR", "XCHG"]
}


def _replacement_of_run(hooks: Hooks) -> Callable[..., None]:
    """Return a replacement of ``InterpretedFunction.run``, which runs one program after another."""

    def run(kernel: Any, *args: object, grid: Any, warmup: bool, **named: object) -> None:
        if warmup:
            return
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        keywords = {name: value for name, value in named.items() if name in kernel.arg_names}
        if unknown := unknown_options(options):
            known = [*kernel.arg_names, "num_warps", "num_stages"]
            near = difflib.get_close_matches(unknown[0], known)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(
                f"{unknown[0]!r} is neither a parameter of {kernel.__name__} nor an option of "
                f"a launch{meant}"
            )
        bound = inspect.signature(kernel.fn).bind(*args, **keywords)
        bound.apply_defaults()
        arguments = {
            name: bound.arguments[name] for name in bound.arguments.keys() - constants(kernel)
        }
        for path, value in leaves(arguments).items():
            if not isinstance(value, KernelInterface):
                kind_of(path, value)
        for hook in kernel.pre_run_hooks:
            hook(*args, **keywords)
        extents = checked_grid(grid(bound.arguments) if callable(grid) else grid)
        hooks.launch(kernel, extents, dict(bound.arguments), options)

    return run


def active_addresses(pointers: Handle, mask: Mask) -> Numbers:
    """Return the addresses (uint64) that an access touches: its pointers where the mask is set."""
    return active(pointers.data, pointers, mask)


def active(values: Numbers, pointers: Handle, mask: Mask) -> Numbers:
    """Return the ``values``, one for each pointer or one for all, where the mask is set."""
    values, shape = np.asarray(values), pointers.data.shape
    if values.shape != shape:
        values = np.broadcast_to(values, shape)
    if mask is None or bare(mask).all():
        return values.ravel()
    return values[chosen(pointers, mask)]


def chosen(pointers: Handle, mask: Mask) -> Numbers:
    return np.broadcast_to(True if mask is None else bare(mask), pointers.data.shape)


def as_mask(chosen: Numbers) -> TensorHandle:
    return TensorHandle(chosen, tl.int1)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame``, which may be None, and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def source_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of kernel code, without frames of Triton and of the runtime."""
    return [
        outward
        for outward in outwards(frame)
        if _of_kernels(outward.f_code.co_filename, outward.f_globals.get("__name__", ""))
    ]


@functools.cache  # called for every frame at every access of an observed run
def _of_kernels(file: str, module: str) -> bool:
    is_ours = module.startswith(("interlace.runtime.", "interlace_verify."))
    return not file.startswith(triton.__path__[0]) and not is_ours and "greenlet" not in file
