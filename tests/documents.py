"""The code blocks of the project's documents, for the tests that run them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read(path: str) -> str:
    """Return the text of a document, by its path in the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one that is as high."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found is not None, f"there is no heading {heading!r}"
    rest = text[found.end() :]
    fences = [match.span() for match in re.finditer(r"^```.*?^```$", rest, re.DOTALL | re.MULTILINE)]
    for end in re.finditer(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE):
        if not any(first <= end.start() < last for first, last in fences):  # a comment in code is no heading
            return rest[: end.start()]
    return rest


def blocks(text: str, kind: str = "python") -> list[str]:
    """Return the fenced blocks of one language; those of none are ``""``."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [content for language, content in fenced if language == kind]


def anchors(text: str) -> set[str]:
    """Return what links may lead to in a page: its headings, and the objects of the reference that it shows."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def literal(node: ast.expr) -> str:
    """Return a text as it stands in a source, each value in it as ``{}``."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    return "{}"
