"""What a fine-tuning run trains on and is evaluated on: from files to sequences.

Owns what is held out, what is cut or left out, and what is said about it. Next: :mod:`offload.cli.finetune.text`,
:mod:`offload.cli.finetune.rows`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.cli.finetune.packing import Packed
from offload.cli.finetune.rendering import Renderer
from offload.cli.finetune.rows import Row, has_rows, read_rows
from offload.cli.finetune.sequences import Cut, Rows, Sequences, Tokens
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.cli.finetune.text import Windows, evenly, first_sentences, make_windows, read_text

PROMPT_TOKENS = 24  # of a row in which everything counts


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """Of a run.

    Attributes:
        train: to train on.
        held_out: to evaluate on; None if nothing is.
        prompt: (tokens,) int64, HOST: what the sample continues.
        notes: what is in it, and what was left out.
        digests: of the tokens to train on and their labels, of those held out, and of the prompt, by name.
    """

    train: Sequences
    held_out: Sequences | None
    prompt: torch.Tensor
    notes: Sequence[str]
    digests: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What one file, or a part of it, has."""

    sequences: Sequences
    prompt: torch.Tensor
    notes: Sequence[str]


def load_data(tokenizer: Any, settings: Settings) -> Data:
    """Read and tokenise what the settings name.

    Raises:
        FinetuneError: a file cannot be used; names file and line.
    """
    if has_rows(settings.data):
        rows = _Reader(tokenizer, settings)
        one = not settings.held_out
        parts: tuple[_Part, _Part | None] = (
            (rows.whole(settings.data, "to train on"), None) if one else rows.both(settings.data)
        )
    else:
        if settings.packing:
            raise FinetuneError(
                f"packing: expected rows but {settings.data} is a text, whose sequences are full already; leave "
                "--packing out"
            )
        windows = _windows(tokenizer, settings.data, settings)
        parts = _of_text(windows, settings)
    train, held_out = parts
    if not settings.evaluates:
        return _data(train, None, train.prompt, train.notes)
    if held_out is None:
        held_out = _evaluated(tokenizer, settings)
    return _data(train, held_out.sequences, held_out.prompt, [*train.notes, *held_out.notes])


def _data(train: _Part, held_out: Sequences | None, prompt: torch.Tensor, notes: Sequence[str]) -> Data:
    digests = {
        "tokens of the data": _digest(train.sequences),
        "tokens held out": "none" if held_out is None else _digest(held_out),
        "tokens of the prompt": hashlib.blake2b(prompt.numpy().tobytes(), digest_size=16).hexdigest(),
    }
    return Data(train.sequences, held_out, prompt, notes, digests)


def _windows(tokenizer: Any, path: Path, settings: Settings) -> Windows:
    return make_windows(lambda part: tokenizer(part, add_special_tokens=False)["input_ids"], read_text(path), settings)


def _of_text(windows: Windows, settings: Settings) -> tuple[_Part, _Part | None]:
    train = f"{len(windows.train)} windows of {settings.sequence_length} tokens to train on"
    if not settings.held_out:
        return _Part(Cut(windows.train), windows.prompt, [train]), None
    held_out = _Part(Cut(windows.held_out), windows.prompt, [])
    return _Part(Cut(windows.train), windows.prompt, [f"{train}, {len(windows.held_out)} held out"]), held_out


def _evaluated(tokenizer: Any, settings: Settings) -> _Part:
    """Return what a file of its own has for the evaluation."""
    path = Path(settings.eval)
    if not path.exists():
        raise FinetuneError(f"eval: expected a share in [0, 1) or a file but there is no file {path}")
    if has_rows(path):
        return _Reader(tokenizer, settings).whole(path, "held out", settings.evaluated_most)
    windows = _windows(tokenizer, path, settings).train
    chosen = windows[evenly(len(windows), settings.evaluated_most)]
    text = settings.prompt if settings.prompt is not None else first_sentences(read_text(path))
    prompt = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"] or chosen[0, :1].tolist())
    return _Part(Cut(chosen), prompt, [f"{len(chosen)} windows of {settings.sequence_length} tokens held out"])


