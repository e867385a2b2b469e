"""``offload checkpoint ls|verify|export|import``: their options. Imports nothing heavy.

Next: :mod:`offload.cli.checkpoint.operations` does what is asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "List checkpoints of engine.save_checkpoint, compare every byte with its checksum, write and read other formats."
)


def add_arguments(parser: argparse.ArgumentParser, parser_class: Any) -> None:
    """Add the commands to `parser`."""
    what = parser.add_subparsers(dest="checkpoint", metavar="WHAT", parser_class=parser_class, required=True)
    texts = {
        "ls": "which checkpoints are there?",
        "verify": "is every byte what was written?",
        "export": "write the weights in safetensors, or everything for torch.load or torch.distributed.checkpoint",
    }
    for name, text in texts.items():
        command = what.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}")
        command.add_argument("directory", type=Path, metavar="DIR", help="directory of checkpoints, or one of them")
        if name != "ls":
            command.add_argument("--tag", metavar="TAG", help="which one (default: the latest)")
        if name == "export":
            command.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
            formats = (
                "safetensors: sharded weights by the module's names (if those of the hub differ, as of experts, "
                "engine.save_pretrained writes them); torch: state dicts in one file; "
                "dcp: all of it for torch.distributed.checkpoint"
            )
            kinds = ["safetensors", "torch", "dcp"]
            command.add_argument("--to", "--format", dest="format", choices=kinds, default=kinds[0], help=formats)
            command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights")
    _add_import(what)


def _add_import(what: Any) -> None:
    text = "write a checkpoint of another program as one of this program, without training"
    command = what.add_parser("import", allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}")
    source = "a file of torch.save, or a folder of the Hugging Face trainer, DeepSpeed (ZeRO) or DCP"
    command.add_argument("source", type=Path, metavar="SOURCE", help=source)
    command.add_argument("directory", type=Path, metavar="DIR", help="directory of checkpoints to write to")
    model = "folder with config.json, such a file, or MODULE:CALLABLE, which returns the model"
    command.add_argument("--model", required=True, metavar="MODEL", help=model)
    dtypes = ["bfloat16", "float16", "float32"]
    command.add_argument("--dtype", choices=dtypes, help="of the parameters (default: the model's)")
    kinds = ["adamw", "adam", "sgd", "adagrad", "lion"]
    command.add_argument("--optimizer", choices=kinds, help="whose states they are (default: by their names)")
    command.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    command.add_argument("--tag", metavar="TAG", help="name of the checkpoint (default: by its steps)")


def run(arguments: argparse.Namespace) -> None:
    """Run a command.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    from offload.cli.checkpoint.operations import OPERATIONS

    OPERATIONS[arguments.checkpoint](arguments)
