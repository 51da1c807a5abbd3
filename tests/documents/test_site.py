"""The documentation site: it builds strictly, without a network, and has every page and public name."""

import importlib
import importlib.util
import inspect
import operator
import os
import pathlib
import pydoc
import re
import shlex
import subprocess
import sys
from typing import Any

import interlace
import pages
from interlace.cli.main import COMMANDS
from tiers import thorough

ROOT = pages.ROOT
# Whose names have to be on pages below docs/reference/api.
PUBLIC = (
    "interlace",
    "interlace.experts",
    "interlace.functional",
    "interlace.verify",
    "interlace.compile",
    "interlace.symmetric_memory",
    "interlace.tensor",
    "interlace.nn",
    "interlace.nn.functional",
    "interlace.integrations.megatron",
    "interlace.integrations.ray",
    "interlace.benchmark",
)
# Other names of functions that are there, which the page of collectives lists; and modules.
ALIASES = {
    "interlace.all_gather_into_tensor",
    "interlace.all_gather_single",
    "interlace.reduce_scatter_tensor",
    "interlace.reduce_scatter_single",
    "interlace.symmetric_memory",
    "interlace.functional.GroupSpec",
}

# What a browser would fetch from elsewhere.
FOREIGN = r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\srel=\"?stylesheet[^>]*\shref=\"?https?://"


def offline(*command: str) -> subprocess.CompletedProcess[str]:
    nowhere = "http://127.0.0.1:9"
    variables = {"http_proxy": nowhere, "https_proxy": nowhere, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )


def missing(text: str) -> list[str]:
    """Files of tests and benchmarks that a page names and that are not there, or lack the function."""
    found = []
    for file, function in re.findall(r"`((?:tests|benchmarks)/[\w./]+\.\w+)(?:::(\w+))?", text):
        path = ROOT / file
        if not path.exists() or (function and f"def {function}(" not in path.read_text()):
            found.append(f"{file}::{function}")
    return found


def test_what_pages_say_proves_something_is_there() -> None:
    assert not {
        page.name: gone
        for page in (ROOT / "docs").rglob("*.md")
        if (gone := missing(page.read_text()))
    }
    assert missing(
        "`tests/documents/test_site.py::test_none`, `tests/gone.py`, `tests/documents/test_site.py`"
    ) == ["tests/documents/test_site.py::test_none", "tests/gone.py::"]


def address(page: str) -> str:
    """The file of the site that is made of a page."""
    folder, _, name = page.removesuffix(".md").rpartition("/")
    return "/".join(part for part in (folder, name, "index.html") if part not in ("", "index"))


def redirects() -> dict[str, str]:
    """The new page of every old one, from mkdocs.yml."""
    _, _, maps = (ROOT / "mkdocs.yml").read_text().partition("redirect_maps:\n")
    return dict(re.findall(r"^ +([\w/-]+\.md): ([\w/-]+\.md)$", maps, re.MULTILINE))


def moved_sections() -> dict[str, str]:
    """The new address of every section that is on another page now, from moved.js."""
    script = (ROOT / "docs/moved.js").read_text()
    return dict(re.findall(r'^  "(.+)": "(.+)",$', script, re.MULTILINE))


def test_old_addresses_lead_to_pages() -> None:
    commands = {f"reference/commands/{name}.md" for name in ("index", *COMMANDS)}
    old = redirects()
    assert len(old) > 50 and commands < set(old.values())
    assert len(moved_sections()) > 40
    assert not [page for page in old if (ROOT / "docs" / page).exists()]
    assert not [
        page for page in set(old.values()) - commands if not (ROOT / "docs" / page).exists()
    ]


