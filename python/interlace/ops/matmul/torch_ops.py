"""``torch.ops.symm_mem.*`` by interlace, with torch's own arguments, shapes, strides and dtypes.

They serve code written for torch's ops, and torch's compiler with ``_micro_pipeline_tp``: without a GPU,
and on GPUs after ``interlace.take_over_symm_mem()``. A group's name is the name of a torch group with any
backend, or of an interlace group. ``functions.py`` registers the ops. Inputs need not be in symmetric
memory.

The fused ops are interlace's for floats; for other dtypes they are a collective and a matmul. The scaled
ones gather and call ``torch._scaled_mm``, as torch's own fallback does. ``_low_contention_*`` are in flight
until ``_c10d_functional.wait_tensor``. All others are complete when they return. As in torch there are no
gradients. Inputs that require gradients cause a warning.
"""

from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.groups.groups import resolve
from interlace.ops.collectives.records import ALL_GATHER, ALL_REDUCE, REDUCE, REDUCE_SCATTER
from interlace.ops.matmul import block_scaled, gather, reduce
from interlace.ops.matmul.formats import OPERAND_FORMATS, Scaled, multiply_packed
from interlace.ops.matmul.scaled import repeat_scales, scaled_mm
from interlace.ops.op import shapes
from interlace.ops.op.op import Op, Started, finish, register as register_work
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import comparing

_BY_NUMBER = {
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
}  # c10::ScalarType; torch's own table has wrong numbers for fp8 (2.13)

Tensor = torch.Tensor


def _ranks(group_name: str, tensor: Tensor) -> Communicator:
    """Return the group's ranks on the device of ``tensor``: a group of torch may serve two devices."""
    return resolve(group_name).on(tensor)


def _begin_into(op: Op, group_name: str, out: Tensor | None, *given: Any) -> Started:
    more = {} if out is None else {"out": out}
    return op.begin(_ranks(group_name, given[0]), given, **more)


def _now(started: Started) -> Tensor:
    return finish(started)[0]


def _in_flight(op: Op, group_name: str, tensor: Tensor, *options: Any) -> Tensor:
    communicator = _ranks(group_name, tensor)
    started = op.begin(communicator, (tensor, *options))
    register_work(started, communicator)
    return started.outputs[0].data


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (A, *Bs)):
        checks.warn_without_gradients("torch.ops.symm_mem.fused_all_gather_matmul")
    communicator = _ranks(group_name, A)
    last = gather_dim % A.dim() == A.dim() - 1
    if not Bs or A.dtype not in checks.FLOAT_DTYPES:
        whole, dim = _gather(communicator, A, gather_dim), 0 if last else gather_dim
        rows = whole.movedim(dim, 0)  # with the strides of torch's op: ``dim`` is outermost
        return whole if return_A else None, [torch.matmul(rows, B).movedim(0, dim) for B in Bs]
    call = gather.AllGatherMatmulArguments(A, Bs, [], gather_dim, return_A)
    products = list(finish(gather.start(communicator, call)))
    whole_or_none = products.pop() if return_A else None
    if whole_or_none is not None and last:
        whole_or_none = whole_or_none.contiguous()
    return whole_or_none, products


def _gather(communicator: Communicator, tensor: Tensor, dim: int) -> Tensor:
    """Gather along ``dim``, which is outermost in memory, unless it is the last dimension."""
    if dim % tensor.dim() == tensor.dim() - 1:
        return _now(ALL_GATHER.begin(communicator, (tensor, dim)))
    first = tensor.movedim(dim, 0).contiguous()
    return _now(ALL_GATHER.begin(communicator, (first, 0))).movedim(0, dim)


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    if torch.is_grad_enabled() and (A.requires_grad or B.requires_grad):
        checks.warn_without_gradients("torch.ops.symm_mem.fused_matmul_reduce_scatter")
    communicator = _ranks(group_name, A)
    if A.dtype not in checks.FLOAT_DTYPES or reduce_op not in checks.REDUCE_OPS:
        return _scatter(communicator, torch.matmul(A, B), reduce_op, scatter_dim)
    call = reduce.ReductionArguments(A, B, reduce_op=reduce_op, scatter_dim=scatter_dim)
    return _now(reduce.start(communicator, call)).contiguous()


