"""Plain data as bytes: all data that processes send each other, except tensors and users' objects.

A reader may not trust the writer of such bytes. So reading makes only values of these types, checks each
length against the bytes that are left before it allocates, and calls no code except the records' own::

    N T F          None, True, False
    i I f          int of 8 bytes; other ints, decimal; float
    s b            str, bytes: length, then UTF-8 or the bytes
    t l d          tuple, list: length, items; dict: length, keys and values in turn
    v w            tuple, list of ints of 8 bytes
    D              torch.dtype, by name
    R              a record: name, tuple of its fields

A *record* is a dataclass or NamedTuple that was registered by :func:`record`, under its name.
"""

import dataclasses
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.runtime.core.errors import InterlaceError

DEEPEST = 32

C = TypeVar("C", bound=type)

_COUNT, _INT, _FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_LARGEST = 1 << 63
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_LETTERS = {None: b"N", True: b"T", False: b"F"}
_torch: Any = sys.modules.get("torch")  # readers of records do without it: a dtype is then its name
_Size, _Dtype = (_torch.Size, _torch.dtype) if _torch else (tuple, str)
_DTYPES = {str(var): var for var in vars(_torch or sys).values() if isinstance(var, _Dtype)}
_records: dict[str, tuple[type, tuple[str, ...]]] = {}


class UnreadableError(InterlaceError):
    """Bytes from a peer are not a valid message."""


def record(cls: C) -> C:
    """Allow instances of ``cls``, a dataclass or NamedTuple of plain data, to be sent."""
    names = getattr(cls, "_fields", None) or tuple(f.name for f in dataclasses.fields(cls))
    _records[cls.__name__] = cls, names
    return cls


def dumps(value: object) -> bytes:
    """Return ``value`` as bytes; TypeError if it contains something that is not plain data."""
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def _text(letter: bytes, text: bytes) -> bytes:
    return letter + _COUNT.pack(len(text)) + text


def _write(value: Any, put: Callable[[bytes], None]) -> None:
    kind = type(value)
    if kind is str:
        put(_text(b"s", value.encode(errors="surrogatepass")))
    elif kind is int:
        small = -_LARGEST <= value < _LARGEST
        put(b"i" + _INT.pack(value) if small else _text(b"I", b"%d" % value))
    elif value is None or kind is bool:
        put(_LETTERS[value])
    elif kind in (tuple, list, _Size):
        listed = kind is list
        if len(value) > 1 and set(map(type, value)) == {int}:
            try:
                numbers = struct.pack(f"<{len(value)}q", *value)
            except struct.error:
                pass
            else:
                put((b"w" if listed else b"v") + _COUNT.pack(len(value)) + numbers)
                return
        put((b"l" if listed else b"t") + _COUNT.pack(len(value)))
        for each in value:
            _write(each, put)
    elif kind is bytes:
        put(_text(b"b", value))
    elif kind is float:
        put(b"f" + _FLOAT.pack(value))
    elif kind is _Dtype:
        put(_text(b"D", str(value).encode()))
    elif kind is dict:
        put(b"d" + _COUNT.pack(len(value)))
        for pair in value.items():
            for each in pair:
                _write(each, put)
    elif _records.get(kind.__name__, (None,))[0] is kind:
        put(_text(b"R", kind.__name__.encode()))
        _write(tuple(getattr(value, name) for name in _records[kind.__name__][1]), put)
    else:
        raise TypeError(f"{kind.__name__} is not plain data, so ranks cannot send it to each other")


def loads(data: bytes) -> Any:
    """Return the value whose :func:`dumps` is ``data``; UnreadableError if there is no such value."""
    try:
        value, end = _read(data, 0, DEEPEST)
    except UnreadableError:
        raise
    except Exception as error:  # from struct, from codecs, from a record's checks
        raise UnreadableError(f"unreadable message of {len(data)} bytes: {error}") from error
    if end != len(data):
        raise UnreadableError(f"{len(data) - end} bytes follow the end of a message")
    return value


def _read(data: bytes, at: int, depth: int) -> tuple[object, int]:
    letter, at = data[at : at + 1], at + 1
    if letter in _CONSTANTS:
        return _CONSTANTS[letter], at
    if letter == b"i":
        return _INT.unpack_from(data, at)[0], at + 8
    if letter == b"f":
        return _FLOAT.unpack_from(data, at)[0], at + 8
    if not letter or letter not in b"sbItldvwDR":
        raise UnreadableError(f"a message of {len(data)} bytes has {letter!r} at byte {at - 1}")
    (count,) = _COUNT.unpack_from(data, at)
    at += 4
    size = 8 * count if letter in b"vw" else count  # each item has at least one byte
    if at + size > len(data):
        raise UnreadableError(f"a message of {len(data)} bytes ends before {count} of {letter!r}")
    if letter in b"vw":
        numbers = struct.unpack_from(f"<{count}q", data, at)
        return (list(numbers) if letter == b"w" else numbers), at + size
    if letter in b"tld":
        return _read_items(data, at, letter, count, depth - 1)
    text, at = data[at : at + size], at + size
    if letter == b"b":
        return bytes(text), at
    if letter == b"D":
        return _DTYPES[text.decode()] if _torch else text.decode(), at
    if letter == b"I":
        return int(text), at
    if letter == b"R":
        cls, names = _records[text.decode()]
        values, at = _read(data, at, depth - 1)
        if type(values) is not tuple or len(values) != len(names):
            raise UnreadableError(f"a {cls.__name__} has {len(names)} fields, not {values!r:.99}")
        return cls(*values), at
    return text.decode(errors="surrogatepass"), at


def _read_items(data: bytes, at: int, letter: bytes, count: int, depth: int) -> tuple[object, int]:
    if depth < 0:
        raise UnreadableError(f"the values of a message are nested more than {DEEPEST} deep")
    items = []
    for _ in range(count * 2 if letter == b"d" else count):
        item, at = _read(data, at, depth)
        items.append(item)
    if letter == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return (tuple(items) if letter == b"t" else items), at
