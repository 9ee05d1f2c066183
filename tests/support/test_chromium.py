"""The browser's helper sees what the tests of pages rely on."""

from tests.support import chromium


@chromium.needed
def test_what_a_page_asks_for_logs_and_shows_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<style>p { background: url("far.png") }</style><p style="height: 3000px">src="text"</p><svg width="40" height="30"><rect width="9" height="9"/></svg>'
        '<img src="https://example.org/a.png"><script>console.error("I am wrong"); boom()</script>'
    )
    seen = chromium.look(page, "document.querySelectorAll('p').length")
    assert sorted(seen.addresses) == ["far.png", "https://example.org/a.png"] and seen.answer == 1
    assert any("I am wrong" in line for line in seen.logged) and any(
        "boom is not defined" in line for line in seen.logged
    )
    assert seen.pictures[0] == {"width": 40, "height": 30, "drawn": 1} and seen.pictures[1]["drawn"] == 0
    assert chromium.pages_printed(page) >= 3
