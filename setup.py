"""The long description: README.md, whose links to files lead somewhere from an index page too."""

import pathlib
import re

from setuptools import setup

HOME = "https://github.com/interlace-project/interlace"
LINK = re.compile(r'(?P<before>(?P<image>!\[[^]]*\]\(|src(?:set)?=")|\]\()(?P<file>[\w./-]+)')


def absolute(link: re.Match[str]) -> str:
    if not pathlib.Path(link["file"]).exists():  # it may be code, or absolute already
        return link[0]
    return f"{link['before']}{HOME}/{'raw' if link['image'] else 'blob'}/main/{link['file']}"


setup(
    long_description=LINK.sub(absolute, pathlib.Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