def _scatter(communicator: Communicator, tensor: Tensor, reduce_op: str, dim: int) -> Tensor:
    return _now(REDUCE_SCATTER.begin(communicator, (tensor.contiguous(), reduce_op, dim)))


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    communicator = _ranks(group_name, A)
    with communicator.accepting("fused_all_gather_scaled_matmul"):
        for name, values in (
            ("B_scales", B_scales),
            ("biases", biases),
            ("result_scales", result_scales),
            ("out_dtypes", out_dtypes),
            ("use_fast_accum", use_fast_accum),
        ):
            if len(values) != len(Bs):
                raise ValueError(
                    f"len({name}) must be the same as len(Bs), {len(Bs)}, got {len(values)}"
                )
        dim = shapes.dimension("gather_dim", gather_dim, A.dim())
        # torch passes a list of dtypes as numbers
        dtypes = [_BY_NUMBER[dtype] if isinstance(dtype, int) else dtype for dtype in out_dtypes]
        full = [*A.shape]
        full[dim] *= communicator.world_size
        blocks = _blocks((A, _own_scales(communicator, A, A_scale, dim, full)), Bs, B_scales)
    block_scaled.agree_on_scales(communicator, "fused_all_gather_scaled_matmul", blocks)
    if blocks:
        return _gather_blocks(communicator, blocks, dim, biases, result_scales, dtypes)
    with communicator.accepting("fused_all_gather_scaled_matmul"):
        sharded = A_scale.shape == (*A.shape[:-1], 1)
        replicated = not sharded and A_scale.numel() != 1
        if replicated and list(A_scale.shape[:-1]) != full[:-1]:
            raise ValueError(
                "Invalid scale shape for fp8 all-gather "
                f"(shard shape: {A.shape}, scale shape: {A_scale.shape})"
            )
    whole = _gather(communicator, A, dim)
    scale = A_scale
    if sharded:
        scale = _gather(communicator, A_scale, dim)
    if sharded or replicated:
        scale = scale.movedim(dim, 0).flatten(0, -2)
    rows = whole.movedim(dim, 0)
    options = zip(Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True)
    products = []
    for B, B_scale, bias, result_scale, out_dtype, fast in options:
        left = rows.flatten(0, -2)
        product: Any = scaled_mm(
            left, B, *repeat_scales(left, B, scale, B_scale), bias=bias, scale_result=result_scale,
            out_dtype=out_dtype, use_fast_accum=fast,
        )  # fmt: skip
        products.append(product.unflatten(0, rows.shape[:-1]).movedim(0, dim))
    return whole, products


def _blocks(
    input: tuple[Tensor, Tensor], Bs: Sequence[Tensor], B_scales: Sequence[Tensor]
) -> list[Scaled]:
    """Return these operands as block-scaled ones, with scales in ``torch._scaled_mm``'s layout."""
    weights = [
        (B, block_scaled.plain_scales(B, scale, -2)) for B, scale in zip(Bs, B_scales, strict=True)
    ]
    return block_scaled.operands(input, weights)


def _own_scales(
    communicator: Communicator, A: Tensor, scales: Tensor, dim: int, full: Sequence[int]
) -> Tensor:
    """Return the scales of this rank's rows, from these or from all ranks' scales, which torch accepts."""
    if list(scales.shape[:-1]) != list(full[:-1]) or communicator.world_size == 1:
        return block_scaled.plain_scales(A, scales, -1)
    whole = torch.empty(full, dtype=A.dtype, device="meta")
    if all(block_scaled.are_swizzled_scales_of(each, scales) for each in (A, whole)):
        raise ValueError(
            f"A_scale of shape {tuple(scales.shape)} may be the swizzled scales of this rank's rows or of "
            "all ranks' rows, which are as many; pass this rank's as a flat tensor"
        )
    plain = block_scaled.plain_scales(whole, scales, -1)
    return plain.narrow(dim, communicator.rank * A.shape[dim], A.shape[dim])


