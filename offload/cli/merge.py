"""The command ``offload merge``: adapters are merged into a model, which is written layer by layer.

Owns its options. Must not import torch at the top, so that ``--help`` is quick. Next:
:mod:`offload.integrations.peft`, which merges; :mod:`offload.cli.folders` makes the output whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from offload.cli.folders import REMEDY, things_in, written_whole
from offload.cli.models import (
    TOKENIZER_FILES,
    load_engine,
    load_tokenizer,
    quiet_transformers,
    require_model,
    tokenizer_folder,
)
from offload.cli.options import option
from offload.config import DtypeName
from offload.errors import CheckpointError, ConfigError
from offload.sizes import Share, parse_bytes

_files = functools.partial(option, "what to merge")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergeSettings:
    """Options of the command.

    Raises:
        ConfigError: a value cannot be used.
    """

    model: Path = field(metadata=_files("folder of the model", "DIR"))
    adapter: Path = field(metadata=_files("folder of adapters that PEFT has saved", "DIR"))
    out: Path = field(metadata=_files("folder to write to, which is not there yet", "DIR"))
    dequantize: DtypeName | None = field(default=None, metadata=_files("save weights of 4 or 8 bits in this dtype"))
    max_shard_size: str = field(default="2GB", metadata=_files("of a file of weights", "SIZE"))

    def __post_init__(self) -> None:
        self.shard_bytes()

    def shard_bytes(self) -> int:
        """Return the most bytes of a file."""
        size = parse_bytes(self.max_shard_size, subject="max_shard_size", shares=False)
        if isinstance(size, Share):
            raise ConfigError(f"max_shard_size: expected bytes such as 5GB but got {self.max_shard_size!r}")
        return size


def run(settings: MergeSettings, engine_options: Mapping[str, Any]) -> None:
    """Merge.

    Raises:
        OffloadError: a folder or an option cannot be used, or the budgets cannot hold the model.
        swap.SwapError: the NVMe path is missing, not writable, or full, or the drive of the output is full.
    """
    out = settings.out
    there = things_in(out)
    if there is not None:
        raise ConfigError(f"out {out}: expected an empty folder, or nothing, but it {there}; name another folder")
    require_model(settings.model)
    tokenizer, note = _tokenizer(settings)  # before the hours that merging may take
    with quiet_transformers(), written_whole(out, f"out {out}") as folder:
        from safetensors import SafetensorError

        from offload.integrations.peft import merge_and_save

        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        with contextlib.closing(load_engine(settings.model, settings.adapter, dict(engine_options))) as engine:
            try:
                merge_and_save(engine, folder, dequantize=settings.dequantize, max_shard_size=settings.shard_bytes())
            except SafetensorError as error:  # also for a full drive
                raise CheckpointError(f"out {out}: cannot be written to: {error}; {REMEDY}") from error
    print(f"wrote {out}{note}")


def _tokenizer(settings: MergeSettings) -> tuple[Any, str]:
    """Return the tokenizer, None if there is none, and what to say of it."""
    source = tokenizer_folder(settings.model, settings.adapter)
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        return None, f"; there is no tokenizer in {settings.adapter} or {settings.model}"
    return load_tokenizer(source), f", with the tokenizer of {source}"
