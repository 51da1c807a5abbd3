"""The operands and outputs of a matmul, and the arguments that describe them to the fused kernels."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments import checks
from interlace.kernels.arguments import Copies, Epilogue, Extents, Rows, Tiles, Weight
from interlace.kernels.block_scales import INNER
from interlace.kernels.launch_formulas import Line, persistent_grid
from interlace.ops.collectives import launch as plain
from interlace.ops.matmul.formats import OPERAND_FORMATS, BlockFormat, multiply_packed
from interlace.ops.op import shapes
from interlace.ops.op.op import Output
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.norms import NormTail, activate, wide
from interlace.runtime.numerics.reductions import fold, fold_unrounded
from interlace.runtime.tuning.configuration import Configuration

DESCRIPTOR_ALIGNMENT = 16
LEAST_PACKED = 32
"""The fewest numbers along k that are multiplied at once. For ``mma.sync`` Triton 3.7 gives 8 neighbouring
numbers of 4 bits to each of 4 threads, although a tile of 16 numbers has too few for them. The products are
then wrong, on GPUs as in the place ptx. Triton's pull request 11691 mends it."""


@dataclass
class Linear:
    """One weight of an op: ``output = activation(input @ weight + bias)``. ``bias_along``: "n" or "m".

    ``scales`` of fp8 operands: "tensor", one number for each, or "row", one per row of the input and per
    column of the weight. ``scale`` is the weight's, in fp32, ``row_scale`` the input's. ``fast_accum``:
    sums of fp8 products may keep fewer bits than fp32 has. ``average``: a reduction of products divides by
    the number of ranks. ``tail``: a residual is added to ``output`` and its rows are normed. ``format``:
    the format of packed operands, see ``formats.py``.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    bias_along: str = "n"
    activation: str = ""
    scales: str = ""
    scale: torch.Tensor | None = None
    fast_accum: bool = True
    row_scale: torch.Tensor | None = None
    average: bool = False
    tail: NormTail | None = None
    format: BlockFormat | None = None

    def __post_init__(self) -> None:
        if self.format is None:
            return
        self.fast_accum = self.format.fast_accum
        if self.weight.stride(-2) != 1:  # packed columns must be contiguous
            self.weight = self.weight.mT.contiguous().mT

    @property
    def unfinished(self) -> bool:
        """Whether a sum of products needs more steps before it is the output."""
        return self.bias is not None or bool(self.activation) or self.tail is not None


def rows_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``[..., k]`` as a matrix with ``dim`` as its leading index. Copy only if strides need it."""
    matrix = tensor.movedim(dim, 0).flatten(0, -2)  # reshape(-1, k) fails if k is 0
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def factors(
    input: torch.Tensor, weight: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return two matrices, whose product has ``dim`` of ``input @ weight`` as rows, and the bias' axis."""
    if dim == input.dim() - 1:
        return weight.T, input.flatten(0, -2).T, "m"
    return rows_of(input, dim), weight, "n"


def unrows(matrix: torch.Tensor, lengths: Sequence[int], dim: int) -> torch.Tensor:
    """Invert :func:`rows_of` for other columns; ``lengths`` are the leading lengths, dim first."""
    return matrix.view(*lengths, matrix.shape[-1]).movedim(0, dim)


def dense_output(matrix: torch.Tensor, view: torch.Tensor) -> Output:
    """Make an output. Without elements it has a new tensor's strides, as in Inductor."""
    if any(isinstance(length, int) and length == 0 for length in view.shape):
        view = view.new_empty(view.shape)
    return Output(matrix, view)


def gathered_rows(input: torch.Tensor, dim: int, length: Any, columns: Any, dtype: Any) -> Output:
    """Make ``[.., length, .., columns]`` for ``input`` ``[.., n, .., k]``; the matrix has ``dim`` first."""
    lengths = [n for i, n in enumerate(input.shape[:-1]) if i != dim]
    if dim == input.dim() - 1:  # every rank has all rows already
        matrix = input.new_empty([math.prod(lengths), columns], dtype=dtype)
        return Output(matrix, matrix.view(*lengths, columns))
    matrix = input.new_empty([length * math.prod(lengths), columns], dtype=dtype)
    return Output(matrix, matrix.view(length, *lengths, columns).movedim(0, dim))


def gathered_input(input: torch.Tensor, dim: int, length: Any) -> Output:
    off_dim = [n for i, n in enumerate(input.shape) if i != dim]
    whole = input.new_empty([length, *off_dim])
    flat = whole.view(whole.shape[0] * math.prod(off_dim[:-1]), off_dim[-1])
    return Output(flat, whole.movedim(0, dim))


def scattered_product(
    input: torch.Tensor, columns: Any, dim: int, length: Any, size: int, dtype: Any
) -> Output:
    """Make ``[.., n / size, .., columns]`` for ``input`` of ``[.., n, .., k]``, or the last dim split.

    ``length``: this rank's part, if parts are unequal.
    """
    lengths = list(input.shape[:-1])
    if dim == input.dim() - 1:
        part = shapes.own_length(columns, size, "the columns of weight", length)
        matrix = input.new_empty([part, math.prod(lengths)], dtype=dtype)
        return dense_output(matrix, matrix.T.view(*lengths, part))
    part = shapes.own_length(lengths[dim], size, f"dimension {dim} of input", length)
    off_dim = [n for i, n in enumerate(lengths) if i != dim]
    matrix = input.new_empty([part * math.prod(off_dim), columns], dtype=dtype)
    return dense_output(matrix, matrix.view(part, *off_dim, columns).movedim(0, dim))


def multiply(
    output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "",
    format: BlockFormat | None = None,
) -> None:
    """Write ``activation(input @ weight (+ bias))`` by torch; round once more if dtypes differ."""
    if output.dtype != input.dtype:
        assert format is not None or input.dtype != torch.uint8, "packed rows without their format"
        dtype = wide(output.dtype)
        if format is None:
            product = input.to(dtype) @ weight.to(dtype)
        else:
            product = multiply_packed(input, weight, format)
        output.copy_(activate(product if bias is None else product + bias.to(dtype), activation))
        return
    if bias is None:
        torch.mm(input, weight, out=output)
    else:
        torch.addmm(bias, input, weight, out=output)
    if activation:
        output.copy_(activate(output, activation))


def finish_sum(total: torch.Tensor, linear: Linear) -> None:
    """Write ``activation(total + bias) + residual``, rounded once, and run the tail; changes ``total``."""
    if linear.bias is not None:
        bias = linear.bias.to(total.dtype)
        total += bias if linear.bias_along == "n" else bias[:, None]
    total = activate(total, linear.activation)
    if linear.tail is not None and linear.tail.residual is not None:
        total = total + linear.tail.residual
    linear.output.copy_(total)
    if linear.tail is not None:
        linear.tail.finish(linear.output)


def sum_with_bias(parts: Sequence[torch.Tensor], linear: Linear) -> None:
    """Sum in rank order, add the bias once, activate, round once."""
    reduction = "avg" if linear.average else "sum"
    if not linear.unfinished:
        fold(reduction, parts, linear.output)
        return
    output = linear.output
    total = torch.empty(output.shape, dtype=wide(output.dtype), device=output.device)
    fold_unrounded(reduction, parts, total)
    finish_sum(total, linear)


def sum_staged(
    communicator: Communicator, workspace: Workspace, linear: Linear, offset: int
) -> None:
    plain.wait_for_all(communicator, workspace, 0)
    shape, dtype = linear.output.shape, linear.output.dtype
    parts = [workspace.data(r, offset, shape, dtype) for r in range(communicator.world_size)]
    communicator.compute.call(lambda: sum_with_bias(parts, linear), "sum")


def enqueue_product(
    communicator: Communicator, input: torch.Tensor, linear: Linear, rows: slice, label: str
) -> None:
    """Write ``activation(input @ weight + bias)`` for ``rows``, by torch on the compute stream."""
    output = linear.output[rows]
    if output.numel():
        communicator.compute.call(
            lambda: multiply(
                output, input, linear.weight, linear.bias, linear.activation, linear.format
            ),
            label,
        )


def scatter_product(
    communicator: Communicator,
    product: torch.Tensor,
    linear: Linear,
    segments: Sequence[tuple[int, int]],
) -> Event:
    """Write the engine's sum of this rank's rows of ``product``, then run the other steps."""
    parts = [product[first : first + count].view(-1) for first, count in segments]
    reduction = "avg" if linear.average else "sum"
    op, about = "matmul_reduce_scatter", (tuple(segments), product.shape, product.dtype, reduction)
    call = plain.agreed_call(communicator, op, (f"parts of {op}", *about))
    communicator.engine.reduce_scatter(call, linear.output.view(-1), parts, reduction)
    if linear.unfinished:
        output = linear.output
        communicator.compute.call(lambda: finish_sum(output.to(wide(output.dtype)), linear), "bias")
    return communicator.compute.record()


def is_aligned(tensor: torch.Tensor, row_stride: int) -> bool:
    return (
        tensor.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
        and row_stride * tensor.element_size() % DESCRIPTOR_ALIGNMENT == 0
    )


def descriptor_path(configuration: Configuration, input: torch.Tensor, weight: torch.Tensor) -> str:
    """Return the path in ``kernels/products.py`` for an aligned ``input``: "", "kn" or "nk"."""
    inner = input.shape[1]
    if not configuration.descriptors or inner == 0 or input.stride(0) < inner:
        return ""
    across, along = weight.stride(0), weight.stride(1)
    # rows may overlap, as in an expanded tensor: pointers can read them, descriptors cannot
    if along == 1 and across >= weight.shape[1] > 1 and is_aligned(weight, across):
        return "kn"
    if across == 1 and along >= inner > 1 and is_aligned(weight, along):
        return "nk"
    return ""


def input_precision(dtype: torch.dtype) -> str:
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def stores_by_descriptor(configuration: Configuration, linear: Linear, descriptors: str) -> bool:
    """Return whether tiles may be stored by a descriptor; ``descriptors`` is the path of the loads."""
    columns = linear.weight.shape[1]
    return (
        configuration.output_descriptors
        and bool(descriptors)
        and columns > 1
        and columns * linear.output.element_size() % DESCRIPTOR_ALIGNMENT == 0
        and linear.output.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
    )


def packed_step(communicator: Communicator, configuration: Configuration) -> int:
    """Return how many numbers along k of block-scaled operands are multiplied at once.

    Interpreted kernels follow the definition: sums of 128.
    """
    if not communicator.place.compiled:
        return INNER
    return min(INNER, max(LEAST_PACKED, configuration.block_k))


def product(
    communicator: Communicator,
    configuration: Configuration,
    input: torch.Tensor,
    linear: Linear,
    *,
    published: bool = False,
) -> dict[str, Any]:
    """Return the matmul's arguments without the epilogue's. ``published``: peers wait for its tiles."""
    weight, inner = linear.weight, input.shape[1]
    aligned = is_aligned(input, inner) and is_aligned(input, input.stride(0))
    may = aligned and communicator.place.descriptors
    descriptors = descriptor_path(configuration, input, weight) if may else ""
    specialized = configuration.warp_specialize and bool(descriptors)
    activated = (
        bool(linear.activation) and not published
    )  # for published tiles, the sum is activated
    tiles = Tiles(
        BLOCK_M=configuration.block_m,
        BLOCK_N=configuration.block_n,
        BLOCK_K=configuration.block_k if descriptors else configuration.pointer_block_k,
        GROUP_M=configuration.group_m,
        DESCRIPTORS=descriptors,
        INPUT_PRECISION=input_precision(input.dtype),
        FAST_ACCUM=linear.fast_accum,
        ALIGNED=aligned,
        FLATTEN=configuration.flatten and bool(descriptors),
        WARP_SPECIALIZE=specialized,
        COMPILED=communicator.place.compiled,
        SCALES=linear.scales,
        BIAS="" if linear.bias is None else linear.bias_along,
        ACTIVATION=linear.activation,
        SUBTILE=configuration.activated_parts if activated else configuration.stored_parts,
        OUT_DESCRIPTOR=stores_by_descriptor(configuration, linear, descriptors)
        and not (published and specialized),
    )
    if linear.format is not None:
        by_descriptor = descriptors == "nk" and linear.format.loads_by_descriptor(configuration)
        tiles = tiles._replace(
            BLOCK_K=packed_step(communicator, configuration) // linear.format.packed,
            DESCRIPTORS=descriptors if by_descriptor else "",
            FLATTEN=False,
            WARP_SPECIALIZE=False,
            OUT_DESCRIPTOR=False,
            NATIVE=linear.format.native_kind(configuration),
            **linear.format.kernel_constants,
        )
    return {
        "input": Rows(input, input.stride(0)),
        "weight": Weight(weight, *weight.stride()),
        "output_ptr": linear.output,
        "N": weight.shape[1],
        "K": weight.shape[0],
        "TILES": tiles,
    }


def whole_rows(rows: int, columns: int, linear: Linear) -> Tiles:
    wide = 1 << max(0, columns - 1).bit_length()
    bias = "" if linear.bias is None else linear.bias_along
    return Tiles(rows, wide, BIAS=bias, ACTIVATION=linear.activation)


def may_have_roles(
    configuration: Configuration, input: torch.Tensor, operands: dict[str, Any]
) -> bool:
    """Return whether ``warp_roles`` is requested and possible with the arguments of :func:`product`."""
    tiles, output = operands["TILES"], operands["output_ptr"]
    whole = 16 * configuration.num_warps == tiles.BLOCK_M and 32 <= tiles.BLOCK_N <= 256
    simple = tiles.OUT_DESCRIPTOR and not tiles.SCALES and tiles.COMPILED
    short = input.element_size() == output.element_size() == 2
    return configuration.warp_roles and whole and simple and short


def taken_by(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


def with_roles(
    kernel: Any, arguments: dict[str, Any], extents: tuple[int, int, int], stages: int
) -> dict[str, Any]:
    """Return the arguments of a ``kernel`` with warp roles, made from the reference kernel's."""
    return taken_by(kernel, arguments) | {"extents": Extents(*extents), "STAGES": stages}


def bias_or_none(linear: Linear) -> torch.Tensor:
    """Return the bias argument: the bias, or any tensor of its dtype if there is no bias."""
    return linear.output if linear.bias is None else linear.bias


def epilogue(linear: Linear) -> dict[str, Any]:
    row = linear.output if linear.row_scale is None else linear.row_scale
    column = linear.output if linear.scale is None else linear.scale
    return {"epilogue": Epilogue(bias_or_none(linear), row, column)}


def copies(configuration: Configuration, copiers: int, multicast: str = "") -> dict[str, Any]:
    """Return the argument about ``copiers`` that send chunks of rows."""
    sizes = configuration.copy_rows, configuration.copy_columns
    return {"COPIES": Copies(copiers, *sizes, multicast)}


def enqueue_with_sends(
    communicator: Communicator,
    op: str,
    layout: Layout,
    configuration: Configuration,
    launch: tuple[object, dict[str, Any], dict[str, Any]],
    sends: tuple[Sequence[Line], torch.Tensor],
    tiles: int,
    arrivals: Callable[[], Iterable[tuple[int, int]]],
    then: Callable[[Workspace], None],
) -> Event:
    """Enqueue an op that is one kernel: its first programs send, or the copy engine does.

    ``launch``: the kernel, its arguments and options. ``sends``: lines, and the rows that are sent.
    ``tiles``: how many the kernel computes. ``arrivals``: (source, slot) of all rows that arrive.
    ``then`` enqueues the work after the kernel.
    """
    (kernel, arguments, options), (lines, rows) = launch, sends

    def body(workspace: Workspace) -> None:
        most = max(1, communicator.place.program_limit // 4)
        copiers = min(configuration.copiers, len(lines), most)
        if lines and not copiers:
            plain.send_by_copy_engine(communicator, workspace, lines, [(rows, 0)])
        if copiers or tiles:
            resident = plain.resident_programs(communicator, configuration, copiers)
            grid = persistent_grid(copiers, tiles, max(copiers + 1, resident))
            given = {**arguments, **copies(configuration, copiers)}
            communicator.compute.launch(workspace.kernel_launch(kernel, grid, given, **options))
        if not tiles:
            # No tile, so no program has waited; but rows that arrive late would hit the next op.
            for source, slot in arrivals():
                communicator.compute.wait(workspace, source, slot)
        then(workspace)

    return communicator.enqueue(op, layout, body)


def launch_options(
    configuration: Configuration, input: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the options to compile a kernel; ``input``: a product's input, if there is one."""
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    if input is None or input.element_size() != 4:
        return options
    # Products without tensor cores: by default ptxas uses fewer registers for occupancy, and spills.
    return {**options, "options": {"maxnreg": 144}}


def checked_bias(
    bias: torch.Tensor | None, columns: int, input: torch.Tensor
) -> torch.Tensor | None:
    if bias is not None:
        if tuple(bias.shape) != (columns,):
            raise ValueError(f"bias must have shape ({columns},), got {tuple(bias.shape)}")
        checks.bias_dtype("bias", bias, input)
    return bias


def partial_products(ranks: Sequence[Any]) -> list[torch.Tensor]:
    """Return each rank's input times its weight, in fp32 or wider."""
    found = []
    for rank in ranks:
        input, dtype = rank.input, checks.output_dtype(rank.out_dtype, rank.input)
        partial = input.new_empty([*input.shape[:-1], rank.weight.shape[1]], dtype=dtype)
        kind = OPERAND_FORMATS.get(rank.format)
        multiply(partial.flatten(0, -2), rows_of(input, 0), rank.weight, None, format=kind)
        found.append(partial if dtype is torch.float64 else partial.float())
    return found
