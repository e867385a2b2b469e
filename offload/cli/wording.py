"""What the library says, for those who call a command: options of the command line in the place of Python's names.

Owns the one table of names that differ. An option is otherwise called as Python's name is, with dashes. Next:
:mod:`offload.cli.main`, which shows errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Python's name -> what an option may be called: the first of these that the command has.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    'max_memory["device"]': ("device_memory", "device"),
    'max_memory["cpu"]': ("cpu_memory", "cpu"),
    'max_memory["nvme"]': ("nvme_memory", "nvme"),
    "nvme_path": ("nvme_path", "nvme"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "accumulate"),
    "max_grad_norm": ("max_grad_norm", "clip"),
    "text": ("data",),
}
_NO_OPTIONS = {"command", "version", "bench", "checkpoint", "directory", "source", "paths", "shell"}
_OF_A_FILE = ("unknown option", "config file")  # how errors begin that name what is in a file of options
_NAME = re.compile(
    r"""(?<![\w/.'"-])(max_memory\[["']?\w+["']?\]|[a-z]\w*)(?:=("[^"]*"|'[^']*'|\.\.\.|\w[\w.]*\b))?(?![\w-])"""
)
_SUBJECT = re.compile(r"(?!\w+ budget:)[a-z]\w*(?=:| [^\s:]+:)")
_QUOTES = "\"'"
_CALL = re.compile(r"\w\([^()]*$")  # what comes next is an argument of Python's


def in_options(text: str, names: Collection[str]) -> str:
    """Return a text of the library with the options of a command for the names that they have in Python.

    A name of one word is replaced where it is the subject, or has a value: elsewhere it may be a word like any other.

    Args:
        text: of an error, or of a plan.
        names: of what the command takes, as argparse keeps them.
    """
    if text.startswith(_OF_A_FILE):
        return text
    options = {name: f"--{name.replace('_', '-')}" for name in names if name not in _NO_OPTIONS}
    options |= {
        name: next(options[other] for other in others if other in options)
        for name, others in _OPTIONS.items()
        if not options.keys().isdisjoint(others)
    }

    def worded(match: re.Match[str]) -> str:
        name, value = match[1].replace("'", '"'), match[2]
        subject = match.start() == 0 and _SUBJECT.match(text)
        if name not in options or ("_" not in name and value is None and not subject):
            return match[0]
        if value is None:
            return options[name]
        if _CALL.search(text[: match.start()]):
            return match[0]
        return options[name] if value == "True" else f"{options[name]} {value.strip(_QUOTES)}"

    return _NAME.sub(worded, text)
