"""The three sets of versions: each within what pyproject.toml allows, the oldest at its lower ends; and how their results are read and shown."""

import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests._torch import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PINS = {name: versions.pins(file) for name, (file, _) in versions.SETS.items()}
PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = {
    r.name: r.specifier
    for text in (*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), []))
    if (r := Requirement(text)).name != PROJECT["name"]
}
FREE = {"triton"}  #: torch fixes its own


def alike(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@pytest.mark.parametrize("name", PINS)
def test_a_set_is_within_the_supported_ranges(name):
    pinned = {alike(package): version for package, version in PINS[name].items()}
    assert list(map(alike, PINS[name])) == list(map(alike, PINS["tested"])), (
        "the same packages in the same order, so that the files can be laid side by side"
    )
    assert {
        package: version
        for package, version in pinned.items()
        if package in REQUIRED and version not in REQUIRED[package]
    } == {}
    assert set(REQUIRED) - FREE <= set(pinned)


def test_the_oldest_set_is_where_the_ranges_begin():
    """So what is claimed is what was tried."""
    pinned = {alike(package): Version(version) for package, version in PINS["oldest"].items()}
    begins = {
        package: Version(bound.version)
        for package, bounds in REQUIRED.items()
        for bound in bounds
        if bound.operator == ">=" and package not in FREE
    }
    assert {package: str(pinned[package]) for package in begins if pinned[package] != begins[package]} == {}


def test_the_sets_are_in_order():
    for package, tested in PINS["tested"].items():
        assert Version(PINS["oldest"][package]) <= Version(tested) <= Version(PINS["newest"][package]), package


def test_a_line_that_pins_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("# a comment\n\ntorch==2.13.0  # another\npeft>=0.18\n")
    with pytest.raises(ValueError, match="'peft>=0.18' is not of the form package==version"):
        versions.pins("constraints.txt")


def junit(*cases: tuple[str, str, str]) -> str:
    return f"<testsuites><testsuite>{''.join(f'<testcase classname=$tests.{c}$ name=$test_{n}$>{inner}</testcase>' for c, n, inner in cases)}</testsuite></testsuites>".replace(
        "$", '"'
    )


def test_what_differs_and_fails_is_told(capsys):
    rows = junit(
        ("models.test_golden", "a_familys_row[glm]", ""),
        (
            "models.test_golden",
            "a_familys_row[phi3]",
            '<failure message="swiglu 0/1, not 1/1&#10;more">trace</failure>',
        ),
        ("models.test_golden", "every_family_has_a_row", ""),
    )
    others = junit(
        ("models.test_api", "restore", ""),
        ("test_upstream", "pools", '<failure message="[XPASS(strict)] where this passes"/>'),
        ("test_upstream", "ada", "<skipped/>"),
    )
    outcome = versions.read([rows, others, ""], 90)
    assert outcome == versions.Outcome(
        1,
        2,
        1,
        [("test_golden::test_a_familys_row[phi3]", "swiglu 0/1, not 1/1")],
        [("test_upstream::test_pools", "[XPASS(strict)] where this passes"), ("pytest", "it ran no test")],
        90,
    )
    versions.show({"oldest": outcome})
    said = capsys.readouterr().out
    assert (
        "oldest differs from the golden table: test_golden::test_a_familys_row[phi3]: swiglu 0/1, not 1/1"
        in said.replace("\n", "")
    )
    assert "oldest failed: test_upstream::test_pools: [XPASS(strict)] where this passes" in said.replace("\n", "")
