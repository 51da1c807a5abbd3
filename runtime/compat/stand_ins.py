"""Modules and attributes that are replaced while something is imported or runs."""

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

now: dict[str, str] = {}
"""The present stand-ins by the name that they replace; also for processes that import the same files."""


on_simulated_ranks: list[Callable[[], tuple[dict[str, object], Mapping[str, object]]]] = []
"""Functions that return the objects and names replaced while ranks are simulated in turns in one thread."""


def as_op(function: Callable[..., object], name: str) -> Callable[..., object]:
    """Return ``function`` with what torch reads when it defines an op in a run, or visits all used ops."""
    attributes = {"default": function, "_qualified_op_name": name, "_op": function}
    vars(function).update(attributes, overloads=list, op_overloads=list)
    return function


_ABSENT = object()
# where a value was set, its name, and its previous value
_entries: list[tuple[dict[str, object], str, object]] = []


@contextlib.contextmanager
def simulating() -> Iterator[None]:
    """Mark that ranks are simulated within the block."""
    with contextlib.ExitStack() as leaving:
        for names, values in (rank() for rank in on_simulated_ranks):
            for name, value in values.items():
                put(leaving, names, name, value)
        yield


@contextlib.contextmanager
def installing(modules: Mapping[str, str]) -> Iterator[None]:
    """Within the block, ``import`` finds stand-ins by these names: parents first, "" is an empty module.

    "module:name" names the function ``name``, in both. An empty module and a package without a parent stand
    for a package: its other modules come from the real package, if there is one. They are
    imported again within the block and are dropped afterwards, because they refer to the stand-ins.
    """
    with contextlib.ExitStack() as leaving:
        _forget(leaving, {name for name in modules if "." not in name})
        for real, name in modules.items():
            where, _, function = real.partition(":")
            if function:
                value = getattr(importlib.import_module(name.partition(":")[0]), function)
                put(leaving, vars(importlib.import_module(where)), function, value)
                put(leaving, now, real, name)
                continue
            parent, _, last = real.rpartition(".")
            module = importlib.import_module(name) if name else types.ModuleType(real)
            if not parent and (not name or hasattr(module, "__path__")):
                module = _package(real, module)
            elif not name:
                module.__spec__ = importlib.machinery.ModuleSpec(real, None)
            put(leaving, sys.modules, real, module)
            # `import a.b as c` takes the attribute of a, not the entry of sys.modules. But the attribute
            # may be a function of the same name, as `triton_dist.jit` is in a module of the same name.
            if parent:
                names = vars(importlib.import_module(parent))
                if not isinstance(names.get(last), types.FunctionType):
                    put(leaving, names, last, module)
            put(leaving, now, real, name)
        yield


def _forget(leaving: contextlib.ExitStack, packages: set[str]) -> None:
    """Remove ``packages`` from the imported modules, and again when ``leaving`` is left."""

    def known() -> dict[str, types.ModuleType]:
        return {name: m for name, m in sys.modules.items() if name.partition(".")[0] in packages}

    def recall() -> None:
        for name in known():
            del sys.modules[name]
        sys.modules.update(before)

    before = known()
    leaving.callback(recall)
    for name in before:
        del sys.modules[name]


def _package(real: str, module: types.ModuleType) -> types.ModuleType:
    """Return ``module``'s contents as the package ``real``, under whose name ``from`` looks for modules."""
    package = types.ModuleType(real, module.__doc__)
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    vars(package).update(names, __path__=_FoldersOfPackage(real))
    package.__spec__ = importlib.machinery.ModuleSpec(real, None, is_package=True)
    return package


class _FoldersOfPackage(list[str]):
    """The folders of the real package, looked up when they are needed, because ``sys.path`` changes."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self._package = package

    def __iter__(self) -> Iterator[str]:
        for finder in sys.meta_path:
            spec = finder.find_spec(self._package, None)
            if spec is not None:
                return iter(spec.submodule_search_locations or ())
        return iter(())


Replacement = tuple[Any, str, Any]
"""An object, the name of its attribute, and the new value."""


@contextlib.contextmanager
def replacing(*replacements: Replacement) -> Iterator[None]:
    """Set the objects' own attributes in order; afterwards restore or remove exactly what was there."""
    before = []
    try:
        for target, name, value in replacements:
            before.append((target, name, vars(target).get(name, _ABSENT)))
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            if value is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, value)


def put(leaving: contextlib.ExitStack, where: dict[str, Any], key: str, value: object) -> None:
    """Set an entry until ``leaving`` is left."""
    entry = where, key, where.get(key, _ABSENT)
    _entries.append(entry)
    where[key] = value

    def undo() -> None:
        del _entries[max(i for i, each in enumerate(_entries) if each is entry)]
        _set(*entry)

    leaving.callback(undo)


def _set(where: dict[str, object], key: str, value: object) -> None:
    if value is _ABSENT:
        where.pop(key, None)
    else:
        where[key] = value


@contextlib.contextmanager
def _nothing_stands_in() -> Iterator[None]:
    """Within the block, every replaced entry has its original value."""
    entries = list(_entries)
    values = []
    for where, key, before in reversed(entries):
        values.append(where.get(key, _ABSENT))
        _set(where, key, before)
    try:
        yield
    finally:
        for (where, key, _), value in zip(entries, reversed(values), strict=True):
            _set(where, key, value)


@contextlib.contextmanager
def imported_as_it_is(package: str, then: Callable[[types.ModuleType], None]) -> Iterator[None]:
    """Within the block, modules of ``package`` see the real objects while they are imported.

    So they keep no reference to installed stand-ins. ``then`` is called with each such module.
    """

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if not name.startswith(f"{package}."):
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                loader: Any = spec.loader
                loader.exec_module = functools.partial(execute, loader)
            return spec

    def execute(loader: Any, module: types.ModuleType) -> None:
        del loader.exec_module
        with _nothing_stands_in():
            loader.exec_module(module)
        then(module)

    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)
