"""interlace.tensor on processes: meshes of two dims, DTensors, gradients through one rank."""

from pathlib import Path

import interlace
from multi.tensor import sharded_ranks as ranks


def test_meshes_of_two_dims(tmp_path: Path) -> None:
    arguments = (ranks.on_meshes, 4, str(tmp_path / "store"))
    assert interlace.run(*arguments, place="shm") == ["done"] * 4


def test_to_and_from_dtensors(tmp_path: Path) -> None:
    arguments = (ranks.as_dtensors, 4, str(tmp_path / "store"))
    for uneven, partial in interlace.run(*arguments, place="shm"):
        assert "rank 0 has (1, 2), torch.chunk gives it (3, 2)" in uneven
        assert "rank 3 has (4, 2), torch.chunk gives it (2, 2)" in uneven
        assert "not a part of a tensor but of a sum" in partial


def test_gradients_through_one_rank() -> None:
    found = interlace.run(ranks.through_one_rank, 3, place="shm")
    values = [
        (3.0 * n) ** 2 for n in range(5)
    ]  # rank 1 has no part, all but the first are rank 2's
    grads = [2 * 9.0 * n * n for n in range(5)]
    assert [each[0] for each in found] == ["Placeholder", "Tensor", "Placeholder"]
    assert found[0] == ["Placeholder", values, grads]
    assert [each[1:] for each in found[1:]] == [[[], None]] * 2


def test_functional_collectives_take_placeholders_from_receivers() -> None:
    whole, parts = [0.0, 1.0, 2.0, 3.0], ([0.0, 1.0], [2.0, 3.0])
    found = interlace.run(ranks.received_by_functional, 2, place="shm")
    assert found == [[whole, parts[0], [4.0] * 4, True], [whole, parts[1], None, True]]