def _gather_blocks(
    communicator: Communicator,
    operands: Sequence[Any],
    dim: int,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor, list[Tensor]]:
    """Return the gathered values and the block-scaled products, in fp32, rounded once."""
    with communicator.accepting("fused_all_gather_scaled_matmul"):
        _refuse_result_scale(*result_scales)
        wide = [None if bias is None else bias.float() for bias in biases]
        call = gather.AllGatherMatmulArguments(
            operands[0], list(operands[1:]), wide, dim, True, out_dtype=torch.float32
        )
        call = block_scaled.pack(call, check_scales=True)
    with comparing(("k", operands[0].shape[-1])):
        *products, rows = finish(gather.start(communicator, call))
    gathered, _ = block_scaled.with_gathered(operands[0], (rows, None))
    return gathered.values.contiguous(), [
        each.to(dtype or torch.bfloat16) for each, dtype in zip(products, dtypes, strict=True)
    ]


def _refuse_result_scale(*scales: Tensor | None) -> None:
    if any(scale is not None for scale in scales):
        raise ValueError("result_scale is not supported for block-scaled operands; pass None")


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    communicator = _ranks(group_name, A)
    with communicator.accepting("fused_scaled_matmul_reduce_scatter"):
        scale = A_scale
        blocks = _blocks((A, block_scaled.plain_scales(A, A_scale, -1)), [B], [B_scale])
        if not blocks and A_scale.numel() != 1:
            if A_scale.shape[:-1] != A.shape[:-1]:
                raise ValueError(
                    "For row-wise scaling, the leading dims of A_scale must match the leading dims of A "
                    f"(A shape: {A.shape}, A_scale shape: {A_scale.shape})"
                )
            scale = A_scale.flatten(0, -2).contiguous()
        if blocks:
            _refuse_result_scale(result_scale)
            product = _product_of_blocks(blocks[0], blocks[1], bias).to(out_dtype or torch.bfloat16)
        else:
            left = A.flatten(0, -2).contiguous()
            product = scaled_mm(
                left, B, *repeat_scales(left, B, scale, B_scale), bias=bias,
                scale_result=result_scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
            )  # fmt: skip
        lengths = A.shape[:-1] if output_shape is None else output_shape[:-1]
        whole = product.view(*lengths, B.shape[1])
    return _scatter(communicator, whole, reduce_op, orig_scatter_dim)


def _product_of_blocks(left: Scaled, right: Scaled, bias: Tensor | None) -> Tensor:
    call = reduce.ReductionArguments(left, right)
    call = block_scaled.pack(call, check_scales=True)
    rows, kind = call.input.flatten(0, -2), OPERAND_FORMATS[call.format]
    product = multiply_packed(rows, call.weight, kind)
    return product if bias is None else product + bias


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return _in_flight(ALL_GATHER, group_name, tensor, 0)


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _in_flight(REDUCE_SCATTER, group_name, tensor, reduce_op, 0)


def one_shot_all_reduce(
    input: Tensor, reduce_op: str, group_name: str, out: Tensor | None = None
) -> Tensor:
    return _now(_begin_into(ALL_REDUCE, group_name, out, input, reduce_op))


def one_shot_all_reduce_copy(symm_buffer: Tensor, *arguments: Any) -> Tensor:
    """Copy through the buffer in which a GPU's kernel stages the input."""
    return one_shot_all_reduce(*arguments)


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return one_shot_all_reduce(input, reduce_op, group_name, input)


one_shot_all_reduce_out = two_shot_all_reduce_out = one_shot_all_reduce
one_shot_all_reduce_copy_out = one_shot_all_reduce_copy
multimem_all_reduce_ = two_shot_all_reduce_
multimem_one_shot_all_reduce = multimem_one_shot_all_reduce_out = one_shot_all_reduce


def multimem_one_shot_reduce_out(
    input: Tensor, reduce_op: str, root: int, group_name: str, out: Tensor
) -> Tensor:
    """Write to ``out`` on rank ``root``; other ranks' ``out`` stays unchanged."""
    communicator = _ranks(group_name, input)
    reduced = _now(REDUCE.begin(communicator, (input, reduce_op, root)))
    return out.copy_(reduced) if communicator.rank == root else out


def multimem_all_gather_out(input: Tensor, group_name: str, out: Tensor) -> Tensor:
    return _now(_begin_into(ALL_GATHER, group_name, out, input, 0))


def reduce_scatter_out(
    input: Tensor, group_name: str, split_last_dim: bool, output: Tensor
) -> Tensor:
    dim = -1 if split_last_dim else 0
    return _now(_begin_into(REDUCE_SCATTER, group_name, output, input, "sum", dim))
