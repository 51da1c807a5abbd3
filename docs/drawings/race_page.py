"""A screenshot of the page that ``verify --html`` writes about the race of ``race.py``; needs Chromium."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from drawings.race import MEETING, RECIPE

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 1080


def race_page() -> bytes:
    """Return the screenshot as PNG. Raises FileNotFoundError without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"race_page needs one of {', '.join(BROWSERS)}")
    before, _, after = RECIPE.read_text().rpartition(MEETING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wrong.py").write_text(before + after)
        verify = [sys.executable, "-m", "interlace", "verify", "wrong.py::three_rounds"]
        options = ["--ranks", "2", "--seeds", "1", "--html", "race.html"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run([*verify, *options], cwd=folder, env=environment, check=False)
        assert result.returncode == 1, "verify finds the race, and so exits with 1"
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={folder}/page.png",
                f"file://{folder}/race.html",
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
        return (Path(folder) / "page.png").read_bytes()