@thorough
def test_the_site_builds_and_asks_nobody(tmp_path: pathlib.Path) -> None:
    here = ("-o", ".venv/docs", f"PY={sys.executable}", f"SITE={tmp_path}")  # and no .venv
    done = offline(*shlex.split("make docs"), *here)
    assert done.returncode == 0, done.stderr[-3000:]
    built = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.html")}
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert address(name) in built, name
    assert {f"reference/commands/{name}/index.html" for name in COMMANDS} < built
    assert set(map(address, redirects())) < built
    for old, new in moved_sections().items():
        page, _, anchor = new.partition("#")
        text = (tmp_path / page / "index.html").read_text()
        assert (tmp_path / old.partition("#")[0] / "index.html").exists(), old
        assert not anchor or f'id="{anchor}"' in text, new
    foreign = re.compile(FOREIGN)
    for name in built:
        assert not foreign.search((tmp_path / name).read_text()), (
            f"{name} asks for something elsewhere"
        )
    samples = {"fused": "interlace.all_gather_matmul", "nn": "interlace.nn.RMSNorm"}
    for page, name in samples.items():
        page_text = (tmp_path / f"reference/api/{page}/index.html").read_text()
        assert f'id="{name}"' in page_text, name
    assert "Any strides." in (tmp_path / "reference/api/fused/index.html").read_text()
    collectives = (tmp_path / "reference/api/collectives/index.html").read_text()
    assert "NOT_GIVEN" not in collectives and "<code>async_op</code>" in collectives


@thorough
def test_a_link_to_nowhere_is_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# One\n\n[two](#two)\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: docs\nnav: [index.md]\nplugins: []\nhooks: []\n"
    )
    mkdocs = (sys.executable, "-m", "mkdocs", "build", "--strict")
    files = ("--site-dir", str(tmp_path / "site"), "--config-file", str(tmp_path / "mkdocs.yml"))
    done = offline(*mkdocs, *files)
    assert done.returncode != 0 and "'#two'" in done.stderr


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference/api").glob("*.md"))
    there = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    wanted = {
        f"{module}.{name}"
        for module in PUBLIC
        for name in importlib.import_module(module).__all__
        if not name.startswith("_")
    }
    whole = tuple(f"{name}." for name in there if inspect.ismodule(sys.modules.get(name)))
    assert {name for name in wanted - set(there) if not name.startswith(whole)} == ALIASES
    assert len(there) == len(set(there))


def test_links_of_the_pages_at_the_root_lead_somewhere() -> None:
    """Those of docs/ are looked at by the build. Pages that are part of the site, too, lead to no file."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()):
            here = name == "README.md" and (ROOT / target).exists()
            assert target.startswith("https://") or here, f"{name}: {target}"


def test_every_argument_of_every_command_is_on_a_page() -> None:
    module = loaded("docs/commands.py")
    every = module.commands()
    assert set(every) == set(COMMANDS)
    for name, parser in every.items():
        page = module.page(name, parser)
        assert f"[`{name}`]({name}.md)" in module.overview(every)
        for action in parser._actions[1:]:
            for word in action.option_strings or [action.metavar or action.dest]:
                assert re.search(rf"^`.*{re.escape(word)}.*`$", page, re.MULTILINE), (name, word)
    assert "](../../how-to/gpu/bench.md)" in module.page("bench", every["bench"])
    assert "](../../how-to/gpu/bench.md)" not in module.page("doctor", every["doctor"])


def test_every_public_name_is_in_the_index() -> None:
    module = loaded("docs/names.py")
    names = module.LIST.read_text().split()
    page = module.index(names)
    entries = re.findall(r"^- `(\w+)`: (.*)$", page, re.MULTILINE)
    assert [last for last, _ in entries] == sorted(
        {last for last, _ in entries}, key=lambda last: (last.lower(), last)
    )
    listed = [
        f"{module}.{last}"
        for last, modules in entries
        for module in re.findall(r"`(.*?)`", modules)
    ]
    assert sorted(listed) == [name for name in names if "._" not in name]
    assert "- `all_gather_matmul`: [`interlace`][interlace.all_gather_matmul], " in page


def loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, ROOT / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unknown(text: str) -> list[str]:
    """Dotted names of interlace in a page that lead nowhere."""
    found = []
    for name in re.findall(r"`(interlace(?:\.\w+)+)", text):
        try:
            pydoc.locate(name) or operator.attrgetter(name.partition(".")[2])(interlace)
        except AttributeError:
            found.append(name)
    return found


def test_names_that_stand_for_those_of_other_libraries_are_there() -> None:
    page = (ROOT / "docs/how-to/migrate/libraries.md").read_text()
    assert page.count("`interlace.") > 50 and unknown(page) == []
    assert unknown("`interlace.all_gather`, `interlace.nn.gone`") == ["interlace.nn.gone"]
