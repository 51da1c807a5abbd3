"""Linear layers split over a group: single layers, the feed-forward block, and attention's projections."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import torch
from torch.types import Device

from interlace.arguments import checks
from interlace.arguments.words import BlockFormatName, Group
from interlace.kernels.epilogue import Activation
from interlace.nn import regions
from interlace.nn.linear_functions import (
    DeferredWeightGradients,
    casts,
    column_parallel_linear,
    row_parallel_linear,
)
from interlace.nn.sharding import HeldGroup, OnGroup, ShardedModule, divisible, positive
from interlace.ops.matmul.formats import (
    BlockFormat,
    Scaled,
    format_named,
    packed_rows,
    unpacked_rows,
)
from interlace.runtime.compat.torch_modes import disable
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.numerics.norms import activate

if TYPE_CHECKING:
    from typing_extensions import Unpack

Constructor = TypeVar("Constructor", bound=Callable[..., None])
Tensor = torch.Tensor
InitMethod = Callable[[Tensor], Any]


@dataclass(frozen=True)
class LinearOptions:
    """The options that all linear layers take; see :class:`ColumnParallelLinear`."""

    group: Group | HeldGroup = None
    sequence_parallel: bool = True
    batch_first: bool = False
    init_method: InitMethod | None = None
    gradient_accumulation_fusion: bool = False
    deferred: DeferredWeightGradients | None = None
    format: BlockFormatName | None = None
    device: Device = None
    dtype: torch.dtype | None = None

    def keep(self, layer: Any) -> None:
        """Set options that the forward of ``layer`` reads as its attributes, so users can change them."""
        layer.sequence_parallel, layer.batch_first = self.sequence_parallel, self.batch_first
        layer.gradient_accumulation_fusion = self.gradient_accumulation_fusion
        layer.deferred, layer.format = self.deferred, self.format


class LinearArguments(TypedDict, total=False):
    """The options as keyword arguments, for type checkers."""

    group: Group
    sequence_parallel: bool
    batch_first: bool
    init_method: InitMethod | None
    gradient_accumulation_fusion: bool
    deferred: DeferredWeightGradients | None
    format: BlockFormatName | None
    device: Device
    dtype: torch.dtype | None


def with_options(constructor: Constructor) -> Constructor:
    """Show :class:`LinearOptions` in the signature of ``constructor``, in place of its ``options``."""
    signature = inspect.signature(constructor)
    *parameters, _ = signature.parameters.values()
    shared = inspect.signature(LinearOptions).parameters.values()
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shared]
    shown = signature.replace(parameters=[*parameters, *keywords])

    @functools.wraps(constructor)
    def check_options(*parameters: object, **options: object) -> None:
        for name in options:
            if name not in shown.parameters:
                text = f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(text)
        constructor(*parameters, **options)

    check_options.__signature__ = shown  # type: ignore[attr-defined]
    return cast("Constructor", check_options)


class LinearParameters(ShardedModule):
    """The weight ``[out, in]`` and bias of a linear layer, or their parts; initialised as ``nn.Linear``.

    ``dim`` is the dimension along which the weight is split. With 0 the bias is also split; with 1 it is
    replicated. ``init_method(weight)`` is called on the unsharded weight instead of ``nn.Linear``'s
    initialisation; the bias is then zero, as in Megatron-core.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    sequence_parallel: bool
    batch_first: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dim: int,
        bias: bool,
        options: LinearOptions,
        copies: int = 1,
    ) -> None:
        super().__init__(options.group)
        with self.group.accepting(type(self).__name__):
            positive(in_features=in_features, out_features=out_features)
            if copies == 1:
                name, size = (("out_features", out_features), ("in_features", in_features))[dim]
                divisible(name, size, self.group)
        self.in_features, self.out_features = in_features, out_features
        self.init_method = options.init_method
        self._loaded: tuple[BlockFormat, int] | None = None
        options.keep(self)
        kind: Any = {"device": options.device, "dtype": options.dtype}
        self._add_parameter("weight", (out_features, in_features), dim, copies, **kind)
        if options.format is not None:
            widths = dict(zip(("out_features", "in_features"), self.weight.shape, strict=True))
            with self.group.accepting(type(self).__name__):
                format_named(options.format).check_widths(**widths)
        self.register_parameter("bias", None)
        if bias and dim == 0:
            self._add_parameter("bias", (out_features,), 0, copies, **kind)
        elif bias:
            self._add_parameter("bias", (out_features,), None, **kind)
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, object]]:
        sizes, kind = (self.in_features, self.out_features), {"device": device, "dtype": dtype}
        if self.init_method is None:
            whole = torch.nn.Linear(*sizes, self.bias is not None, **kind)  # type: ignore[arg-type]
            weight, bias = whole.weight, whole.bias
        else:
            weight, bias = torch.empty(sizes[::-1], **kind), torch.zeros(sizes[1], **kind)  # type: ignore[call-overload]
            self.init_method(weight)
        if self._loaded is None:
            yield "weight", weight
        if self.bias is not None:
            yield "bias", bias

    def load_scaled(self, weight: Scaled) -> None:
        """Use a block-scaled weight ``[out, in]``, whole or this rank's part, instead of the parameter.

        For inference: the layer's input then has no gradient. ``weight`` becomes a buffer of packed bytes,
        which is not in state dicts. Raises ValueError or TypeError on all ranks for another shape, or if
        the part of a rank would divide a block.

        >>> def forward():
        ...     layer = nn.ColumnParallelLinear(64, 4, bias=False)
        ...     layer.load_scaled(interlace.quantize(torch.ones(4, 64), "mxfp8"))
        ...     return layer(torch.ones(1, 64)).tolist()
        >>> interlace.run(forward, 2)[0]
        [[64.0, 64.0], [64.0, 64.0]]
        """
        with self.group.accepting(type(self).__name__):
            if not isinstance(weight, Scaled):
                raise TypeError(f"weight must be an interlace.Scaled, got {type(weight).__name__}")
            sharding = self._shardings["weight"]
            whole = self.out_features, self.in_features
            here = sharding.local_shape(whole)
            if tuple(weight.shape) not in (whole, here) or weight.inner != -1:
                raise ValueError(
                    f"weight must be {whole}, or this rank's part {here}, its blocks along in_features; "
                    f"got {tuple(weight.shape)}, blocks along dimension {weight.inner}"
                )
            if tuple(weight.shape) != here:
                weight = weight.narrow(sharding.dim, *sharding.part())  # type: ignore[arg-type]
            rows = packed_rows(weight)
        del self.weight
        self.register_buffer("weight", rows, persistent=False)
        self._loaded = weight.kind, weight.shape[-1]

    @property
    def _factor(self) -> Any:
        """Return the weight for the functions: the parameter, or the scaled weight that was loaded."""
        return unpacked_rows(self.weight, *self._loaded) if self._loaded else self.weight

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, world_size={self.group.world_size}"
        )


