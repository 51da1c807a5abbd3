"""The environment variables that interlace reads; docs/reference/environment.md has this table."""

import difflib
import logging
import os
import re
import warnings

LEVELS = ("warning", "info", "debug")
VARIABLES = {
    "INTERLACE_DEBUG": "`info`, `debug` (or `warning`): the log on stderr, see the log",
    "INTERLACE_SECRET": "the secret of a job, see security",
    "INTERLACE_TRUST_NETWORK": "`1`: several hosts need no secret, see security",
    "INTERLACE_TUNE_CACHE": "the file of tuned configurations, or `off`, see tuning",
    "INTERLACE_CALIBRATION": "the file of this machine's figures, or `off`, see tensors",
    "INTERLACE_RECORD": "the folder in which failed ranks record their last ops, or `off`, see records",
    "INTERLACE_MACHINE_CODE": "`0`: Python and torch alone do collectives on a CPU",
    "INTERLACE_SYMM_MEM": "`1`: torch's fused ops run on interlace, see torch.compile",
    "INTERLACE_TRACEBACK": "not empty: errors of `python -m interlace` have a traceback",
    "INTERLACE_WITHOUT_NVSHMEM": "`1`: tests that need NVSHMEM's device library are skipped",
    "INTERLACE_UNTRIED": "set by interlace: the warning of untried releases was given",
    "INTERLACE_UNKNOWN": "set by interlace: the warning of unknown variables was given",
    "INTERLACE_COMPILING": "set by interlace: this process compiles kernels for another one",
    "INTERLACE_RESTARTED": "set by interlace: the command has started itself anew",
}
SWITCHES = [name for name, text in VARIABLES.items() if text.startswith(("`0`:", "`1`:"))]
_TYPO, _LIKE = 0.8, 0.6  # difflib's ratio: RECORDS is a typo of RECORD, CACHE is like TUNE_CACHE
_OF_KUBERNETES = re.compile(r"_(SERVICE|PORT)(_|$)")  # set for a service named interlace


def check_environment() -> None:
    """Raise ValueError for a typo of a variable's name, and for a switch that is neither 0 nor 1.

    Any other ``INTERLACE_*`` may be a variable of the user's job. One warning names all of these, from the
    process that imports interlace first.
    """
    for name in SWITCHES:
        if (value := os.environ.get(name, "")) not in ("", "0", "1"):
            raise ValueError(f"{name} in the environment must be 0 or 1, got {value!r}")
    names = [name for name in os.environ if name.startswith("INTERLACE_")]
    unknown = [n for n in names if n not in VARIABLES and not _OF_KUBERNETES.search(n)]
    first = "INTERLACE_UNKNOWN" not in os.environ and os.environ.get("RANK", "0") == "0"
    for name in unknown:
        if meant := _nearest(name, _TYPO):
            raise ValueError(
                f"{name} is not an environment variable of interlace; did you mean {meant}?"
            )
    if unknown and first:
        os.environ["INTERLACE_UNKNOWN"] = "1"
        named = [
            f"{name} (did you mean {meant}?)" if (meant := _nearest(name, _LIKE)) else name
            for name in unknown
        ]
        warnings.warn(
            f"interlace ignores {', '.join(named)} in the environment; "
            "docs/reference/environment.md lists the variables that it reads",
            stacklevel=3,
        )


def _nearest(name: str, likeness: float) -> str:
    known = [each for each, text in VARIABLES.items() if not text.startswith("set by interlace")]
    words = [each.removeprefix("INTERLACE_") for each in known]
    found = difflib.get_close_matches(name.removeprefix("INTERLACE_"), words, 1, likeness)
    return f"INTERLACE_{found[0]}" if found else ""


def debugging() -> bool:
    """Return whether the user is debugging interlace itself and wants full tracebacks."""
    return os.environ.get("INTERLACE_DEBUG", "").lower() == "debug"


def write_log() -> None:
    """Make the logger ``interlace`` write to stderr if ``INTERLACE_DEBUG`` is set, or raise ValueError."""
    value, log = os.environ.get("INTERLACE_DEBUG", ""), logging.getLogger("interlace")
    if (level := value.lower()) not in ("", *LEVELS):
        raise ValueError(f"INTERLACE_DEBUG must be one of {', '.join(LEVELS)}, got {value!r}")
    if level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False
