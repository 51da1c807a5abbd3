"""``torch.nn.Linear`` split over a group: by output features, or by input features."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.nn.functions import regions
from interlace.nn.functions.linear import column_parallel_linear, row_parallel_linear
from interlace.nn.functions.linear_gradients import casts
from interlace.nn.functions.weight_gradients import DeferredWeightGradients
from interlace.nn.parameters.sharded_module import ShardedModule
from interlace.nn.parameters.sharding import divisible, positive
from interlace.runtime.compat.torch_modes import disable

Tensor = torch.Tensor
InitMethod = Callable[[Tensor], Any]


class LinearParameters(ShardedModule):
    """The weight ``[out, in]`` and bias of a linear layer, or parts of them; initialised as ``nn.Linear``.

    ``dim`` is that of the weight which is split: 0, and the bias with it, or 1, and the bias is replicated.
    ``init_method(weight)`` is called on the unsharded weight in place of ``nn.Linear``'s own
    initialisation; the bias is then zero, as in Megatron-core.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dim: int,
        bias: bool,
        group: Any,
        init_method: InitMethod | None,
        device: Any,
        dtype: Any,
        copies: int = 1,
    ) -> None:
        super().__init__(group)
        with self.group.accepting(type(self).__name__):
            positive(in_features=in_features, out_features=out_features)
            if copies == 1:
                name, size = (("out_features", out_features), ("in_features", in_features))[dim]
                divisible(name, size, self.group)
        self.in_features, self.out_features = in_features, out_features
        self.init_method = init_method
        made: Any = {"device": device, "dtype": dtype}
        self._add_parameter("weight", (out_features, in_features), dim, copies, **made)
        self.register_parameter("bias", None)
        if bias and dim == 0:
            self._add_parameter("bias", (out_features,), 0, copies, **made)
        elif bias:
            self._add_parameter("bias", (out_features,), None, **made)
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Any]]:
        sizes, made = (self.in_features, self.out_features), {"device": device, "dtype": dtype}
        if self.init_method is None:
            whole = torch.nn.Linear(*sizes, self.bias is not None, **made)  # type: ignore[arg-type]
            weight, bias = whole.weight, whole.bias
        else:
            weight, bias = torch.empty(sizes[::-1], **made), torch.zeros(sizes[1], **made)  # type: ignore[call-overload]
            self.init_method(weight)
        yield "weight", weight
        if self.bias is not None:
            yield "bias", bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, world_size={self.group.world_size}"
        )


def _options(layer: Any) -> dict[str, Any]:
    """The options of the linear functions that are attributes of a layer."""
    names = ("sequence_parallel", "gradient_accumulation_fusion", "deferred", "out_dtype")
    return {name: getattr(layer, name) for name in names}


def check_features(
    layer: Any,
    input: Any,
    features: int,
    meaning: str,
    weight: Tensor | None = None,
    name: str = "weight",
) -> None:
    """Raise unless ``input`` has so many features, and the dtype of the layer's ``weight``.

    What is no tensor is left to the function.
    """
    with layer.group.on(input).accepting(kind := type(layer).__name__):
        if not isinstance(input, Tensor):
            return
        if input.dim() and input.shape[-1] != features:
            raise ValueError(
                f"input must have {features} features, {meaning}, got shape {tuple(input.shape)}"
            )
        if weight is not None and not casts(input):
            checks.same_dtype("input", input.dtype, f"{name} of {kind}", weight.dtype)


def gathering_linear(
    layer: Any, input: Tensor, weights: list[Any], biases: list[Any], names: Sequence[str]
) -> list[Tensor]:
    """:func:`column_parallel_linear` with the options of ``layer``."""
    return column_parallel_linear(
        input,
        weights,
        biases,
        group=layer.group,
        gather_dim=regions.sequence_dim(input, layer.batch_first),
        save_gathered=layer.save_gathered,
        names=names,
        **_options(layer),
    )


