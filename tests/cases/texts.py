"""Texts of tests in a file beside them: ``## name``, and then the lines of one."""

import pathlib


def texts_beside(test: str, name: str = "programs.txt") -> dict[str, str]:
    """Return the texts of a file in a test file's folder, by name."""
    text = pathlib.Path(test).with_name(name).read_text()
    parts = (part.strip("\n").partition("\n") for part in text.split("\n## ")[1:])
    return {name: lines for name, _, lines in parts}
