"""Plain data that processes tell each other: it comes back as it was; what nobody sends does nothing."""

import builtins
import math
import pathlib
import pickle
import random
import re
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.distributed import HashStore

from cases import damage
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call, compare
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts import links, pieces as hosts_pieces, wires
from interlace.runtime.places.hosts.host_map import Card
from interlace.runtime.processes import dump, recorder, rendezvous
from interlace.runtime.processes.control import said
from interlace.runtime.processes.rendezvous import _card
from interlace.runtime.processes.segment import PAGE, Identity
from interlace.runtime.processes.signed_store import SignedStore
from interlace.runtime.tuning.calibration import Link, LinkProtocol
from tiers import thorough

LEAST_BYTES = 1 << 20

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.builds(LinkProtocol, st.integers(), st.floats(allow_nan=False), st.floats(allow_nan=False)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(st.integers(-(2**63), 2**63 - 1)),
        st.dictionaries(st.one_of(st.integers(), st.text()), inner),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    return type(one) is type(other) and bool(one == other)


@given(values)
def test_what_is_sent_comes_back(value: Any) -> None:
    assert same(plain.loads(plain.dumps(value)), value)


@pytest.mark.parametrize(
    "value", [(1, 2), [1, 2], (True, 1), [], 2**63, -(2**63), -(2**70), "\ud800"]
)
def test_what_looks_alike_stays_apart(value: Any) -> None:
    assert same(plain.loads(plain.dumps(value)), value)


def test_no_number_comes_back() -> None:
    assert math.isnan(plain.loads(plain.dumps(math.nan)))


class Stranger(NamedTuple):
    number: int


@pytest.mark.parametrize("value", [object(), len, Stranger(1), {1, 2}, torch.ones(2)])
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(value).__name__} is not plain data"):
        plain.dumps([value])


class Evil:
    """A pickle from anyone who can reach a store or a socket."""

    def __reduce__(self) -> Any:
        return exec, ("import builtins; builtins.evil_has_run = True",)


def evil_has_run() -> bool:
    return bool(vars(builtins).pop("evil_has_run", False))


def packet(data: bytes) -> Any:
    whole = data[: links.PACKET_BYTES].ljust(links.PACKET_BYTES, b"\0")
    return links.Packet.unpack(torch.frombuffer(bytearray(whole), dtype=torch.uint8))


STORE = HashStore()
SIGNED = SignedStore(STORE, b"secret")
END = rendezvous.Rendezvous(0, 2, bytes(16))
END.addresses = {1: b""}
END.close()


def stored(data: bytes) -> bytes:
    STORE.set("key", data)  # type: ignore[arg-type]
    assert not SIGNED.check(["key"])
    return bytes(SIGNED.get("key"))


def label(data: bytes) -> Any:
    return END._sender(data, 3)


def _region() -> bytes:
    """The record of a rank with ops of all kinds."""
    region = memoryview(bytearray(recorder.REGION_BYTES))
    kept = recorder.FlightRecorder(region)
    kept.about(("a group", 0, (4, 5), (11, 12), (4, 5)))
    terms = ("shape", (4,)), ("dtype", torch.float32), ("reduce op", "sum")
    for number in (1, 2):
        told = kept.told(Call("all_reduce", terms).message)
        kept.begins(recorder.MESSAGES, number, 0, 0, 0, 0, told)
        kept.other(Call("send", terms).message, peer=1, tag=7)
        kept.other_ended(kept.other("barrier"))
    return bytes(region)


REGION = _region()
PLACES = 0, recorder.MESSAGES, recorder.OTHERS, recorder.LOG
"""In a region: whose it is, its entries, its texts."""


def shown(records: list[recorder.RankRecord]) -> None:
    """Show the records as the command does."""
    for record in records:
        assert record.name in record.ranks and record.pid in record.pids
        dump.as_torch([record])
        assert all(str(op) for op in (*record.collectives, *record.transfers))


def memory(data: bytes) -> None:
    """Return ``data`` in a record's memory, at a place that its first byte chooses."""
    at = PLACES[data[0] % len(PLACES)] if data else 0
    region = REGION[:at] + data[1:] + REGION[at + len(data) - 1 :] if data else REGION
    shown([recorder.read_rank(region[: len(REGION)], 1, 0.0, "")])


