"""What the fused ops take and give: whose part of each matrix, by the shapes of a run on 4 ranks."""

import torch

import interlace
from drawings.svg import Drawing

RANKS, M, K, N = 4, 64, 48, 80
OPS = {
    "all_gather_matmul": ((M // RANKS, K), (K, N // RANKS)),
    "matmul_reduce_scatter": ((M, K // RANKS), (K // RANKS, N)),
    "matmul_all_reduce": ((M, K // RANKS), (K // RANKS, N)),
}
LEFT, TOP, ROW, SCALE = 20, 26, 150, 1.5


def _shapes(op: str, input: tuple[int, int], weight: tuple[int, int]) -> tuple[int, int]:
    rows, columns = getattr(interlace, op)(torch.ones(input), torch.ones(weight)).shape
    return rows, columns


def ops() -> str:
    drawing = Drawing(TOP + ROW * len(OPS), "Whose part of input, weight and output each op has")
    for rank in range(RANKS):
        drawing.legend(LEFT + 84 * rank, 4, f"of rank {rank}", f"rank{rank}")
    drawing.legend(LEFT + 84 * RANKS, 4, "on all ranks", "sum")
    for number, (op, (input, weight)) in enumerate(OPS.items()):
        middle = TOP + ROW * (number + 0.5) + 6
        output = interlace.run(_shapes, RANKS, op, input, weight, place="sim")[0]
        summed = "" if op == "all_gather_matmul" else ": summed over ranks"
        drawing.text(LEFT, middle - 58, op + summed, "mono")
        parts = (("input", (M, K), input), ("weight", (K, N), weight), ("output", (M, N), output))
        left = float(LEFT)
        for (name, whole, part), sign in zip(parts, ("@", "=", ""), strict=True):
            height, width = (SCALE * length for length in whole)
            _matrix(drawing, left, middle - height / 2, whole, part)
            shape = f"{name} {part[0]} x {part[1]}"
            drawing.text(left + width / 2, middle + height / 2 + 14, shape, "small faint", "middle")
            drawing.text(left + width + 28, middle + 5, sign, "bold", "middle")
            left += width + 56
    return drawing.markup()


def _matrix(
    drawing: Drawing, left: float, top: float, whole: tuple[int, int], part: tuple[int, int]
) -> None:
    """A matrix in parts, one per rank along the dimension in which they are shorter."""
    height, width = (SCALE * length for length in part)
    if whole == part:
        drawing.rect(left, top, width, height, "sum")
        return
    for rank in range(RANKS):
        below, beside = (rank * (part[dim] < whole[dim]) for dim in (0, 1))
        drawing.rect(
            left + width * beside, top + height * below, width - 1, height - 1, f"rank{rank}"
        )
