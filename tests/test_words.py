"""The words of the glossary (docs/pages/concepts/glossary.md) are used, not the ones that they replaced."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: globs of what is checked. Program output and code in fenced blocks of Markdown are left out
ROOTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "tunecompile/**/*.py",
    "passes/**/*.py",
    "templates/**/*.py",
)
#: old word -> word of the field
WORDS = {
    r"comput\w+ (\w+ )?again": "recompute",
    r"wait(s|ing)? (on|for) the host": "offloaded, or launch-bound",
    r"dear(er|est)?": "expensive to recompute",
    r"(stand|stands|stood) for": "represent",
    r"(give|gives|gave|given|giving) up": "drop",
    r"somebody else": "has another user",
    r"ask(s|ed|ing)? for": "require, request",
    r"kept from dynamo": "skipped by Dynamo",
    r"in (\w+ )?pieces": "tiled, or graph break",
}
ALLOWED = "compute an activation again in the backward pass"  #: what the glossary explains


def prose(source: str) -> str:
    """Docstrings, other strings and comments of Python code, each on its own line."""
    lines = [""] * (source.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for number, line in enumerate(token.string.split("\n"), token.start[0] - 1):
                lines[number] += line + " "
    return "\n".join(lines)


def test_old_words_do_not_return():
    found, old_words = [], re.compile(rf"\b({'|'.join(WORDS)})\b")
    for file in sorted({file for root in ROOTS for file in ROOT.glob(root)}):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".md":
            text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
        if file.suffix == ".py":
            text = prose(text)
        for number, line in enumerate(text.splitlines(), 1):
            said = line.lower().replace(ALLOWED, "")
            for old, new in WORDS.items() if old_words.search(said) else ():
                if re.search(rf"\b{old}\b", said):
                    found.append(f"{file.relative_to(ROOT)}:{number}: say {new!r}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
