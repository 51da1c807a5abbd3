"""A store whose values only the processes of one job can write: each value has a keyed digest.

docs/explanation/security.md says against whom. A value with another digest counts as missing where a
missing value is allowed, and is an error elsewhere. Key and value are digested together, so that a value
cannot be moved to another key.
"""

import hmac
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

from interlace.runtime.compat.torch_groups import Store
from interlace.runtime.core.errors import InterlaceError, PlaceUnavailableError, StoreGoneError

SECRET, TRUST = "INTERLACE_SECRET", "INTERLACE_TRUST_NETWORK"
DIGEST_BYTES = 32
STORE_POLL_SECONDS = 2e-3
_NOTHING = "nothing"  # no rank writes this value


def job_secret() -> bytes:
    """Return the secret that the job's launcher has put into the environment, or b"" if there is none."""
    return os.environ.get(SECRET, "").encode()


def need_secret(rank: int) -> None:
    """Raise PlaceUnavailableError if ranks of several hosts could not tell each other from strangers."""
    if not job_secret() and os.environ.get(TRUST, "") != "1":
        raise PlaceUnavailableError(
            f"rank {rank}: a group on several hosts needs a secret of the job. Set {SECRET} to the "
            f"same text on all ranks, or {TRUST}=1 if you trust everybody who reaches the ranks' ports"
        )


def digest(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(b"%d:%b" % (len(part), part) for part in parts), "sha256")


class SignedStore(Store):
    """``underlying_store`` with signed values. Keep a reference to it while C++ code uses it."""

    def __init__(self, underlying_store: Store, secret: bytes) -> None:
        super().__init__()
        self.underlying_store, self.secret = underlying_store, secret

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.underlying_store.set(key, digest(self.secret, key.encode(), data) + data)  # type: ignore[arg-type]

    def valid(self, key: str, found: bytes) -> bytes | None:
        """Return the data of a value ``found`` in the underlying store, or None if it is not signed."""
        signature, data = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        valid = hmac.compare_digest(signature, digest(self.secret, key.encode(), data))
        return data if valid else None

    def get(self, key: str) -> bytes:
        if (data := self.valid(key, self.underlying_store.get(key))) is None:
            raise InterlaceError(
                f"the store's value of {key!r} is not signed with this job's secret: somebody else has "
                f"written it, or {SECRET} differs between ranks"
            )
        return data

    def check(self, keys: list[str]) -> bool:
        return all(glance(self, key) is not None for key in keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.underlying_store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)


class PolledStore(Store):
    """A prefix of ``underlying_store`` for C++ code that waits in it, in another thread.

    Other threads can use the store meanwhile; a TCPStore blocks them while it waits itself. Waits end when
    ``over()`` returns True. Keep a reference to it while C++ code uses it.
    """

    def __init__(self, underlying_store: Store, prefix: str, over: Callable[[], bool]) -> None:
        super().__init__()
        self.underlying_store, self._prefix, self._over = underlying_store, prefix, over

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(f"{self._prefix}/{key}", value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(f"{self._prefix}/{key}")

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        store = bare(self.underlying_store)
        for key in keys:
            while not store.check([f"{self._prefix}/{key}"]):
                if self._over():
                    raise InterlaceError(f"nobody waits for {key!r} any more")
                time.sleep(STORE_POLL_SECONDS)


def glance(store: Store, key: str) -> bytes | None:
    """Return the value of ``key``, or None if no valid one exists. ``get`` would wait without a bound."""
    if isinstance(store, SignedStore):
        found = glance(store.underlying_store, key)
        return None if found is None else store.valid(key, found)
    try:
        found = store.compare_set(key, _NOTHING, _NOTHING)  # changes nothing
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]  # torch adds a C++ backtrace
        raise StoreGoneError(
            f"the store does not answer ({reason}): the process that serves it has ended. This is "
            "the process of rank 0, unless a launcher serves the store"
        ) from error
    return None if found == _NOTHING.encode() else found


_NO_SECRET = "no secret"
_MARK = re.compile(f"{_NO_SECRET}|[0-9a-f]{{64}}".encode())


def show_secret(store: Store, key: str, rank: int) -> None:
    """Store a digest below ``key`` from which other ranks see whether they have the same secret."""
    bare(store).set(f"{key}/secret/{rank}", _secret_mark(store, key))


def shows_other_secret(store: Store, key: str, rank: int) -> bool:
    """Return whether ``rank`` has shown another secret, or that it has none. Ignores other values."""
    mark = glance(bare(store), f"{key}/secret/{rank}") or b""
    return bool(_MARK.fullmatch(mark)) and mark != _secret_mark(store, key).encode()


def _secret_mark(store: Store, key: str) -> str:
    if not isinstance(store, SignedStore):
        return _NO_SECRET
    return digest(store.secret, b"the secret for", key.encode()).hex()


def bare(store: Store) -> Store:
    """Return the store below the signatures."""
    return store.underlying_store if isinstance(store, SignedStore) else store


def sign(store: Store) -> Store:
    secret = job_secret()
    return SignedStore(store, secret) if secret else store
