"""The page in a real browser: it renders, in both themes, without an error, an external request or sideways "
"scrolling."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.report.conftest import Written

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


def _run(profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize(("theme", "ground"), [(1, 253), (0, 20)], ids=["light", "dark"])
def test_the_page_renders_in_both_themes(written: Written, tmp_path: Path, theme: int, ground: int) -> None:
    picture = tmp_path / "page.png"
    done = _run(
        tmp_path / "profile",
        f"--blink-settings=preferredColorScheme={theme}",
        "--window-size=1280,9000",
        f"--screenshot={picture}",
        written.files.page.as_uri(),
    )
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    assert abs(int(pixels[5, 5, 0]) - ground) <= 2
    drawn = np.abs(pixels.astype(int) - pixels[5, 5].astype(int)).max(axis=2) > 40
    # Text and figures cover some of every screenful.
    assert (drawn.reshape(10, -1).mean(axis=1) > 0.01).all()


@pytest.mark.parametrize("width", [420, 1280])
def test_the_page_never_scrolls_sideways(written: Written, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{written.files.page.as_uri()}" style="border:0;width:{width}px;height:800px"></iframe><p></p>'
        "<script>onload = () => { document.querySelector('p').textContent = "
        "'width ' + document.querySelector('iframe').contentDocument.documentElement.scrollWidth }</script>",
        encoding="utf-8",
    )
    done = _run(tmp_path / "profile", "--allow-file-access-from-files", "--dump-dom", frame.as_uri())
    found = re.search(r"width (\d+)", done.stdout)
    assert found is not None
    assert int(found[1]) == width
