"""The command ``offload completion``, and what a shell asks for when the tab key is pressed.

Shells ask the program itself (argcomplete), so the parser is the one list of options. Must not import anything heavy.
"""

from __future__ import annotations

import argparse
import os

from offload.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = (
    "Print the lines that let a shell complete the command offload. bash, in ~/.bashrc, and zsh, in ~/.zshrc behind "
    'compinit: eval "$(offload completion bash)", or zsh. fish, in config.fish: offload completion fish | source'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    parser.add_argument("shell", choices=SHELLS, help="which one")


def run(arguments: argparse.Namespace) -> None:
    """Print what the shell is to evaluate.

    Raises:
        ConfigError: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError as error:
        raise ConfigError("completion: argcomplete is not installed; pip install argcomplete") from error
    print(argcomplete.shellcode(["offload"], shell=arguments.shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """If a shell asks, answer it and leave the process; else do nothing."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
