"""Options of a command, declared once: the fields of a dataclass are its arguments."""

import argparse
import contextlib
import dataclasses
import inspect
from typing import Any, ClassVar, TypeVar

from interlace.runtime.tuning.table import BUILDABLE

MOST = 1 << 24
STATUSES = (
    (0, "all is well"),
    (2, "an argument or a file is wrong, or an op failed"),
    (130, "Ctrl-C"),
    (143, "SIGTERM"),
)
"""The exit statuses of every command. A command adds its own."""
Options = TypeVar("Options", bound="CommandOptions")


def option(
    default: Any = dataclasses.MISSING, *, help: str, positional: bool = False, **keywords: object
) -> Any:
    """Return a field of an options class. ``keywords`` are arguments of ``argparse``'s ``add_argument``.

    ``also`` among them is a second name of the option, for users who expect that name.
    """
    metadata = {"positional": positional, "help": help, **keywords}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """Arguments of a command. The docstring of the class is its description."""

    epilog: ClassVar[str] = ""
    statuses: ClassVar[tuple[tuple[int, str], ...]] = ()
    """Exit statuses of this command besides ``STATUSES``, and when it returns them."""

    def interprets(self) -> bool | None:
        """Return whether kernels run in the interpreter; None if that does not matter."""
        return None


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It reports unknown arguments itself."""

    def parse_known_args(self, *arguments: object, **options: object) -> Any:
        parsed, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


# the field ``world_size`` becomes ``--world-size``
def add_command(commands: Any, name: str, line: str, kind: type[CommandOptions]) -> None:
    """Add the command ``name``. The field ``world_size`` of ``kind`` becomes ``--world-size``."""
    text = inspect.getdoc(kind) or ""
    statuses = sorted([*STATUSES, *kind.statuses])
    lines = [f"  {status:<4} {meaning}\n" for status, meaning in statuses]
    parser = commands.add_parser(
        name,
        help=line,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=text,
        epilog=f"{kind.epilog}exit status:\n{''.join(lines)}",
    )
    for field in dataclasses.fields(kind):
        keywords = dict(field.metadata)
        names = [field.name if keywords.pop("positional") else f"--{field.name.replace('_', '-')}"]
        names += [also] if (also := keywords.pop("also", "")) else []
        if field.default is not dataclasses.MISSING:
            is_list = isinstance(field.default, tuple)
            keywords["default"] = list(field.default) if is_list else field.default
        parser.add_argument(*names, **keywords)


def from_arguments(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """Return ``kind`` with the parsed values; lists become tuples."""
    names = [field.name for field in dataclasses.fields(kind)]
    values = {name: getattr(arguments, name) for name in names}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def positive_int(text: str, most: int = MOST) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    if int(text) > most:
        raise argparse.ArgumentTypeError(f"must be within 1..{most}, got {text}")
    return int(text)


def world_size(text: str) -> int:
    from interlace.kernels.signal import MAX_WORLD_SIZE  # imports Triton

    return positive_int(text, MAX_WORLD_SIZE)


def seed_number(text: str) -> int:
    """Return ``text`` as a seed that torch's generators take, for ``type=``."""
    with contextlib.suppress(ValueError):
        if 0 <= int(text) < 1 << 64:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number within 0..2**64 - 1, got {text!r}")


def _numbers(text: str, example: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like {example}, got {text!r}") from None


def world_sizes(text: str) -> list[int]:
    """Return a list such as "2,3,4,8", for ``type=``."""
    return [world_size(str(size)) for size in _numbers(text, "2,3,4,8")]


def arches(text: str) -> list[int]:
    """Return a list such as "80,90,100", for ``type=``."""
    found = _numbers(text.replace("sm_", ""), "80,90,100")
    unknown = [arch for arch in found if arch not in BUILDABLE]
    if unknown:
        known = ", ".join(map(str, BUILDABLE))
        raise argparse.ArgumentTypeError(f"must be among {known}, got {unknown[0]}")
    return found
