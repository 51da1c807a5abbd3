"""Vectors of ``triton_dist.language``: some numbers that each thread has for itself, in registers.

They are not blocks, whose numbers threads share. In the compiler they are tuples of scalars with their own
type, which loops carry and operators take. They derive from ``tl.tensor``, because Triton calls operators
of no other class. Threads differ in kernels with vectors, so these are compiled and never interpreted.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import triton.language as tl
from triton.language import core

from interlace.runtime.compat.triton_launcher import wrap_with_statements
from interlace_verify.shims.symmetric import ptx, run_ptx


class VectorType(core.base_type):  # type: ignore[misc]
    def __init__(self, scalar: Any, count: int) -> None:
        self.elem_type, self.vec_size = scalar, count
        self.name = f"{scalar}_v{count}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorType) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def mangle(self) -> str:
        return f"vector_{self.name}"

    def _flatten_ir_types(self, builder: Any, out: list[object]) -> None:
        for _ in range(self.vec_size):
            self.elem_type._flatten_ir_types(builder, out)

    def _unflatten_ir(self, handles: Any, cursor: int) -> tuple["ThreadVector", int]:
        values = []
        for _ in range(self.vec_size):
            value, cursor = self.elem_type._unflatten_ir(handles, cursor)
            values.append(value)
        return ThreadVector(values), cursor


def _by_number(name: str) -> Any:
    """Return the operator ``name`` of scalars, applied per number to another vector or a scalar."""

    @core.builtin
    def operator(self: "ThreadVector", other: object, _semantic: object = None) -> "ThreadVector":
        right_values = (
            other.values if isinstance(other, ThreadVector) else [other] * len(self.values)
        )
        pairs = zip(self.values, right_values, strict=True)
        return ThreadVector([getattr(a, name)(b, _semantic=_semantic) for a, b in pairs])

    return operator


class ThreadVector(tl.tensor):  # type: ignore[misc]
    __triton_builtin__ = True

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)
        self.dtype = self.values[0].dtype
        self.type = VectorType(self.dtype, len(self.values))

    __add__, __sub__, __mul__ = map(_by_number, ("__add__", "__sub__", "__mul__"))
    __truediv__ = _by_number("__truediv__")

    def __getitem__(self, index: Any, _semantic: Any = None) -> Any:
        at = core._unwrap_if_constexpr(index[0] if isinstance(index, (tuple, tl.tuple)) else index)
        return ThreadVector(self.values[at]) if isinstance(at, slice) else self.values[at]

    def __iter__(self) -> Iterator[object]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def _flatten_ir(self, handles: list[object]) -> None:
        for value in self.values:
            value._flatten_ir(handles)

    @core.builtin
    def to(self, dtype: Any, fp_downcast_rounding: object = None, bitcast: bool = False,
           _semantic: Any = None) -> "ThreadVector":  # fmt: skip
        options = {"fp_downcast_rounding": fp_downcast_rounding, "bitcast": bitcast}
        return ThreadVector([v.to(dtype, **options, _semantic=_semantic) for v in self.values])

    @core.builtin
    def recast(self, dtype: Any, _semantic: object = None) -> "ThreadVector":
        """Return the same bits as numbers of ``dtype``; their count depends on its width."""
        dtype = core._unwrap_if_constexpr(dtype)
        bits, wanted = self.dtype.primitive_bitwidth, dtype.primitive_bitwidth
        whole, part = (core.get_int_dtype(n, False) for n in (max(bits, wanted), min(bits, wanted)))
        words = [_bits(v, _semantic) for v in self.values]
        if bits > wanted:
            words = [
                _shifted(word, "__rshift__", at, _semantic).to(part, _semantic=_semantic)
                for word in words
                for at in range(0, bits, wanted)
            ]
        elif bits < wanted:
            words = [word.to(whole, _semantic=_semantic) for word in words]
            words = [
                _joined([_shifted(word, "__lshift__", i * bits, _semantic) for i, word in enumerate(group)],
                        _semantic)
                for group in _groups(words, wanted // bits)
            ]  # fmt: skip
        return ThreadVector([word.to(dtype, bitcast=True, _semantic=_semantic) for word in words])


def _bits(value: Any, semantic: Any) -> Any:
    kind = core.get_int_dtype(value.dtype.primitive_bitwidth, False)
    return value.to(kind, bitcast=True, _semantic=semantic)


def _shifted(word: object, operator: str, by: int, semantic: object) -> Any:
    return getattr(word, operator)(by, _semantic=semantic) if by else word


def _joined(words: Sequence[Any], semantic: Any) -> Any:
    found = words[0]
    for word in words[1:]:
        found = found.__or__(word, _semantic=semantic)
    return found


def _groups(words: Sequence[object], count: int) -> Iterator[Sequence[object]]:
    if len(words) % count:
        raise ValueError(f"{len(words)} numbers cannot be recast to numbers {count} times as wide")
    return (words[first : first + count] for first in range(0, len(words), count))


@core.builtin
def make_vector(values: Any, _semantic: object = None) -> ThreadVector:
    return ThreadVector([*values])


@core.builtin
def zeros_vector(vec_size: object, dtype: object, _semantic: object = None) -> ThreadVector:
    zero = tl.full((), 0, dtype, _semantic=_semantic)
    return ThreadVector([zero] * core._unwrap_if_constexpr(vec_size))


def _order(semantic: object, scope: object) -> str:
    words = map(core._unwrap_if_constexpr, (semantic, scope))
    return "".join(f".{word}" for word in words if word)


@core.builtin
def ld_vector(
    ptr: Any, vec_size: Any = 1, scope: object = "", semantic: object = "", _semantic: object = None
) -> Any:
    """Load ``vec_size`` numbers from ``ptr`` on: 128 bits at a time if possible, otherwise one by one."""
    kind, count = ptr.dtype.element_ty, core._unwrap_if_constexpr(vec_size)
    load, whole = f"ld.global{_order(semantic, scope)}", kind.primitive_bitwidth * count % 128 == 0
    part = tl.uint32 if whole else core.get_int_dtype(kind.primitive_bitwidth, False)
    words = []
    for at in _places(ptr, count, whole, _semantic):
        if whole:
            text = f"{load}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
            words += ptx(text, [at], (part,) * 4, _semantic=_semantic)
        else:
            text = f"{load}.b{part.primitive_bitwidth} $0, [$1];"
            words.append(ptx(text, [at], part, _semantic=_semantic))
    return ThreadVector(words).recast(kind, _semantic=_semantic)


@core.builtin
def st_vector(
    ptr: Any, vec: ThreadVector, scope: object = "", semantic: object = "", _semantic: object = None
) -> None:
    kind, count = ptr.dtype.element_ty, len(vec)
    if vec.dtype != kind:
        raise ValueError(f"vec must be of the type of ptr, {kind}, got {vec.dtype}")
    store, bits = f"st.global{_order(semantic, scope)}", kind.primitive_bitwidth
    whole = bits * count % 128 == 0
    words = vec.recast(
        tl.uint32 if whole else core.get_int_dtype(bits, False), _semantic=_semantic
    ).values
    for number, at in enumerate(_places(ptr, count, whole, _semantic)):
        some = words[4 * number :][:4] if whole else [words[number]]
        names = ", ".join(f"${2 + i}" for i in range(len(some)))
        text = f"{store}.v4.b32 [$1], {{{names}}};" if whole else f"{store}.b{bits} [$1], {names};"
        run_ptx(text, [at, *some], _semantic=_semantic)


def _places(ptr: Any, count: int, whole: bool, semantic: Any) -> list[object]:
    step = 128 // ptr.dtype.element_ty.primitive_bitwidth if whole else 1
    return [ptr.__add__(first, _semantic=semantic) for first in range(0, count, step)]


class simt_exec_region:
    """``with simt_exec_region() as (thread, threads)``: the number of the thread, and of all threads."""

    __triton_builtin__ = True

    def __init__(self, _semantic: Any = None) -> None:
        self._semantic = _semantic

    def __enter__(self) -> Any:
        names = "mov.u32 $0, %tid.x;", "mov.u32 $0, %ntid.x;"
        return tl.tuple([ptx(name, is_pure=True, _semantic=self._semantic) for name in names])

    def __exit__(self, *error: object) -> None: ...


def _with_several_names(visit: Any) -> Any:
    """Support several names in Triton's ``with ... as name``, as Triton-distributed's compiler does."""

    @functools.wraps(visit)
    def visit_with(self: Any, node: ast.With) -> Any:
        names = node.items[0].optional_vars
        if not isinstance(names, ast.Tuple):
            return visit(self, node)
        given = ast.Name("_given", ast.Store())
        taken = ast.Assign([names], ast.Name("_given", ast.Load()))
        item = ast.withitem(node.items[0].context_expr, given)
        whole = ast.With([item, *node.items[1:]], [taken, *node.body])
        return visit(self, ast.fix_missing_locations(ast.copy_location(whole, node)))

    return visit_with


wrap_with_statements(_with_several_names)
