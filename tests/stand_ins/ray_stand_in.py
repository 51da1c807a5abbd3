"""Ray's actors, as far as ``interlace.integrations.ray`` uses them: processes of this host."""

import importlib
import multiprocessing
import sys
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait as wait_for,
)
from types import ModuleType, SimpleNamespace
from typing import Any

CPUS = 4.0
sys.modules["ray.util"] = util = ModuleType("ray.util")
util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]


def _serve(connection: Any, module: str, name: str) -> None:
    actor = getattr(importlib.import_module(module), name)()
    while True:
        method, arguments = connection.recv()
        try:
            connection.send((True, getattr(actor, method)(*arguments)))
        except Exception as error:
            connection.send((False, error))


class Actor:
    def __init__(self, kind: type) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        given = theirs, kind.__module__, kind.__name__
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self._calls = ThreadPoolExecutor(1)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self._calls.submit(self._call, method, arguments)
        )

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._connection.send((method, arguments))
        right, answer = self._connection.recv()
        if not right:
            raise answer
        return answer


class Unplaced:
    """An actor for which there is no room: its calls wait."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Future())


class Remote:
    def __init__(self, kind: type) -> None:
        self._kind, self._cpus = kind, 1

    def options(self, num_cpus: int = 1) -> "Remote":
        self._cpus = num_cpus
        return self

    def remote(self) -> Actor | Unplaced:
        return Actor(self._kind) if self._cpus <= CPUS else Unplaced()


remote = Remote


def get(future: Future[Any], timeout: float | None = None) -> Any:
    return future.result(timeout)


def wait(
    futures: list[Future[Any]], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    when = FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED
    done = wait_for(futures, timeout, when).done
    first = [each for each in futures if each in done][:num_returns]
    return first, [each for each in futures if each not in first]


def cluster_resources() -> dict[str, float]:
    return {"CPU": CPUS}


available_resources = cluster_resources


def kill(actor: Actor | Unplaced) -> None:
    if isinstance(actor, Unplaced):
        return
    actor.process.kill()
    actor.process.join()
    actor._calls.shutdown(wait=False)