class ColumnParallelLinear(LinearParameters):
    """``torch.nn.Linear`` whose output features are split over the group.

    Parameters
    ----------
    in_features, out_features : of the unsharded layer. The group's size divides ``out_features``.
    bias : add a bias, of which a rank has the part of its features.
    group : anything that :func:`interlace.groups.resolve` takes.
    sequence_parallel : the input is this rank's equal shard of the sequence, which is gathered inside the
        matmul. Else it is the whole, the same on all ranks.
    batch_first : the sequence is dim 1 of ``[b, s, h]``, not dim 0 of ``[s, b, h]``; of ``[s, h]`` it is
        dim 0.
    gather_output : give all features on all ranks, which go on alike.
    skip_bias_add : return ``(output, bias)`` and let the caller add it, to fuse it with what follows.
    init_method : see :class:`LinearParameters`.
    gradient_accumulation_fusion, save_gathered, deferred, out_dtype : see
        :func:`interlace.nn.column_parallel_linear`; ``deferred`` may be set later.

    Forward: ``input`` ``[s / world size, b, in] -> [s, b, out / world size]``. All gradients are complete
    after backward: those of the weight and the bias belong to this rank alone, that of the input is summed
    over the group.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     layer = nn.ColumnParallelLinear(4, 6)
    ...     with torch.no_grad():
    ...         return tuple(layer(torch.ones(3, 2, 4)).shape)
    >>> interlace.run(forward, 2)
    [(6, 2, 3), (6, 2, 3)]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
        gradient_accumulation_fusion: bool = False,
        save_gathered: bool = False,
        deferred: DeferredWeightGradients | None = None,
        out_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, 0, bias, group, init_method, device, dtype)
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.save_gathered, self.deferred, self.out_dtype = save_gathered, deferred, out_dtype

    @disable
    def forward(self, input: Tensor) -> Any:
        check_features(self, input, self.in_features, "in_features", self.weight)
        self._check_alike(self.group)
        bias = self.bias
        (output,) = gathering_linear(
            self, input, [self.weight], [None if self.skip_bias_add else bias], [""]
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
    in_features, out_features : of the unsharded layer. The group's size divides ``in_features``.
    bias : add a bias, which all ranks have whole.
    sequence_parallel : the output is this rank's equal shard of the sequence, scattered inside the matmul,
        so the group's size divides the sequence. Else it is the whole, on all ranks.
    input_is_parallel : the input has this rank's features, as a :class:`ColumnParallelLinear` gives them;
        else all, the same on all ranks.
    skip_bias_add : return ``(output, bias)``. The bias is whole, and to be added on each rank: to its rows.
    other parameters : as for :class:`ColumnParallelLinear`.

    Forward: ``input`` ``[s, b, in / world size] -> [s / world size, b, out]``. The bias is on all ranks and
    is added once. All gradients are complete after backward; under sequence parallelism that of the bias is
    summed over the group, also where the caller adds it.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     torch.manual_seed(0)  # the same on all ranks
    ...     layer = nn.RowParallelLinear(4, 6)
    ...     with torch.no_grad():
    ...         return tuple(layer(torch.ones(6, 2, 2)).shape)
    >>> interlace.run(forward, 2)
    [(3, 2, 6), (3, 2, 6)]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
        gradient_accumulation_fusion: bool = False,
        deferred: DeferredWeightGradients | None = None,
        out_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, 1, bias, group, init_method, device, dtype)
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.deferred, self.out_dtype = deferred, out_dtype

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
            self.weight,
            None if self.skip_bias_add else self.bias,
            group=self.group,
            scatter_dim=regions.sequence_dim(input, self.batch_first),
            **_options(self),
        )
        if not self.skip_bias_add:
            return output
        bias: Any = self.bias
        if self.sequence_parallel:
            (bias,) = regions.copy_to_group(bias, group=self.group)
        return output, bias
