"""The command ``offload merge``: adapters are merged into a model, which is written layer by layer.

Owns its options, and that the output is whole or not there. Must not import torch at the top, so that ``--help`` is
quick. Next: :mod:`offload.integrations.peft`, which merges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from offload.cli.models import load_engine, load_tokenizer, quiet_transformers, tokenizer_folder
from offload.cli.options import option
from offload.config import DtypeName
from offload.errors import ConfigError

_files = functools.partial(option, "what to merge")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergeSettings:
    """Options of the command."""

    model: Path = field(metadata=_files("folder of the model", "DIR"))
    adapter: Path = field(metadata=_files("folder of adapters that PEFT has saved", "DIR"))
    out: Path = field(metadata=_files("folder to write to, which is not there yet", "DIR"))
    dequantize: DtypeName | None = field(default=None, metadata=_files("save weights of 4 or 8 bits in this dtype"))
    max_shard_size: str = field(default="2GB", metadata=_files("of a file of weights", "SIZE"))


def run(settings: MergeSettings, engine_options: Mapping[str, Any]) -> None:
    """Merge.

    Raises:
        OffloadError: a folder or an option cannot be used, or the budgets cannot hold the model.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    out = settings.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out {out}: is there already; name another folder")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        note = _write(settings, engine_options, partial)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise ConfigError(f"out {out}: cannot be written to: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {out}{note}")


def _write(settings: MergeSettings, engine_options: Mapping[str, Any], folder: Path) -> str:
    """Write everything; returns what to say of the tokenizer."""
    engine = load_engine(settings.model, settings.adapter, dict(engine_options))
    with contextlib.closing(engine), quiet_transformers():
        from offload.integrations.peft import merge_and_save

        merge_and_save(engine, folder, dequantize=settings.dequantize, max_shard_size=settings.max_shard_size)
        return _add_tokenizer(settings, folder)


def _add_tokenizer(settings: MergeSettings, folder: Path) -> str:
    """Write the tokenizer beside the model; returns what to say of it."""
    source = tokenizer_folder(settings.model, settings.adapter)
    if not (source / "tokenizer_config.json").is_file():
        return f"; there is no tokenizer in {settings.adapter} or {settings.model}"
    load_tokenizer(source).save_pretrained(folder)
    return f", with the tokenizer of {source}"
