"""What pyproject.toml cannot say.

The long description is README.md, whose links to files lead somewhere from an index page too. An editable
install is a .pth file, because type checkers do not follow the import hook that it would be otherwise.
"""

import pathlib
import re

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

HOME = "https://github.com/interlace-project/interlace"
LINK = re.compile(r'(?P<before>(?P<image>!\[[^]]*\]\(|src(?:set)?=")|\]\()(?P<file>[\w./-]+)')


def absolute(link: re.Match[str]) -> str:
    if not pathlib.Path(link["file"]).exists():  # it may be code, or absolute already
        return link[0]
    return f"{link['before']}{HOME}/{'raw' if link['image'] else 'blob'}/main/{link['file']}"


class Editable(editable_wheel):
    """All packages are below python/, by its two links, where there are any: those of a repository."""

    def finalize_options(self) -> None:
        if pathlib.Path("python/interlace/kernels").is_dir():
            self.distribution.package_dir = {"": "python"}
        super().finalize_options()


setup(
    cmdclass={"editable_wheel": Editable},
    long_description=LINK.sub(absolute, pathlib.Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
