"""``offload checkpoint ls|verify|export``: their options. Imports nothing heavy.

Next: :mod:`offload.cli.checkpoint.operations` does what is asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = "List checkpoints of engine.save_checkpoint, compare every byte with its checksum, write other formats."


def add_arguments(parser: argparse.ArgumentParser, parser_class: Any) -> None:
    """Add the commands to `parser`."""
    what = parser.add_subparsers(dest="checkpoint", metavar="WHAT", parser_class=parser_class, required=True)
    texts = {
        "ls": "which checkpoints are there?",
        "verify": "is every byte what was written?",
        "export": "write the weights for Hugging Face, or everything for torch.load",
    }
    for name, text in texts.items():
        command = what.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}")
        command.add_argument("directory", type=Path, metavar="DIR", help="directory of checkpoints, or one of them")
        if name != "ls":
            command.add_argument("--tag", metavar="TAG", help="which one (default: the latest)")
        if name == "export":
            command.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
            formats = "safetensors: sharded weights, as save_pretrained writes them; torch: state dicts in one file"
            command.add_argument("--format", choices=["safetensors", "torch"], default="safetensors", help=formats)
            command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights")


def run(arguments: argparse.Namespace) -> None:
    """Run a command.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    from offload.cli.checkpoint.operations import OPERATIONS

    OPERATIONS[arguments.checkpoint](arguments)
