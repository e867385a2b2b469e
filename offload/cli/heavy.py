"""Libraries that transformers and PEFT import wherever they are installed, and that a command can do without.

Owns which these are, and when they are needed: torchao and bitsandbytes take seconds to import, and tell of kernels
that this machine lacks. Next: :mod:`offload.cli.main`, whose own process leaves them out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

QUANTIZERS = ("torchao", "bitsandbytes")
_COMMANDS = ("finetune", "generate", "merge", "plan")  # whose model is one of transformers


def leave_out_quantizers(parsed: argparse.Namespace) -> None:
    """Let this process do without libraries that quantize, unless the model of a command is quantized.

    What imports them then finds them missing, until the process ends.

    Raises:
        ConfigError: the model's config.json is no JSON object, and the command is not ``plan``.
    """
    if parsed.command not in _COMMANDS:
        return
    try:
        if is_quantized(Path(parsed.model)):
            return
    except ConfigError:
        if parsed.command != "plan":  # which tells it in JSON, too
            raise
    modules: dict[str, Any] = sys.modules
    for name in QUANTIZERS:
        modules.setdefault(name, None)


def is_quantized(folder: Path) -> bool:
    """Tell whether the weights of a model of transformers are; False for what cannot be read.

    Raises:
        ConfigError: as of :func:`quantization_of`.
    """
    return quantization_of(folder) is not None


def quantization_of(folder: Path) -> Any:
    """Return how the weights of a model of transformers are quantized; None if they are not, or it cannot be read.

    Args:
        folder: of the model, or its config.json.

    Raises:
        ConfigError: its config.json is no JSON object.
    """
    try:
        file = folder if folder.is_file() else folder / "config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        return values.get("quantization_config")
    except OSError:
        return None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model {folder}: expected a JSON object in config.json but got: {error}") from error