def _options(layer: object) -> dict[str, Any]:
    names = ("group", "sequence_parallel", "gradient_accumulation_fusion", "deferred", "out_dtype")
    return {name: getattr(layer, name) for name in (*names, "format")}


def check_features(
    layer: Any,
    input: object,
    features: int,
    meaning: str,
    weight: Tensor | None = None,
    name: str = "weight",
) -> None:
    """Raise unless ``input``, if it is a tensor, has ``features`` features and the dtype of ``weight``."""
    with layer.group.on(input).accepting(kind := type(layer).__name__):
        if not isinstance(input, Tensor):
            return
        if input.dim() and input.shape[-1] != features:
            raise ValueError(
                f"input must have {features} features, {meaning}, got shape {tuple(input.shape)}"
            )
        if weight is not None and weight.dtype != torch.uint8 and not casts(input):
            checks.same_dtype("input", input.dtype, f"{name} of {kind}", weight.dtype)


def gathering_linear(
    layer: Any, input: Tensor, weights: list[Any], biases: list[Any], names: Sequence[str]
) -> list[Tensor]:
    """Call :func:`column_parallel_linear` with the options of ``layer``."""
    return column_parallel_linear(
        input,
        weights,
        biases,
        gather_dim=regions.sequence_dim(input, layer.batch_first),
        save_gathered=layer.save_gathered,
        names=names,
        **_options(layer),
    )


