"""The page on troubleshooting names every class of error, and what every message begins with."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest
from documents import ROOT, literal, read, section

import offload.errors
import swap.errors

PAGE = read("docs/guide/troubleshooting.md")
CLASSES = {
    name: kind
    for module in (offload.errors, swap.errors)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module.__name__
}
# Their messages begin with a file, or a key of a configuration; they have pages of their own.
ELSEWHERE = ("offload/cli/", "offload/checkpoint/foreign/", "offload/integrations/deepspeed/")
UNNAMED = {"DeviceFullError": "BudgetError", "DamagedError": "CheckpointError"}  # classes that users catch as another


def _messages() -> Iterator[tuple[str, str, str]]:
    """Give file, class and message of each error that is made in the sources."""
    for package in ("offload", "swap"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(ELSEWHERE):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    if node.func.id in CLASSES or node.func.id in UNNAMED:
                        yield name, node.func.id, literal(node.args[0])


MESSAGES = list(_messages())


def head(message: str) -> str:
    """Return the words that a message begins with whatever it is about."""
    return re.split(r":|\{\}", message)[0].strip()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 250
    assert ("offload/life.py", "StateError", "engine: it is closed; make a new one{}") in MESSAGES


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE or name == "OffloadError"
    assert (
        f"#{CLASSES[name].__module__.split('.')[0]}.{name})" in PAGE or f"# {name}\n" in PAGE or f"| `{name}` |" in PAGE
    )


def test_every_first_word_is_explained() -> None:
    """In the section of its class, or among what cannot be wrapped."""
    wanted = {(UNNAMED.get(kind, kind), head(text)) for _, kind, text in MESSAGES}
    missing = []
    for kind, words in sorted(wanted):
        text = PAGE if kind == "OffloadError" else section(PAGE, "SwapError" if kind.startswith("Swap") else kind)
        if words and f"`{words}" not in text:
            missing.append((kind, words))
    assert not missing


def test_every_refusal_of_a_model_is_explained() -> None:
    """By what follows the subject: the four words that it begins with."""
    missing = []
    for name, _, text in MESSAGES:
        if name == "offload/module/refusals.py":
            said = text.split(": ", 1)[-1].split("{}")[0]
            words = " ".join(said.split()[:4])
            if words not in PAGE:
                missing.append(words)
    assert not missing
