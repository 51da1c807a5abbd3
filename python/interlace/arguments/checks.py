"""Checks of arguments. Messages name the argument and both values; the communicator adds the rank.

The file also has dense stand-ins for tensors that are not dense, because engines need dense tensors.
docs/reference/collectives.md says which shapes one tensor for all ranks may have.
"""

import contextlib
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor

from interlace.arguments.words import (
    NAMES,
    OPS,
    PREMUL_SUM,
    Factor,
    FusedAlgorithm,
    FusedReduceName,
    ReduceOp,
)
from interlace.kernels.epilogue import ACTIVATIONS
from interlace.runtime.compat.torch_modes import PLAIN_TYPES
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import movable
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.norms import RowNorm as RowNorm
from interlace.runtime.tuning.tuning import FUSED_DTYPES

QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def check_not_quantized(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for a quantized dtype: torch copies such elements by their scale, or not at all."""
    if dtype in QUANTIZED:
        raise TypeError(f"{name} is {dtype}; pass the int_repr() of a quantized tensor")


def fill_dense(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    run: Callable[[Sequence[torch.Tensor]], Event | None],
) -> Event | None:
    """Run with dense stand-ins for ``outputs`` that are not dense, and copy the results back to these."""
    if all([output.is_contiguous() for output in outputs]):  # a generator takes longer
        return run(outputs)
    dense = [
        output if output.is_contiguous() else output.new_empty(output.shape) for output in outputs
    ]
    return copied_back(communicator, outputs, dense, run(dense))


def copied_back(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    dense: Sequence[torch.Tensor],
    event: Event | None,
) -> Event | None:
    pairs = [(out, source) for out, source in zip(outputs, dense, strict=True) if out is not source]
    if not pairs:
        return event
    compute = communicator.compute
    if event is not None:
        compute.wait_event(event)
    for out, source in pairs:
        compute.copy(movable(out), movable(source), "output")
    return compute.record()


def remember(communicator: Communicator, key: object, call: Call) -> Call:
    """Keep ``call`` for the next equal call. Raise TypeError if its tensors are quantized."""
    for term, value in call.terms:
        if isinstance(value, torch.dtype):
            check_not_quantized(f"{call.op}: {term}", value)
    return communicator.remember(key, call)


FLOAT_DTYPES = (*FUSED_DTYPES, torch.float64)
ALGORITHMS: tuple[str, ...] = get_args(FusedAlgorithm)
REDUCE_OPS: tuple[str, ...] = get_args(FusedReduceName)
_SUM: Any = ReduceOp.SUM


def source(name: str, value: Any, communicator: Communicator) -> torch.Tensor:
    """Return ``value``, detached, if a collective can read it: a strided tensor on the group's device."""
    kind = communicator.device_type
    try:
        if (
            type(value) in PLAIN_TYPES
            and (value.is_cpu if kind == "cpu" else value.device.type == kind)
            and not (value.is_conj() or value.is_neg() or value.is_nested)
            and (value.data_ptr() or not value.numel())
        ):
            return value.detach() if value.requires_grad else value  # type: ignore[no-any-return]
    except RuntimeError:
        pass  # without an address, or with another layout: the checks below have messages for that
    checked = tensor(name, value, communicator)
    if checked.is_nested:
        raise TypeError(f"{name} must be a strided tensor, got a nested one")
    return checked


def target(name: str, value: object, communicator: Communicator) -> torch.Tensor:
    """Return ``value``, detached, if a collective can also write it, each element once."""
    checked = source(name, value, communicator)
    overlaps = not checked.is_contiguous() and any(
        e > 1 and s == 0 for e, s in zip(checked.shape, checked.stride(), strict=True)
    )
    if overlaps:
        raise ValueError(
            f"{name} of shape {tuple(checked.shape)} is expanded, its elements share memory "
            f"(strides {checked.stride()})"
        )
    return checked


def tensor(name: str, value: object, communicator: Communicator) -> torch.Tensor:
    """Return ``value``, a tensor on the group's device, or a tensor over the memory of another array."""
    if not isinstance(value, torch.Tensor):
        value = import_array(name, value)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(value)}")
    device = communicator.place.device
    if value.device.type != device.type:
        raise ValueError(f"{name} is on {value.device}, the group's memory on {device}")
    check_layout(name, value)
    if value.is_conj() or value.is_neg():
        # kernels and copies read the memory, where a lazy conjugation has not happened
        raise ValueError(
            f"{name} is lazily {'conjugated' if value.is_conj() else 'negated'}; pass "
            f"{name}.resolve_conj().resolve_neg()"
        )
    if not (value.is_nested or has_memory(value)):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which has no memory; "
            "interlace.functional takes tensors that stand for other tensors"
        )
    return value.detach()


