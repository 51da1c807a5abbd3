"""Ray's actors, as far as ``interlace.integrations.ray`` uses them: processes of this host."""

import importlib
import multiprocessing
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import ModuleType, SimpleNamespace
from typing import Any

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


class Remote:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def options(self, **_: Any) -> "Remote":
        return self

    def remote(self) -> Actor:
        return Actor(self._kind)


remote = Remote


def get(future: Future[Any], timeout: float | None = None) -> Any:
    return future.result(timeout)


def wait(futures: list[Future[Any]]) -> tuple[list[Future[Any]], list[Future[Any]]]:
    done = wait_for(futures, return_when=FIRST_COMPLETED).done
    first = next(each for each in futures if each in done)
    return [first], [each for each in futures if each is not first]


def kill(actor: Actor) -> None:
    actor.process.kill()
    actor.process.join()
    actor._calls.shutdown(wait=False)
