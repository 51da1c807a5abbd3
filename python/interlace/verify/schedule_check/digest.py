"""Digests of what ranks returned: equal where two schedules gave the same results."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch

DEEPEST = 50


def digest_of(value: Any) -> str:
    """Equal for equal results. Tensors and arrays count by their bits, containers and dataclasses by
    what is in them, other objects by their type alone: they may differ in their address only.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_bytes(value, DEEPEST))
    return digest.hexdigest()


def _bytes(value: Any, depth: int) -> bytes:
    name = type(value).__name__.encode()
    if depth == 0 or value is None:
        return name
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        data = b"" if array.dtype.hasobject else array.tobytes()
        return f"{array.shape}{array.dtype}".encode() + data
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value).encode()
    parts: list[bytes]
    if isinstance(value, (list, tuple)):
        parts = [_bytes(each, depth - 1) for each in value]
    elif isinstance(value, (set, frozenset)):
        parts = sorted(_bytes(each, depth - 1) for each in value)
    elif isinstance(value, dict):
        parts = [_bytes(k, depth - 1) + b":" + _bytes(v, depth - 1) for k, v in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        parts = [_bytes(getattr(value, field.name, None), depth - 1) for field in fields]
    else:
        return name
    return name + b"(" + b",".join(str(len(part)).encode() + b" " + part for part in parts) + b")"


def _tensor_bytes(value: torch.Tensor) -> bytes:
    head = f"{tuple(value.shape)}{value.dtype}{value.layout}".encode()
    if value.layout == torch.sparse_coo:
        value = value.detach().to_dense()
    if value.layout != torch.strided or value.device.type == "meta" or not value.numel():
        return head
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return head + plain.view(torch.uint8).numpy().tobytes()
