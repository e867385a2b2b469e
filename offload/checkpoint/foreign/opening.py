"""Opens a checkpoint of another program, whichever it is.

Owns how they are told apart. Next: :mod:`offload.importing`, which loads what was found into an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.checkpoint.foreign.dcp import is_dcp, read_dcp
from offload.checkpoint.foreign.found import Found
from offload.checkpoint.foreign.torch_files import is_trainer_folder, read_file, read_trainer_folder
from offload.checkpoint.foreign.zero import is_zero, read_zero
from offload.errors import ConfigError, OffloadError


def open_foreign(path: str | Path, names: Sequence[Sequence[str]] | None = None) -> Found:
    """Return what a checkpoint holds; no tensor's elements are read.

    Args:
        path: a file of ``torch.save``, or a folder of the Hugging Face trainer, of Accelerate, of DeepSpeed with ZeRO,
            or of torch.distributed.checkpoint.
        names: parameters by param group, in the optimizer's order, where the checkpoint numbers them; None where nobody
            knows; empty where an optimizer's state is not wanted.

    Raises:
        ConfigError: it is none of these, a file is missing or damaged, or a pickle names what is not inert.
    """
    try:
        return _open(Path(path), names)
    except OffloadError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # from what is not as it should be
        raise ConfigError(
            f"{path}: expected a layout that is known but got {type(error).__name__}: {error}; save it again with a "
            "current version of the program, or copy it again if it may be damaged"
        ) from error


def _open(path: Path, names: Sequence[Sequence[str]] | None) -> Found:
    if path.is_file():
        return read_file(path, names)
    if not path.is_dir():
        raise ConfigError(f"{path}: expected a checkpoint but there is nothing; pass another path")
    if is_dcp(path):
        return read_dcp(path, names)
    if is_zero(path):
        return read_zero(path)
    if is_trainer_folder(path):
        return read_trainer_folder(path, names)
    raise ConfigError(
        f"{path}: expected a file of torch.save, or a folder of the Hugging Face trainer (trainer_state.json, "
        "optimizer.pt), Accelerate (optimizer.bin), DeepSpeed (latest, *_model_states.pt) or "
        "torch.distributed.checkpoint (.metadata) but got "
        f"{sorted(entry.name for entry in path.iterdir())[:5]}; pass the folder that has these files"
    )