class _Reader:
    """Makes sequences of files with rows, as the settings say."""

    def __init__(self, tokenizer: Any, settings: Settings) -> None:
        self._settings = settings
        self._renderer = Renderer(tokenizer, everything=settings.loss_on == "all")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._pad = 0 if pad is None else int(pad)

    def both(self, path: Path) -> tuple[_Part, _Part]:
        """Return the rows to train on, and the share of them that is held out, drawn from the seed."""
        rows = self._read(path)
        if len(rows) < 2:
            raise FinetuneError(
                f"data {path}: expected at least 2 rows, of which one is held out, but got 1; name a file with --eval, "
                "or pass --eval 0"
            )
        count = min(max(1, round(len(rows) * (self._settings.held_out or 0.0))), len(rows) - 1)
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self._settings.seed))
        held_out = set(drawn[:count].tolist())
        others = [row for number, row in enumerate(rows) if number not in held_out]
        return self._part(others, "to train on"), self._part(
            [rows[number] for number in sorted(held_out)], "held out", self._settings.evaluated_most
        )

    def whole(self, path: Path, purpose: str, most: int | None = None) -> _Part:
        """Return all rows of a file, or `most` sequences of them."""
        return self._part(self._read(path), purpose, most)

    def _read(self, path: Path) -> list[Row]:
        rows = list(read_rows(path))
        if not rows:
            raise FinetuneError(f"data {path}: is empty")
        return rows

    def _part(self, given: Sequence[Row], purpose: str, most: int | None = None) -> _Part:
        length = self._settings.sequence_length
        whole = [self._renderer.tokens(row) for row in given]
        cut = [tokens.cut(length) for tokens in whole]
        kept = [number for number, tokens in enumerate(cut) if tokens.targets]
        if not kept:
            others = f", here or in {len(given) - 1} others {purpose}," if len(given) > 1 else ""
            raise FinetuneError(
                f"{given[0].place}: expected tokens to predict within the first {length} (sequence_length)"
                f"{others} but there are none; take a longer one, or --loss-on all"
            )
        rows = Rows([cut[number] for number in kept], self._pad)
        sequences: Sequences = rows
        notes = [f"{len(rows)} rows {purpose} with {sum(rows.lengths)} tokens, of which {rows.targets} count"]
        if self._settings.packing:
            sequences = packed = Packed(rows, length, apart=self._settings.packing is True)
            notes = [f"{notes[0]}, in {len(packed)} sequences of {length}, {packed.filled:.0%} full"]
        longer = sum(len(tokens.ids) > length for tokens in whole)
        if longer:
            lost = sum(max(0, len(tokens.ids) - length) for tokens in whole)
            notes.append(
                f"{longer} rows {purpose} are longer than {length} tokens: {lost} tokens at their ends are cut"
            )
        if len(kept) < len(given):
            notes.append(
                f"{len(given) - len(kept)} rows {purpose} are left out: no token counts within the first {length}"
            )
        if most is not None and most < len(sequences):
            notes.append(f"an evaluation takes {most} of {len(sequences)} sequences (--evaluation-sequences)")
            sequences = Chosen(sequences, evenly(len(sequences), most).tolist())
        return _Part(sequences, self._prompt(given[kept[0]], cut[kept[0]]), notes)

    def _prompt(self, row: Row, tokens: Tokens) -> torch.Tensor:
        """Return what the sample continues: what was asked for, or the part of a row before what counts."""
        if self._settings.prompt is not None:
            return torch.tensor(self._renderer.question(self._settings.prompt, row) or tokens.ids[:1])
        first = list(tokens.counts).index(True)
        return torch.tensor(list(tokens.ids[: first if first > 1 else PROMPT_TOKENS]))


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """Some of other sequences."""

    all: Sequences
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, chosen: Sequence[int]) -> Any:
        """Return some of them as a micro-batch."""
        return self.all.batch([self.numbers[number] for number in chosen])


def _digest(sequences: Sequences) -> str:
    """Return a digest of the tokens and labels: a resumed run has to have the same."""
    found = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(sequences), 256):
        for value in sequences.batch(range(begin, min(begin + 256, len(sequences)))).inputs.values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()
