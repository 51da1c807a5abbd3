"""``src`` and ``dst`` are ranks of the default group, ``group_src`` and ``group_dst`` of the group."""

from __future__ import annotations

from typing import Any

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator


def group_rank(
    name: str,
    value: Any,
    group_value: Any,
    communicator: Communicator,
    *,
    default: int | None = None,
) -> int:
    """The rank within the group; ``name`` and ``default`` are ranks of the default group."""
    rank = communicator.rank
    if group_value is not None:
        if value is not None:
            raise ValueError(
                f"give {name} or group_{name}, not both: got {value} and {group_value} on rank {rank}"
            )
        chosen = checks.integer(f"group_{name}", group_value, rank)
        check_member(f"group_{name}", chosen, communicator)
        return chosen
    if value is None:
        if default is None:
            raise ValueError(f"give {name} or group_{name}: got neither on rank {rank}")
        value = default
    chosen = checks.integer(name, value, rank)
    try:
        return communicator.ranks.index(chosen)
    except ValueError:
        raise ValueError(
            f"{name} must be one of the group's ranks {list(communicator.ranks)}, got {chosen} "
            f"on rank {rank}"
        ) from None


def check_member(name: str, group_value: int, communicator: Communicator) -> None:
    """Raise ValueError unless ``group_value`` is a rank of the group."""
    if not 0 <= group_value < communicator.world_size:
        raise ValueError(
            f"{name} must be within 0..{communicator.world_size - 1}, got {group_value} "
            f"on rank {communicator.rank}"
        )