class ColumnParallelLinear(LinearParameters):
    """``torch.nn.Linear`` whose output features are split over the group.

    Parameters
    ----------
    in_features, out_features : sizes of the unsharded layer. The group's size divides ``out_features``.
    bias : add a bias; a rank holds its part for its own features.
    group : anything that :func:`interlace.groups.resolve` takes.
    sequence_parallel : the input is this rank's equal shard of the sequence, which is gathered inside the
        matmul. Otherwise it is the whole, the same on all ranks.
    batch_first : the sequence is dim 1 of ``[b, s, h]``, not dim 0 of ``[s, b, h]``; in ``[s, h]`` it is
        dim 0.
    gather_output : return all features on all ranks, which then compute the same.
    skip_bias_add : return ``(output, bias)``; the caller adds the bias, to fuse it with what follows.
    init_method : see :class:`LinearParameters`.
    gradient_accumulation_fusion, save_gathered, deferred, out_dtype, format : see
        :func:`interlace.nn.column_parallel_linear`; ``deferred`` may be set later.
    device, dtype : as for ``torch.nn.Linear``.

    Forward: ``input`` ``[s / world size, b, in] -> [s, b, out / world size]``. All gradients are complete
    after backward: the weight's and the bias' belong to this rank alone, the input's is summed over the
    group.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     layer = nn.ColumnParallelLinear(4, 6)
    ...     with torch.no_grad():
    ...         return tuple(layer(torch.ones(3, 2, 4)).shape)
    >>> interlace.run(forward, 2)
    [(6, 2, 3), (6, 2, 3)]
    """

    @with_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        save_gathered: bool = False,
        out_dtype: torch.dtype | None = None,
        **options: Unpack[LinearArguments],
    ) -> None:
        super().__init__(in_features, out_features, 0, bias, LinearOptions(**options))
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.save_gathered, self.out_dtype = save_gathered, out_dtype

    @disable
    def forward(self, input: Tensor) -> Any:
        check_features(self, input, self.in_features, "in_features", self.weight)
        self._check_alike(self.group)
        bias = self.bias
        (output,) = gathering_linear(
            self, input, [self._factor], [None if self.skip_bias_add else bias], [""]
        )
        if self.gather_output:
            output = regions.gather_from_group(output, group=self.group)
            if self.skip_bias_add and bias is not None:
                bias = regions.gather_from_group(bias, group=self.group)  # type: ignore[assignment]
        return (output, bias) if self.skip_bias_add else output