def check_layout(name: str, value: torch.Tensor) -> None:
    """Raise TypeError for a sparse tensor, and for a DTensor, which stands for parts of several ranks."""
    if type(value) not in PLAIN_TYPES and hasattr(value, "to_local"):
        raise TypeError(
            f"{name} is a {type(value).__name__}; pass {name}.to_local(), this rank's part"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got {value.layout}")


def describe(value: object) -> str:
    """The class of what stands for a tensor, for an error; a class may say in ``advice`` what to pass."""
    return f"{type(value).__name__}{getattr(value, 'advice', '')}"


def import_array(name: str, value: object) -> Any:
    """Return a tensor over the memory of ``value`` if it is another library's array: CuPy, NumPy, JAX ...

    DLPack shares the memory: nothing is copied, and writes go to the array. On a GPU torch's current stream
    waits for the work that the other library has enqueued. Any other value is returned unchanged.
    """
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dlpack__"):
        return value
    if not getattr(getattr(value, "flags", None), "writeable", True):
        raise TypeError(  # torch would accept it, and write it
            f"{name} is a read-only {type(value).__name__}; pass a copy"
        )
    if backwards := _negative_strides(value):
        raise ValueError(  # torch would end the process
            f"{name} is a {type(value).__name__} with negative strides {backwards}; pass a copy"
        )
    try:
        return torch.from_dlpack(value)  # type: ignore[attr-defined]
    except Exception as error:
        raise TypeError(
            f"{name} is a {type(value).__name__} that cannot be taken as a tensor: {error}"
        ) from error


def _negative_strides(array: object) -> tuple[int, ...]:
    """Return all strides, in bytes, if the array reports a negative one; otherwise ()."""
    for name in ("__array_interface__", "__cuda_array_interface__"):
        about = getattr(array, name, None)
        if not isinstance(about, dict):
            continue
        strides = about.get("strides") or ()
        if any(s < 0 for e, s in zip(about["shape"], strides, strict=False) if e > 1):
            return tuple(strides)
    return ()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie where ``tensor`` says; not so for a LocalTensor or FakeTensor."""
    if type(tensor) is FakeTensor:
        return False
    try:
        return bool(tensor.data_ptr()) or not tensor.numel()
    except RuntimeError:  # wrappers of other tensors may have no address
        return False


def reduce_op(op: Any) -> tuple[str, Factor]:
    """Return the name of ``op``, one of :data:`reduce_ops.OPS`, and the factor of a PREMUL_SUM.

    ``op``: a string, ``ReduceOp.SUM`` and so on, ``ReduceOp.PREMUL_SUM(factor)``, or the op in the options
    that a backend gets. Raises ValueError for an unknown op, TypeError for another type.

    >>> reduce_op("sum"), reduce_op(ReduceOp.AVG)
    (('sum', None), ('avg', None))
    >>> reduce_op(torch.distributed._make_nccl_premul_sum(0.5))
    ('premul_sum', 0.5)
    """
    kind = type(op)
    if kind is str or kind is ReduceOp.RedOpType:
        name = NAMES.get(op)
        if name is not None and name != PREMUL_SUM:
            return name, None
    elif kind is ReduceOp or isinstance(op, ReduceOp):
        if op == _SUM:  # hashes and values of its members take longer
            return "sum", None
        name = NAMES.get(op.op)
        if name is not None and name != PREMUL_SUM:
            return name, None
        if name == PREMUL_SUM:
            # an attribute in torch 2.13, earlier only in its state; torch raises if it is empty
            with contextlib.suppress(RuntimeError):
                return PREMUL_SUM, op.__getstate__()[1]
    if NAMES.get(op if isinstance(op, str) else str(op).rsplit(".", 1)[-1]) == PREMUL_SUM:
        raise ValueError("op: premul_sum needs its factor, ReduceOp.PREMUL_SUM(factor)")
    raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")


def one_node(algorithm: str, communicator: Communicator) -> None:
    """Raise ValueError if ``algorithm`` works within one node and the group has several."""
    if algorithm not in ("auto", "unfused") and communicator.place.nodes is not None:
        raise ValueError(
            f'algorithm="{algorithm}" works within one node, the group has several; use "unfused" or '
            '"auto"'
        )


def part(name: str, length: int | None, parts: Sequence[tuple[int, int]], rank: int) -> None:
    """Raise ValueError if ``length`` differs from the length of the rank's part."""
    own_length = parts[rank][1]
    if length not in (None, own_length):
        raise ValueError(f"{name} must be {own_length}, rank {rank}'s part, got {length}")


def warn_without_gradients(op: str, *, stacklevel: int = 3) -> None:
    """Warn once per call site that nothing is recorded for backward."""
    warnings.warn(
        f"interlace.{op} does not record gradients of unequal parts: its output is "
        "detached from inputs that require them; call it under torch.no_grad() if that is intended",
        UserWarning,
        stacklevel=stacklevel,
    )


def float_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")


def same_dtype(name: str, dtype: torch.dtype, other: str, expected: torch.dtype) -> None:
    if dtype != expected:
        raise TypeError(f"{name} is {dtype}, {other} is {expected}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; torch's reduce ops also count by their names."""
    text = str(value).rsplit(".", 1)[-1].lower() if not isinstance(value, str) else value
    if text not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return text


def seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be seconds or a timedelta, got {value!r}")
    if math.isnan(number):
        raise ValueError(f"{name} must be a number of seconds, got nan")
    return float(number)


def integer(name: str, value: object) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # a tensor of several elements has one as well
            return int(operator.index(value))
    raise TypeError(f"{name} must be an int, got {value!r}")


def group_rank(
    name: str,
    value: object,
    group_value: object,
    communicator: Communicator,
    *,
    default: int | None = None,
) -> int:
    """Return the rank within the group; ``name`` and ``default`` are ranks of the default group."""
    if value is None and type(group_value) is int and 0 <= group_value < communicator.world_size:
        return group_value
    if group_value is not None:
        if value is not None:
            raise ValueError(f"pass {name} or group_{name}, not both: got {value}, {group_value}")
        chosen = integer(f"group_{name}", group_value)
        check_member(f"group_{name}", chosen, communicator)
        return chosen
    if value is None:
        if default is None:
            raise ValueError(f"pass {name} or group_{name}: got neither")
        value = default
    chosen = integer(name, value)
    try:
        return communicator.ranks.index(chosen)
    except ValueError:
        raise ValueError(
            f"{name} must be one of the group's ranks {list(communicator.ranks)}, got {chosen}"
        ) from None


def check_member(name: str, value: int, communicator: Communicator) -> None:
    if not 0 <= value < communicator.world_size:
        raise ValueError(f"{name} must be within 0..{communicator.world_size - 1}, got {value}")


def index(name: str, value: object, length: int) -> int:
    value = integer(name, value)
    if not length:
        raise ValueError(f"{name} {value} does not exist: there are no dimensions")
    if not -length <= value < length:
        raise ValueError(f"{name} must be within {-length}..{length - 1}, got {value}")
    return value % length


def matrix(
    name: str, value: object, input: torch.Tensor, inner: int | None, communicator: Communicator
) -> torch.Tensor:
    """Return a weight ``(k, n)`` with ``k`` = ``inner``, of the input's dtype."""
    weight = tensor(name, value, communicator)
    if weight.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions (k, n), got shape {tuple(weight.shape)}")
    same_dtype(name, weight.dtype, "input", input.dtype)
    if inner is not None:
        inner_length(name, weight.shape[0], input)
    return weight


def inner_length(name: str, rows: Any, input: Any) -> None:
    if rows != input.shape[-1]:
        shape = tuple(input.shape)
        raise ValueError(f"{name} has {rows} rows, input has k = {shape[-1]} (shape {shape})")


def bias_of(
    name: str, value: Any, shape: tuple[int, ...], input: torch.Tensor, communicator: Communicator
) -> torch.Tensor | None:
    if value is None:
        return None
    bias = tensor(name, value, communicator)
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} to match weight, got {tuple(bias.shape)}")
    bias_dtype(name, bias, input)
    return bias.contiguous()


def bias_dtype(name: str, bias: torch.Tensor, input: torch.Tensor) -> None:
    """Raise unless the bias has the input's dtype, or any float dtype if the input is packed rows."""
    if input.dtype == torch.uint8:
        float_dtype(name, bias.dtype)
    else:
        same_dtype(name, bias.dtype, "input", input.dtype)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def output_dtype(value: object, input: torch.Tensor) -> torch.dtype:
    if value is None:
        return torch.bfloat16 if input.dtype == torch.uint8 else input.dtype  # uint8: packed rows
    if not isinstance(value, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {value!r}")
    float_dtype("out_dtype", value)
    return value


def equal_on_all(
    op: str, name: str, values: Sequence[object], *, kind: type[Exception] = ValueError
) -> None:
    """Raise unless all ranks' ``values`` are equal, with the same message on every rank."""
    for other, value in enumerate(values):
        if value != values[0]:
            raise kind(
                f"{op}: {name} differs between ranks: {values[0]} on rank 0, {value} on rank {other}"
            )


def algorithm_and_dtype(input: torch.Tensor, options: Any) -> tuple[str, torch.dtype]:
    """Return the ``algorithm`` of ``options`` and the output's dtype, if they suit the input's dtype."""
    algorithm = one_of("algorithm", options.algorithm, ALGORITHMS)
    out = output_dtype(options.out_dtype, input)
    if getattr(options, "format", ""):
        same_dtype("input in a block-scaled format", input.dtype, "its packed rows", torch.uint8)
        dtypes = [("out_dtype", out)]
    else:
        float_dtype("input", input.dtype)
        dtypes = [("input", input.dtype), ("out_dtype", out)]
    for name, dtype in dtypes:
        # the kernel multiplies in fp32, so wider inputs and outputs are not possible
        fused_dtype(algorithm, name, dtype)
    return algorithm, out


def fused_dtype(
    algorithm: str, name: str, dtype: torch.dtype, instead: str = '"unfused" or "auto"'
) -> None:
    """Raise TypeError if ``algorithm`` has a fused kernel, which cannot take ``dtype``."""
    if algorithm in ("fused", "low_latency") and dtype not in FUSED_DTYPES:
        raise TypeError(
            f'algorithm="{algorithm}" supports float32, float16 and bfloat16, {name} is {dtype}; use '
            f"{instead}"
        )


def activation(name: str, value: object) -> str:
    """Return ``value`` as a name, "" for None and "none"; raise ValueError if it is not an activation."""
    if value is None or value in ("", "none"):
        return ""
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ValueError(f"{name} must be None or one of {', '.join(ACTIVATIONS)}, got {value!r}")
    return value


def activations(value: Any, count: int, several: bool) -> list[str]:
    if not several or value is None or isinstance(value, str):
        return [activation("activation", value)] * count
    entries("activation", value, "weight", count, of="a name or a sequence")
    return [activation(f"activation[{i}]", each) for i, each in enumerate(value)]


def entries(name: str, value: object, like: str, count: int, *, of: str = "a sequence") -> None:
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be {of} like {like}, got {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries, {like} has {count}")


def keys_and_values(kv_cache: object) -> tuple[Any, Any]:
    got = type(kv_cache).__name__
    if isinstance(kv_cache, Sequence) and not isinstance(kv_cache, torch.Tensor):
        if len(kv_cache) == 2:
            return kv_cache[0], kv_cache[1]
        got = f"{len(kv_cache)} in a {got}"
    raise TypeError(f"kv_cache must be two tensors, keys and values, got {got}")


class Operands(NamedTuple):
    """A bias and an activation per weight; the output's dtype. ``several``: weights were a sequence."""

    input: torch.Tensor
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    activations: list[str]
    algorithm: str
    dtype: torch.dtype
    several: bool


def operands(
    communicator: Communicator,
    input: object,
    weight: object,
    bias: Any,
    options: Any,
    gather_dim: int | None = None,
) -> Operands:
    """Check the operands of a fused op. ``gather_dim`` allows several weights; a last one skips k."""
    input = tensor("input", input, communicator)
    algorithm, dtype = algorithm_and_dtype(input, options)
    if input.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {tuple(input.shape)}")
    inner: int | None = input.shape[-1]
    several = False
    if gather_dim is not None:
        if index("gather_dim", gather_dim, input.dim()) == input.dim() - 1:
            inner = None
        several = not isinstance(import_array("weight", weight), torch.Tensor)
    if not several:
        weights = [matrix("weight", weight, input, inner, communicator)]
        biases = [bias_of("bias", bias, (weights[0].shape[1],), input, communicator)]
    else:
        if not isinstance(weight, Sequence) or isinstance(weight, str) or not weight:
            raise TypeError(
                "weight must be a tensor or a non-empty sequence of tensors, got "
                f"{describe(weight)}"
            )
        weights = [
            matrix(f"weight[{i}]", each, input, inner, communicator)
            for i, each in enumerate(weight)
        ]
        vectors = [None] * len(weights) if bias is None else bias
        entries("bias", vectors, "weight", len(weights))
        biases = [
            bias_of(f"bias[{i}]", each, (own.shape[1],), input, communicator)
            for i, (each, own) in enumerate(zip(vectors, weights, strict=True))
        ]
    names = activations(options.activation, len(weights), several)
    return Operands(input, weights, biases, names, algorithm, dtype, several)


Tensor = torch.Tensor


def RMSNorm(weight: Tensor | None = None, eps: float = 1e-6) -> RowNorm:  # a norm's name
    """Describe ``torch.nn.functional.rms_norm`` over the last dimension, of ``n`` numbers, for ``norm=``.

    ``weight``: ``(n,)`` in the output's dtype or float32, or None for none. ``eps`` is 1e-6 by default, as
    in Llama and in vLLM; torch's own default is the dtype's ``eps``. It is not a module: a layer's norm is
    ``interlace.RMSNorm(layer.weight, layer.eps)``.

    Raises ValueError or TypeError in the op that gets it, naming the argument that does not fit.

    >>> interlace.RMSNorm(torch.ones(4)).eps
    1e-06
    """
    return RowNorm("rms", eps, weight)


def LayerNorm(
    weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> RowNorm:
    """Describe ``torch.nn.functional.layer_norm`` over the last dimension, for ``norm=``.

    ``weight`` and ``bias``: ``(n,)`` in the output's dtype or float32, or None for none. ``eps`` as in
    torch. Raises as :func:`RMSNorm`.

    >>> interlace.LayerNorm(torch.ones(4), torch.zeros(4)).eps
    1e-05
    """
    return RowNorm("layer", eps, weight, bias)


def checked_norm(
    communicator: Communicator, norm: RowNorm, columns: int, dtype: torch.dtype
) -> RowNorm:
    """Return the norm with dense vectors, if they fit rows of ``columns`` numbers of ``dtype``."""
    vectors = []
    for name, value in (("weight of norm", norm.weight), ("bias of norm", norm.bias)):
        if value is not None:
            value = tensor(name, value, communicator)
            if tuple(value.shape) != (columns,):
                raise ValueError(f"{name} must have shape ({columns},), got {tuple(value.shape)}")
            if value.dtype not in (dtype, torch.float32):
                raise TypeError(
                    f"{name} is {value.dtype}, but must be {dtype} as the output, or float32"
                )
            value = value.contiguous()
        vectors.append(value)
    return RowNorm(norm.kind, norm.eps, *vectors)


def checked_residual(
    communicator: Communicator, residual: object, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    if residual is None:
        return None
    addend = tensor("residual", residual, communicator)
    if tuple(addend.shape) != shape:
        raise ValueError(
            f"residual must have the output's shape {shape}, got {tuple(addend.shape)}"
        )
    same_dtype("residual", addend.dtype, "the output", dtype)
    return addend


Tensors = Sequence[torch.Tensor]


def parts(
    name: str,
    whole: object,
    like_name: str,
    like: torch.Tensor,
    communicator: Communicator,
    *,
    written: bool,
) -> list[torch.Tensor]:
    """Return the tensors of all ranks in ``whole``, of the dtype of ``like``, which is this rank's.

    Only this rank's tensor may share memory with ``like``. ``written``: the op writes the tensors.
    """
    rank = communicator.rank
    if type(whole) is not list:
        whole = import_array(name, whole)
    if isinstance(whole, torch.Tensor):
        tensor = (target if written else source)(name, whole, communicator)
        if tensor.dtype is not like.dtype:
            same_dtype(name, tensor.dtype, like_name, like.dtype)
        tensors = _cut(name, tensor, like.shape, communicator)
    else:
        tensors = one_per_rank(name, whole, like_name, like.dtype, communicator, written=written)
        if tensors[rank].shape != like.shape:
            raise ValueError(
                f"{name}[{rank}] has shape {tuple(tensors[rank].shape)}, {like_name} has "
                f"{tuple(like.shape)}"
            )
    apart(name, tensors, like_name, [like], rank, written=written)
    return tensors


def _cut(
    name: str, tensor: torch.Tensor, shape: torch.Size, communicator: Communicator
) -> list[torch.Tensor]:
    world_size, size = communicator.world_size, tensor.shape
    if size == (world_size, *shape):
        return list(tensor.unbind(0))
    if shape and size == (world_size * shape[0], *shape[1:]):
        return list(tensor.tensor_split(world_size))
    forms = [str((world_size, *shape))]
    if shape:
        forms.insert(0, str((world_size * shape[0], *shape[1:])))
    raise ValueError(
        f"{name} must have shape {' or '.join(forms)} for tensors of {tuple(shape)} and world size "
        f"{world_size}, got {tuple(size)}"
    )


def one_per_rank(
    name: str,
    whole: object,
    like_name: str,
    dtype: torch.dtype,
    communicator: Communicator,
    *,
    written: bool,
) -> list[torch.Tensor]:
    """Return the list ``whole``, if it has a tensor of ``dtype`` for every rank."""
    world_size = communicator.world_size
    if type(whole) is not list and (not isinstance(whole, Sequence) or isinstance(whole, str)):
        raise TypeError(f"{name} must be a tensor or a list of tensors, got {describe(whole)}")
    if len(whole) != world_size:
        raise ValueError(f"{name} must have one tensor per rank, {world_size}, got {len(whole)}")
    take = target if written else source
    try:
        tensors = [take(name, each, communicator) for each in whole]
    except (TypeError, ValueError):  # only errors need the names of entries, which take time
        tensors = [take(f"{name}[{r}]", each, communicator) for r, each in enumerate(whole)]
    for r, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            same_dtype(f"{name}[{r}]", tensor.dtype, like_name, dtype)
    return tensors


def disjoint(tensors: Tensors) -> bool:
    """Return whether no two dense ``tensors`` share memory; for others it may be wrongly True."""
    spans = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
    return all([start + nbytes <= end for (start, nbytes), (end, _) in pairwise(spans)])


def _dense(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return address, number and bytes of the tensors that are dense and not empty."""
    return [
        (tensor.data_ptr(), number, nbytes)
        for number, tensor in enumerate(tensors)
        if (nbytes := tensor.nbytes) and tensor.is_contiguous()
    ]


def apart(
    name: str, tensors: Tensors, like_name: str, likes: Tensors, rank: int, *, written: bool
) -> None:
    """Raise if one of ``likes`` shares memory with another rank's entry, or with a part of its rank's.

    Writes there would change data that peers have still to read. Raise also if two ``written`` tensors
    share memory, because the second write would overwrite the first. Checks only dense tensors.
    """
    if disjoint([*tensors, *likes]):
        return
    spans = _dense(tensors)
    for (start, first, nbytes), (following, second, _) in pairwise(sorted(spans) * written):
        if following < start + nbytes:
            one, other = sorted((first, second))
            raise ValueError(f"{name}[{one}] and {name}[{other}] share memory")
    for start, _, nbytes in _dense(likes):
        for other, number, size in spans:
            shared = start < other + size and other < start + nbytes
            if shared and not (number == rank and other == start):
                raise ValueError(
                    f"{like_name} shares memory with {name}[{number}]; it may be the same "
                    f"memory as {name}[{rank}], or none of it"
                )


def either(name: str, value: object, alias: str, other: object, function: str) -> Any:
    """Return an argument that has two names; raise TypeError like Python if both or neither are passed."""
    if other is None:
        if value is None:
            raise TypeError(f"{function}() missing required argument: {name!r}")
        return value
    if value is not None:
        raise TypeError(f"{function}() got both {name!r} and {alias!r}")
    return other