def records_in(data: bytes) -> None:
    shown(recorder.read_foot(data + recorder._FOOT.pack(len(data), recorder._MAGIC), "a file"))


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "plain": plain.loads,
    "call": lambda data: compare([data, Call("barrier").message]),
    "call of the first": lambda data: compare([data]),
    "packet": packet,
    "card": Card.unpack,
    "messages of a host": lambda data: hosts_pieces._messages(data, 2),
    "address on another host": lambda data: wires.read_address(data, 1),
    "segment": Identity.unpack,
    "label": label,
    "signed value": stored,
    "address": _card,
    "what a rank says": lambda data: said(data[:PAGE].ljust(PAGE, b"\0")),
}
RECORDS: dict[str, Callable[[bytes], Any]] = {
    "memory of a record": memory,
    "file of records": lambda data: shown(recorder.read_foot(data, "a file")),
    "records of a file": records_in,
}
VALID = [
    plain.dumps([b"one", b"two"]),
    plain.dumps(Card("host", 7, None)),
    plain.dumps(("10.0.0.1", 29500)),
    plain.dumps({"a": (1, 2.5, None), "b": [torch.int64, 1 << 70]}),
    plain.dumps(Link(0, 2, "all_gather", (LinkProtocol(0, 1.0, 2.0),))),
    Call("all_reduce", (("dtype of tensor", torch.float32), ("lengths", [3, 4]))).message,
    plain.dumps(("all_reduce", False, "no")),
    links.Packet(links.ROW, 1, 2, (3, 4, 5)).pack().numpy().tobytes(),
    links.Packet(links.ABORT, content=b"because").pack().numpy().tobytes(),
    Identity(bytes(16), 0, 2, 4096).pack(),
    (7).to_bytes(8, "little") + b"\0interlace",
    pickle.dumps(Evil()),
]
VALID_RECORDS = [
    recorder.foot([recorder.read_rank(REGION, None, 0.0, "")]),
    plain.dumps([recorder.read_rank(REGION, 1, 0.0, "why")]),
    *(bytes((index,)) + REGION[at : at + 600] for index, at in enumerate(PLACES)),
    pickle.dumps(Evil()),
]
KINDS = {"messages": (DECODERS, VALID), "records": (RECORDS, VALID_RECORDS)}
deep = b"l\1\0\0\0" * 5000 + b"N"
records = b"R\4\0\0\0Card" * 5000
many = b"t\xff\xff\xff\xff"


@st.composite
def damaged(draw: Any, valid: list[bytes]) -> bytes:
    """Draw a valid message with some bytes replaced, removed or inserted."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(data)


def tried(data: bytes, decoders: dict[str, Callable[[bytes], Any]] = DECODERS) -> None:
    """Every decoder must return or refuse the data, without running code or taking much memory."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for name, decode in decoders.items():
        try:
            decode(data)
        except (InterlaceError, ValueError, TypeError) as error:
            # a misuse is what a call that was read says of its terms
            assert isinstance(error, InterlaceError) or name.startswith("call"), (name, error)
            assert not isinstance(error.__cause__, MemoryError), (name, error)
    assert tracemalloc.get_traced_memory()[1] - before < LEAST_BYTES + 200 * len(data)
    assert not evil_has_run()


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_refused(kind: str) -> None:
    decoders, valid = KINDS[kind]

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(damaged(valid), st.binary(max_size=400)))
    @example(deep)
    @example(records)
    @example(many)
    @example(VALID[0] + b"more")
    @example(pickle.dumps(Evil()))
    def on(data: bytes) -> None:
        tried(data, decoders)

    tracemalloc.start()
    try:
        on()
    finally:
        tracemalloc.stop()


@thorough
@pytest.mark.parametrize("kind", KINDS)
def test_100000_damaged_ones_are_refused(kind: str) -> None:
    """Each seed gives twenty: hypothesis needs longer to draw one than all decoders to refuse it."""
    decoders, valid = KINDS[kind]

    @settings(max_examples=5000, deadline=None)
    @given(st.integers(0, 1 << 64))
    def on(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            tried(damage.damaged(chance.choice(valid), chance), decoders)

    with damage.little_memory():
        on()


def test_who_takes_more_memory_is_found() -> None:
    """This is the negative control of the limit, also for a reader that reports another error."""

    def greedy(data: bytes) -> None:
        try:
            bytes(1 << 45)
        except Exception as error:
            raise plain.UnreadableError("too much") from error

    with damage.little_memory(), pytest.raises(AssertionError, match="greedy"):
        tried(b"", {"greedy": greedy})


def test_a_pickle_would_have_run() -> None:
    pickle.loads(pickle.dumps(Evil()))
    assert evil_has_run()


def test_a_signed_value_is_of_its_key_and_its_secret() -> None:
    store = HashStore()
    ours, theirs = SignedStore(store, b"ours"), SignedStore(store, b"theirs")
    ours.set("a", b"value")
    assert ours.check(["a"]) and ours.get("a") == b"value"
    assert not theirs.check(["a"])
    store.set("b", store.get("a"))
    assert not ours.check(["b"])
    with pytest.raises(InterlaceError, match="'b' is not signed with this job's secret"):
        ours.get("b")


def test_who_unpickles() -> None:
    """Only a process that started its children itself, and collectives of objects, unpickle."""
    root = pathlib.Path(__file__).parents[3]
    files = [file for folder in ("runtime", "python") for file in (root / folder).rglob("*.py")]
    reads = re.compile(r"pickle\.loads?\b|from pickle|Unpickler|import pickle as")
    loads = {str(file.relative_to(root)) for file in files if reads.search(file.read_text())}
    pools = {f"runtime/{folder}/pool.py" for folder in ("places", "compiler")}
    assert loads == {*pools, "python/interlace/ops/collectives/objects.py"}
