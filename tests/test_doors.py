"""The oldest libraries that doors take: the same in the code, in what pip is told, and in what users read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"hf": "transformers", "lightning": "lightning", "accelerate": "accelerate"}  # by door


def required(door: str) -> tuple[str, str]:
    """Return what a door calls :func:`offload.integrations.libraries.require` with."""
    source = (ROOT / "offload" / "integrations" / f"{door}.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "require"]
    assert [ast.unparse(word.value) for word in call.keywords] == [repr(f"offload.{door}")]
    library, least = (ast.literal_eval(argument) for argument in call.args)
    return library, least


@pytest.mark.parametrize("door", LIBRARIES)
def test_oldest_versions(door: str) -> None:
    library, least = required(door)
    assert library == LIBRARIES[door]
    bounds = re.findall(rf'"{library}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert bounds and set(bounds) == {least}
    rows = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row.split("|")[3].strip() for row in rows if re.match(rf"\|.*\| `offload\.{door}` \|", row)]
    assert least in row.replace(",", " ").split()
