"""How docstrings become Markdown for the API reference: their roles are links, and their literal blocks code.

Owns what the docstrings here have of reStructuredText. ``mkdocs.yml`` names this file as an extension of griffe.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|data|attr|mod):`~?(?P<target>[\w.]+)`")
LITERAL = re.compile(r"^(?P<indent> *)(?P<text>.*?)::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites the docstring of each object that is loaded."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(
                obj.docstring.value, obj.path if obj.is_class else obj.path.rpartition(".")[0]
            )


def markdown(text: str, place: str) -> str:
    """Return a docstring as Markdown.

    Args:
        text: the docstring.
        place: path of the class or module that short names are of.
    """
    text = LITERAL.sub(lambda match: f"{match['indent']}{match['text']}{':' if match['text'] else ''}", text)
    return ROLE.sub(lambda match: _link(match["target"], place), text)


def _link(target: str, place: str) -> str:
    """Return a link to an object, which is plain code where the reference does not show it."""
    identifier = target if target.startswith(("offload", "swap", "torch")) else f"{place}.{target}"
    return f'<autoref identifier="{identifier}" optional>`{target}`</autoref>'
