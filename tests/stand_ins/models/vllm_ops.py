"""vLLM's ops for the norms after an all-reduce, for machines without vLLM: its schemas, computed by torch.

The sources are vLLM's ``csrc`` and ``vllm.ir``. Ops of ``_C`` change their arguments, unlike ``vllm_ir``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

SMALLEST_SCALE = 1 / (448 * 512)
Tensor = torch.Tensor
SCHEMAS = {
    "vllm::all_reduce": "(Tensor tensor, str group_name) -> Tensor",
    "vllm::reduce_scatter": "(Tensor tensor, int dim, int world_size, str group_name) -> Tensor",
    "vllm::all_gather": "(Tensor tensor, int dim, int world_size, str group_name) -> Tensor",
    "vllm_ir::rms_norm": (
        "(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor"
    ),
    "vllm_ir::fused_add_rms_norm": (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> "
        "(Tensor, Tensor)"
    ),
    "_C::rms_norm": "(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "_C::fused_add_rms_norm": (
        "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()"
    ),
    "_C::dynamic_per_token_scaled_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()"
    ),
    "_C::static_scaled_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()"
    ),
    "_C::rms_norm_static_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()"
    ),
    "_C::fused_add_rms_norm_static_fp8_quant": (
        "(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, float epsilon) "
        "-> ()"
    ),
    "_C::rms_norm_dynamic_per_token_quant": (
        "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub, "
        "Tensor!? residual) -> ()"
    ),
}


def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    assert group_name == "tp:0"
    made = tensor.clone()
    dist.all_reduce(made)
    return made


def reduce_scatter(tensor: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    return all_reduce(tensor, group_name).chunk(world_size, dim)[dist.get_rank()].clone()


def all_gather(tensor: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    assert group_name == "tp:0"
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim)


def normed(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: Any = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


def added(x: Tensor, x_residual: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return normed(total, *how), total


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    result.copy_(normed(input, weight, epsilon))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Any, epsilon: float) -> None:
    residual.add_(input)
    input.copy_(normed(residual, weight, epsilon))


def by_row(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:
    assert scale_ub is None
    scale.copy_((input.abs().amax(-1, keepdim=True).float() / 448).clamp(min=SMALLEST_SCALE))
    static(result, input, scale)


def static(result: Tensor, input: Tensor, scale: Tensor, group_shape: Any = None) -> None:
    result.copy_((input.float() / scale).clamp(-448, 448))


def normed_static(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    static(result, normed(input, weight, epsilon), scale)


def added_static(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    normed_static(result, residual.add_(input), weight, scale, epsilon)


def normed_by_row(
    result: Tensor,
    input: Tensor,
    weight: Any,
    scale: Tensor,
    epsilon: float,
    ub: Any,
    residual: Any,
) -> None:
    total = input if residual is None else residual.add_(input)
    by_row(result, normed(total, weight, epsilon), scale, ub)


KERNELS = (
    *(all_reduce, reduce_scatter, all_gather, normed, added),
    *(rms_norm, fused_add_rms_norm, by_row, static, normed_static, added_static, normed_by_row),
)
_libraries: list[Any] = []
_defined: set[str] = set()


def define_ops(schemas: dict[str, str], kernels: Sequence[Callable[..., Any]]) -> bool:
    """Define each schema's op with the kernel at its place; return False if this process has them."""
    if _defined.issuperset(schemas):
        return False
    for (name, schema), kernel in zip(schemas.items(), kernels, strict=True):
        namespace, op = name.split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(op + schema)
        library.impl(op, kernel, "CompositeExplicitAutograd")
        _libraries.append(library)
    _defined.update(schemas)
    return True


def define() -> None:
    """Define vLLM's ops and their fake forms, once in a process."""
    if not define_ops(SCHEMAS, KERNELS):
        return
    register: Any = torch.library.register_fake
    register("vllm::all_reduce", lambda tensor, _: torch.empty_like(tensor))
    register("vllm::reduce_scatter", lambda x, dim, n, _: torch.empty_like(x.chunk(n, dim)[0]))
    register("vllm::all_gather", lambda x, dim, n, _: torch.empty_like(torch.cat([x] * n, dim)))
