"""Pages as a browser shows them: headless Chromium, by its command line alone.

@chromium.needed
def test_it(tmp_path):
    page = write_a_page(tmp_path / "page.html")
    seen = chromium.look(page)          # opened from disk; what it asked for, logged and shows
    assert seen.addresses == seen.logged == [] and len(seen.pictures) == 2
    assert chromium.pages_printed(page) >= 1
"""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--window-size=1300,1000",
)
needed = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium in PATH (Debian: apt-get install chromium)")

#: of every svg and img that is not folded away: the pixels it takes, and of those of an svg how many boxes and texts it holds
PICTURES = """[...document.querySelectorAll("svg, img")].filter(each => !each.closest("details:not([open])")).map(each => {
  const {width, height} = each.getBoundingClientRect();
  return {width, height, drawn: each.tagName === "IMG" ? each.naturalWidth : each.querySelectorAll("rect, text").length};
})"""


@dataclass(frozen=True)
class Seen:
    """A page, once it is open."""

    addresses: list[str]  #: what its text asks of a network, or of another file
    logged: list[str]  #: on the console, errors of scripts too
    pictures: list[dict[str, float]]  #: width and height as shown, and how much is `drawn` in it
    answer: Any  #: to the question asked


def look(page: Path, question: str = "null") -> Seen:
    """Open a page from disk. `question`: a JavaScript expression, asked when all is loaded; its value as JSON has it."""
    html = page.read_text(encoding="utf-8")
    asking = f"<script>addEventListener('load', () => {{ document.documentElement.dataset.answer = JSON.stringify([{PICTURES}, {question}]); }})</script>"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / page.name
        copy.write_text(html + asking, encoding="utf-8")
        done = _run(folder, "--dump-dom", copy.as_uri())
    logged = re.findall(r":CONSOLE[:(].*", done.stderr)
    root = next((attributes for tag, attributes in _Reader.read(done.stdout).tags if tag == "html"), {})
    assert "data-answer" in root, f"the page did not come to its end: {logged}"
    pictures, answer = json.loads(root["data-answer"])
    return Seen(_Reader.read(html).addresses(), logged, pictures, answer)


def pages_printed(page: Path) -> int:
    """How many sheets it takes on paper."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "page.pdf"
        _run(folder, f"--print-to-pdf={out}", "--no-pdf-header-footer", page.as_uri())
        return len(re.findall(rb"/Type\s*/Page\b", out.read_bytes()))


def picture(page: Path, out: Path, width: int = 1300, height: int = 1000) -> Path:
    """What its upper part looks like, as PNG: to be looked at."""
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, f"--screenshot={out}", f"--window-size={width},{height}", page.as_uri())
    return out


def _run(folder: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [PROGRAM, *FLAGS, f"--user-data-dir={folder}/profile", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


class _Reader(HTMLParser):
    """Tags with their attributes, and style sheets."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.styles: list[str] = []

    @staticmethod
    def read(html: str) -> "_Reader":
        reader = _Reader()
        reader.feed(html)
        return reader

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "style":
            self.styles.append(data)

    def addresses(self) -> list[str]:
        """What a browser would fetch; data within the page is nothing to fetch, nor is a place in it."""
        found = [
            attributes[name]
            for _, attributes in self.tags
            for name in ("src", "href", "srcset", "poster", "data", "xlink:href")
            if name in attributes
        ]
        for style in [*self.styles, *(attributes.get("style", "") for _, attributes in self.tags)]:
            found += re.findall(r"""(?:url\(\s*|@import\s+)["']?([^"'\s)]+)""", style)
        return [address for address in found if not address.startswith(("data:", "#"))]
