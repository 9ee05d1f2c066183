"""The table of notes and the sources agree: every code is used, every note has its words, and all fields of these."""

import ast
import copy
import json
import pickle
import re
import string
from pathlib import Path

import pytest

from tests.support.notes import codes, find, has
from tunecompile.errors import summary
from tunecompile.notes import (
    KINDS,
    NOTES,
    REASONS,
    Note,
    compiling,
    health,
    memory,
    note,
    padding,
    providers,
    running,
    verifying,
)

ROOT = Path(__file__).parents[1]

TABLES = (compiling, health, memory, padding, providers, running, verifying)
#: calls that make a note of a code, subject and detail: `note` itself, and what hands these on to it
MAKERS = {"note", "_note", "_note_failure"}


def sources():
    for folder in ("tunecompile", "passes"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT)
            if path.parts[:2] not in (
                ("tunecompile", "notes"),
                ("tunecompile", "passes"),
                ("tunecompile", "templates"),
            ):
                yield path.as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def fields(words: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(words) if name is not None}


def test_codes_are_short_kebab_case():
    assert [code for code in KINDS if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){0,5}", code)] == []


def test_codes_are_unique():
    """In one file a dictionary would hide a second one."""
    for module in TABLES:
        tree = ast.parse((ROOT / "tunecompile" / "notes" / f"{module.__name__.rpartition('.')[2]}.py").read_text())
        keys = [key.value for table in ast.walk(tree) if isinstance(table, ast.Dict) for key in table.keys]
        assert len(keys) == len(set(keys)), sorted(keys)
    assert len(KINDS) == len(NOTES) + len(REASONS)


def test_words_are_one_line_and_said_once():
    words = [kind.words for kind in KINDS.values()]
    assert all(each and "\n" not in each and each == each.strip() for each in words)
    said = [each for each in words if fields(each) != {"subject", "detail"} and each != "{detail}"]
    assert len(said) == len(set(said)), sorted(each for each in said if said.count(each) > 1)


def test_every_code_is_used():
    named = {
        node.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(KINDS.keys() - named) == []


def test_every_note_has_words_and_all_their_fields():
    faults = [
        f"{path}:{call.lineno}: {fault}"
        for path, tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and call.args and _name(call.func) in MAKERS
        for fault in _faults(call)
    ]
    assert faults == []


def _name(function: ast.expr) -> str:
    """Of a function, or of a method that begins with an underscore: `trace.note` is another one."""
    attribute = getattr(function, "attr", "")
    return attribute if attribute.startswith("_") else getattr(function, "id", "")


def _faults(call: ast.Call):
    """Of each code that the first argument may be."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    given = {name for name, _ in zip(("code", "subject", "detail"), call.args)}
    given |= {keyword.arg for keyword in call.keywords}
    if _name(call.func) in ("_note", "_note_failure"):
        given |= {"subject", "detail"}
    for code in _codes(call.args[0]):
        if code not in KINDS:
            yield f"{code} is not in the table"
        elif missing := fields(KINDS[code].words) - given:
            yield f"{code} has no {', '.join(missing)}"
        elif further := given - fields(KINDS[code].words) - {"code", "subject", "detail"}:
            yield f"{code} has nothing to do with {', '.join(further)}"


def _codes(argument: ast.expr) -> list[str]:
    if isinstance(argument, ast.IfExp):
        return _codes(argument.body) + _codes(argument.orelse)
    return [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []


# -- notes ----------------------------------------------------------------------------------------------------------------


def test_a_note_is_a_string_with_parts():
    why = note("graph-limit", limit=8)
    made = note("ran-eagerly", "layer", why, times=" 3 times")
    assert made == str(made) == f"layer ran eagerly 3 times: {why}" and type(str(made)) is str and "8 graphs" in made
    assert (made.code, made.subject, made.detail, why.fields) == ("ran-eagerly", "layer", why, {"limit": 8})
    assert [each.code for each in made.chain()] == ["ran-eagerly", "graph-limit"]
    assert json.loads(json.dumps([made])) == [made] and list(dict.fromkeys([made, made])) == [made]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_keep_the_parts(copied):
    made = note("ran-eagerly", "layer", note("graph-limit", limit=8), times="")
    again = copied(made)
    assert again == made and [each.code for each in again.chain()] == ["ran-eagerly", "graph-limit"]
    assert again.detail.fields == {"limit": 8} and isinstance(again, Note)


def test_what_the_table_does_not_have_is_an_error():
    with pytest.raises(KeyError):
        note("no-such-code")
    with pytest.raises(KeyError):
        note("ran-eagerly", "layer", "why")


def test_plain_values_are_kept():
    """No symbols of a graph, which would keep it alive."""

    class Symbol:
        def __str__(self):
            return "s0"

    made = note("rank-too-large", rank=Symbol(), limit=64)
    assert made.fields == {"rank": "s0", "limit": 64} and "rank s0" in made


def test_tests_find_notes_by_code_reason_and_values():
    told = [note("ran-eagerly", "layer", note("graph-limit", limit=8), times=" 3 times"), "a user's own line"]
    assert codes(told) == ["ran-eagerly", "graph-limit"] and find(told, "graph-limit") == [told[0].detail]
    assert has(told, "ran-eagerly", reason="graph-limit", subject="lay", times=" 3 times")
    assert has(told, "graph-limit", limit=8) and not has(told, "graph-limit", limit=9)
    assert not has(told, "ran-eagerly", reason="not-traceable") and not has(told, "ran-eagerly", subject="head")
    with pytest.raises(AssertionError, match="no such-code"):
        has(told, "such-code")


def test_an_error_is_told_in_one_line():
    assert summary(ValueError("first\nRuntimeError: second")) == "ValueError: first"
    assert summary(ValueError()) == "ValueError: "
    quoted = "An error in a subprocess:\n\nTraceback\n  File\nKeyError: other\nRuntimeError: failed\n\nSet A_FLAG=1"
    assert summary(ValueError(quoted)) == "ValueError: An error in a subprocess: RuntimeError: failed"
    assert summary(ValueError("nothing quoted:\nfurther")) == "ValueError: nothing quoted:"
