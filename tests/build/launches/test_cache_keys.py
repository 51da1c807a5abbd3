"""Keys in Triton's cache are the same whatever a process has compiled before."""

import json
import subprocess
import sys

from cases.texts import texts_beside
from tiers import thorough

PROGRAM = texts_beside(__file__)["cache keys"]


def keys(whose: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return the keys of two processes; one of them asks for them in the other order."""
    command = [sys.executable, "-c", PROGRAM, whose]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[tuple[dict[str, str], list[str]]] = json.loads(done.stdout)
    return found


def test_keys_do_not_depend_on_what_was_asked_for_before() -> None:
    (forwards, several), (backwards, _) = keys("ours")
    assert len(forwards) > 100 and forwards == backwards
    assert several == [], "Triton sorts constants of one name by the addresses of their modules"


@thorough
def test_control_keys_of_triton_alone_depend_on_it() -> None:
    (forwards, _), (backwards, _) = keys("theirs")
    assert forwards != backwards
