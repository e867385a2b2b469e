"""Options of a command as fields of a dataclass: each is written once, with its type, default and help.

Owns the way from fields to a parser and back. Must not import torch, so that ``--help`` is quick. Next:
:mod:`offload.cli.placement`, the options that commands share.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any, Literal


def option(group: str, text: str, metavar: str | None = None, *, also: str | None = None) -> dict[str, str | None]:
    """Return the metadata of a field that is an option.

    Args:
        group: heading under which ``--help`` shows it.
        text: its help.
        metavar: stands for its value in the help.
        also: another name of the option.
    """
    return {"group": group, "help": text, "metavar": metavar, "also": also}


def add_options(parser: argparse.ArgumentParser, *owners: type) -> None:
    """Add an option for every field with a help text, in the groups that the fields name."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for owner in owners:
        kinds = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if not field.metadata:
                continue
            title, text, default = field.metadata["group"], field.metadata["help"], field.default
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            how = {"default": default, **_arguments_of(kinds[field.name], field.metadata["metavar"])}
            if default is dataclasses.MISSING:
                how |= {"default": None, "required": True}
            elif default is not None and default is not False:
                text += " (default: %(default)s)"
            names = [field.name.replace("_", "-"), *filter(None, [field.metadata["also"]])]
            groups[title].add_argument(*(f"--{name}" for name in names), dest=field.name, help=text, **how)


def _arguments_of(kind: Any, metavar: str | None) -> dict[str, Any]:
    """Return what argparse needs to know of a field's type."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    parts = [part for part in (typing.get_args(kind) if union else (kind,)) if part is not types.NoneType]
    words = [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
    if parts[0] is bool and words:  # a flag that takes a word, too
        return {"nargs": "?", "const": True, "choices": words}
    if parts[0] is bool:
        return {"action": "store_true"}
    if words:
        return {"choices": words}
    if typing.get_origin(parts[0]) is list:
        return {"action": "append", "type": typing.get_args(parts[0])[0], "metavar": metavar}
    return {"type": parts[0], "metavar": metavar}


def values_of(arguments: argparse.Namespace, owner: type) -> dict[str, Any]:
    """Return what parsed arguments say for the options of `owner`, by field."""
    given = vars(arguments)
    return {field.name: given[field.name] for field in dataclasses.fields(owner) if field.metadata}
