"""Damaged copies of what interlace reads, and little memory to read them in."""

import contextlib
import gc
import json
import pathlib
import random
import resource
from collections.abc import Callable, Iterator
from typing import Any

WORDS = [n.to_bytes(8, "little", signed=True) for n in (-(1 << 63), -1, 0, 1, 255, 1 << 40)]
VALUES = (
    None,
    True,
    -1,
    0,
    1 << 70,
    0.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "9" * 50,
    [],
    {},
    [[1]],
)


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Replace, remove or insert some bytes; sometimes return only garbage, or a number of 64 bits."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randrange(400))
    data = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(data))
        data[at : at + chance.randint(0, 8)] = chance.randbytes(chance.randint(0, 8))
    if chance.random() < 0.3:
        at = chance.randint(0, len(data))
        data[at : at + 8] = chance.choice(WORDS)
    return bytes(data)


def damaged_json(whole: bytes, chance: random.Random, share: float = 0.5) -> bytes:
    """Damage a file. A ``share`` of the results is still JSON, with one value replaced or removed."""
    if chance.random() >= share:
        return damaged(whole, chance)
    at = root = json.loads(whole)
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.1:
            break
        at = at[key]
    if chance.random() < 0.2:
        del at[key]
    else:
        at[key] = chance.choice(VALUES)
    return json.dumps(root).encode()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Limit new memory to 256 MiB; tracemalloc would take ten times as long."""
    gc.collect()  # memory that is freed later would be room
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_100000_damaged(
    file: pathlib.Path, read: Callable[[], Any], refusals: type[Exception], share: float = 0.5
) -> int:
    """Read damaged copies of ``file``, and count the refusals; other errors and MemoryErrors fail."""
    whole, chance, refused = file.read_bytes(), random.Random(8), 0
    # not emptied before it is written: ext4 would then write to the disk each time
    with file.open("r+b", buffering=0) as out, little_memory():
        for _ in range(100_000):
            out.seek(0)
            out.write(data := damaged_json(whole, chance, share))
            out.truncate()
            try:
                read()
            except refusals as error:
                assert not isinstance(error.__cause__, MemoryError), data
                refused += 1
    return refused
