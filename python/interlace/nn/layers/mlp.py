"""The feed-forward block: gather in the first matmul, reduce-scatter in the second."""

from collections.abc import Callable
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.kernels.epilogue import Activation
from interlace.nn.functions.weight_gradients import DeferredWeightGradients
from interlace.nn.layers import linear
from interlace.nn.parameters.sharding import OnGroup, divisible, positive
from interlace.runtime.compat.torch_modes import disable
from interlace.runtime.numerics.activations import activate

Tensor = torch.Tensor


class SequenceParallelMLP(OnGroup):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` with ``gated``.

    Parameters
    ----------
    hidden_size : features of input and output.
    intermediate_size : features between, a multiple of the group's size.
    activation : "relu", "gelu", "gelu_tanh" or "silu", or a function of a tensor that goes elementwise.
    gated : there is a second first layer, ``gate``, that shares the gather (SwiGLU for "silu").
    output_init_method : ``init_method`` of ``down``, by default the same.
    other parameters : as for :class:`ColumnParallelLinear`, for all layers.

    Forward: ``input`` ``[s / world size, b, hidden]`` to the same; without ``sequence_parallel`` the whole
    on all ranks. State dicts are those of a module that has ``gate`` (if gated), ``up`` and ``down`` as
    ``nn.Linear``, made in this order.

    Raises ValueError or TypeError naming the argument, the values and the rank. Semantics:
    ``torch.nn.Linear`` twice; Megatron-core's ``MLP``.

    >>> def forward():
    ...     torch.manual_seed(0)  # the same on all ranks
    ...     with torch.no_grad():
    ...         return tuple(nn.SequenceParallelMLP(4, 8)(torch.ones(3, 1, 4)).shape)
    >>> interlace.run(forward, 2)
    [(3, 1, 4), (3, 1, 4)]
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation | Callable[[Tensor], Tensor] = "gelu",
        *,
        gated: bool = False,
        bias: bool = True,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        init_method: linear.InitMethod | None = None,
        output_init_method: linear.InitMethod | None = None,
        gradient_accumulation_fusion: bool = False,
        save_gathered: bool = False,
        deferred: DeferredWeightGradients | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(group)
        with self.group.accepting("SequenceParallelMLP"):
            positive(hidden_size=hidden_size)
            divisible("intermediate_size", intermediate_size, self.group)
            named = None if callable(activation) else checks.activation("activation", activation)
        self.hidden_size = hidden_size
        self.activation = activation if named is None else named
        self.save_gathered = save_gathered
        options: dict[str, Any] = {
            "bias": bias,
            "group": self._held,
            "sequence_parallel": sequence_parallel,
            "batch_first": batch_first,
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "deferred": deferred,
            "device": device,
            "dtype": dtype,
        }
        first = {**options, "init_method": init_method, "save_gathered": save_gathered}
        self.gate = (
            linear.ColumnParallelLinear(hidden_size, intermediate_size, **first) if gated else None
        )
        self.up = linear.ColumnParallelLinear(hidden_size, intermediate_size, **first)
        options["init_method"] = init_method if output_init_method is None else output_init_method
        self.down = linear.RowParallelLinear(intermediate_size, hidden_size, **options)

    @disable
    def forward(self, input: Tensor) -> Tensor:
        up = self.up.weight
        linear.check_features(self, input, self.hidden_size, "hidden_size", up, "up.weight")
        layers = [self.up] if self.gate is None else [self.gate, self.up]
        for layer in layers:
            layer._check_alike(layer.group, layer=self)
        return self._on_all_ranks(self._through, input, layers)

    def _through(self, input: Tensor, layers: list[linear.ColumnParallelLinear]) -> Tensor:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        names = ["up"] if self.gate is None else ["gate", "up"]
        outputs = linear.gathering_linear(self.up, input, weights, biases, names)
        how = self.activation
        hidden = activate(outputs[0], how) if isinstance(how, str) else how(outputs[0])
        if self.gate is not None:
            hidden = hidden * outputs[1]
        return self.down(hidden)  # type: ignore[no-any-return]