class RowParallelLinear(LinearParameters):
    """``torch.nn.Linear`` whose input features are split over the group; the products are summed.

    Parameters
    ----------
    in_features, out_features : sizes of the unsharded layer. The group's size divides ``in_features``.
    bias : add a bias, which every rank holds whole.
    sequence_parallel : the output is this rank's equal shard of the sequence, scattered inside the matmul,
        so the group's size divides the sequence. Otherwise it is the whole, on all ranks.
    input_is_parallel : the input has only this rank's features, as in a :class:`ColumnParallelLinear`'s
        output; otherwise it has all features, the same on all ranks.
    skip_bias_add : return ``(output, bias)``. The bias is whole, and each rank adds it to its own rows.
    other parameters : as for :class:`ColumnParallelLinear`.

    Forward: ``input`` ``[s, b, in / world size] -> [s / world size, b, out]``. The bias is on all ranks and
    is added once. All gradients are complete after backward. With sequence parallelism the bias' gradient
    is summed over the group, even if the caller adds the bias.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     torch.manual_seed(0)  # the same on all ranks
    ...     layer = nn.RowParallelLinear(4, 6)
    ...     with torch.no_grad():
    ...         return tuple(layer(torch.ones(6, 2, 2)).shape)
    >>> interlace.run(forward, 2)
    [(3, 2, 6), (3, 2, 6)]
    """

    @with_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        out_dtype: torch.dtype | None = None,
        **options: Unpack[LinearArguments],
    ) -> None:
        super().__init__(in_features, out_features, 1, bias, LinearOptions(**options))
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.out_dtype = out_dtype

    @disable
    def forward(self, input: Tensor) -> Any:
        self._check_alike(self.group.on(input), "bias")
        if not self.input_is_parallel:
            check_features(self, input, self.in_features, "in_features", self.weight)
            input = regions.scatter_to_group(input, group=self.group)
        size, ranks = self.in_features, self.group.world_size
        meaning = f"in_features {size} over {ranks} ranks"
        check_features(self, input, size // ranks, meaning, self.weight)
        output = row_parallel_linear(
            input,
            self._factor,
            None if self.skip_bias_add else self.bias,
            scatter_dim=regions.sequence_dim(input, self.batch_first),
            **_options(self),
        )
        if not self.skip_bias_add:
            return output
        bias: Tensor | None = self.bias
        if self.sequence_parallel:
            (bias,) = regions.copy_to_group(bias, group=self.group)
        return output, bias


class SequenceParallelMLP(OnGroup):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` with ``gated``.

    Parameters
    ----------
    hidden_size : features of input and output.
    intermediate_size : intermediate features, a multiple of the group's size.
    activation : "relu", "gelu", "gelu_tanh" or "silu", or an elementwise function of a tensor.
    gated : add a second first layer, ``gate``, that shares the gather (SwiGLU for "silu").
    output_init_method : ``init_method`` of ``down``; ``init_method`` by default.
    other parameters : as for :class:`ColumnParallelLinear`, for all layers.

    Forward: ``input`` ``[s / world size, b, hidden]``; the output has the same shape. Without
    ``sequence_parallel`` both are whole on all ranks. State dicts match a module with ``gate`` (if gated),
    ``up`` and ``down`` as ``nn.Linear``, made in this order.

    Raises ValueError or TypeError naming the argument, the values and the rank. Semantics:
    ``torch.nn.Linear`` twice; Megatron-core's ``MLP``.

    >>> def forward():
    ...     torch.manual_seed(0)  # the same on all ranks
    ...     with torch.no_grad():
    ...         return tuple(nn.SequenceParallelMLP(4, 8)(torch.ones(3, 1, 4)).shape)
    >>> interlace.run(forward, 2)
    [(3, 1, 4), (3, 1, 4)]
    """

    @with_options
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation | Callable[[Tensor], Tensor] = "gelu",
        *,
        gated: bool = False,
        bias: bool = True,
        output_init_method: InitMethod | None = None,
        save_gathered: bool = False,
        **options: Unpack[LinearArguments],
    ) -> None:
        super().__init__(options.get("group"))
        with self.group.accepting("SequenceParallelMLP"):
            positive(hidden_size=hidden_size)
            divisible("intermediate_size", intermediate_size, self.group)
            named = None if callable(activation) else checks.activation("activation", activation)
        self.hidden_size = hidden_size
        self.activation = activation if named is None else named
        self.save_gathered = save_gathered
        shared = vars(replace(LinearOptions(**options), group=self._held))
        first, sizes = {**shared, "save_gathered": save_gathered}, (hidden_size, intermediate_size)
        self.gate = ColumnParallelLinear(*sizes, bias=bias, **first) if gated else None
        self.up = ColumnParallelLinear(*sizes, bias=bias, **first)
        last = {**shared, "init_method": output_init_method or shared["init_method"]}
        self.down = RowParallelLinear(*sizes[::-1], bias=bias, **last)

    @disable
    def forward(self, input: Tensor) -> Tensor:
        up = self.up.weight
        check_features(self, input, self.hidden_size, "hidden_size", up, "up.weight")
        layers = [self.up] if self.gate is None else [self.gate, self.up]
        for layer in layers:
            layer._check_alike(layer.group, layer=self)
        return self._on_all_ranks(self._through, input, layers)

    def _through(self, input: Tensor, layers: list[ColumnParallelLinear]) -> Tensor:
        weights, biases = [layer._factor for layer in layers], [layer.bias for layer in layers]
        names = ["up"] if self.gate is None else ["gate", "up"]
        outputs = gathering_linear(self.up, input, weights, biases, names)
        activation = self.activation
        hidden = (
            activate(outputs[0], activation)
            if isinstance(activation, str)
            else activation(outputs[0])
        )
        if self.gate is not None:
            hidden = hidden * outputs[1]
        return self.down(hidden)  # type: ignore[no-any-return]


class QKVParallelLinear(OnGroup):
    """A projection to the queries, keys and values of this rank's heads, from one gather of the input.

    Parameters
    ----------
    hidden_size : features of the input.
    num_heads : query heads, a multiple of the group's size.
    num_kv_heads : heads of keys and values, a divisor of ``num_heads``, which is the default; a multiple or
        a divisor of the group's size. If it is a smaller divisor, ``world size / num_kv_heads``
        neighbouring ranks hold and compute the same head, and its gradient is summed over these ranks.
    head_dim : features of a head, by default ``hidden_size / num_heads``.
    other parameters : as for :class:`ColumnParallelLinear`. If heads are replicated,
        ``gradient_accumulation_fusion`` and ``deferred`` raise an error, as they would leave out that sum.

    Forward: ``input`` ``[s / world size, b, hidden]`` gives ``(q, k, v)``, ``[s, b, local heads *
    head_dim]`` each. This rank has query heads ``rank * n .. (rank + 1) * n - 1``, and the key-value heads
    for these queries. State dicts have ``q.weight``, ``k.weight``, ``v.weight`` and their biases. They
    match a module with ``q``, ``k`` and ``v`` as ``nn.Linear`` made in this order, and so does the
    initialisation.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     with torch.no_grad():
    ...         return [tuple(y.shape) for y in nn.QKVParallelLinear(8, 4, 2)(torch.ones(3, 1, 8))]
    >>> interlace.run(forward, 2)[0]
    [(6, 1, 4), (6, 1, 2), (6, 1, 2)]
    """

    @with_options
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        *,
        save_gathered: bool = False,
        out_dtype: torch.dtype | None = None,
        **options: Unpack[LinearArguments],
    ) -> None:
        super().__init__(options.get("group"))
        communicator = self.group
        with communicator.accepting("QKVParallelLinear"):
            kv = _checked_heads(hidden_size, num_heads, num_kv_heads, head_dim, communicator)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, kv
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.copies = max(1, communicator.world_size // kv)
        shared = replace(LinearOptions(**options), group=self._held)
        shared.keep(self)
        self.save_gathered, self.out_dtype = save_gathered, out_dtype
        queries, keys = num_heads * self.head_dim, kv * self.head_dim
        self.q = LinearParameters(hidden_size, queries, 0, bias, shared)
        self.k = LinearParameters(hidden_size, keys, 0, bias, shared, self.copies)
        self.v = LinearParameters(hidden_size, keys, 0, bias, shared, self.copies)

    @disable
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q, self.k, self.v
        check_features(self, input, self.hidden_size, "hidden_size", q.weight, "q.weight")
        q._check_alike(self.group, layer=self)  # k and v are drawn after q
        shared: Any = (k._factor, v._factor, k.bias, v.bias)
        if self.copies > 1:
            with self.group.accepting("QKVParallelLinear"):
                for name in ("gradient_accumulation_fusion", "deferred"):
                    if getattr(self, name) not in (None, False):
                        raise ValueError(
                            f"{name} needs at least one key-value head per rank: num_kv_heads is "
                            f"{self.num_kv_heads}, the group's size is {self.group.world_size}"
                        )
            replicas = self._held.of_replicas(self.copies)
            for part in (k, v):
                part._check_alike(replicas, "weight", "bias", layer=self)
            scaled = [isinstance(each, Scaled) for each in shared]  # they have no gradient
            learning = [None if s else each for s, each in zip(scaled, shared, strict=True)]
            copied = regions.copy_to_group(*learning, group=replicas)
            shared = [
                original if s else c for s, original, c in zip(scaled, shared, copied, strict=True)
            ]
        k_weight, v_weight, k_bias, v_bias = shared
        weights, biases = [q._factor, k_weight, v_weight], [q.bias, k_bias, v_bias]
        outputs = gathering_linear(self, input, weights, biases, "qkv")
        return outputs[0], outputs[1], outputs[2]

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"world_size={self.group.world_size}"
        )


def _checked_heads(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    communicator: Communicator,
) -> int:
    """Return the number of key-value heads. Raise unless the heads can be split over the ranks."""
    world_size = communicator.world_size
    divisible("num_heads", num_heads, communicator)
    kv = num_heads if num_kv_heads is None else num_kv_heads
    positive(hidden_size=hidden_size, num_kv_heads=kv, head_dim=1 if head_dim is None else head_dim)
    if num_heads % kv:
        raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {kv}")
    if kv % world_size and world_size % kv:
        raise ValueError(
            f"num_kv_heads must be a multiple or a divisor of the group's size {world_size}, got {kv}"
        )
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}: pass head_dim"
        )
    return kv
