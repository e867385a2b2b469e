"""Rows of a file: JSON lines, a JSON array, or Parquet.

Owns reading and what an error of a file says: where the row is. Knows neither tokens nor models. Next:
:mod:`offload.cli.finetune.rendering`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.cli.finetune.settings import FinetuneError

LINES = (".jsonl", ".ndjson")
ROWS = (*LINES, ".json", ".parquet")
OTHER_TABLES = (".csv", ".tsv", ".arrow", ".feather", ".gz", ".zst", ".bz2", ".xz", ".zip", ".xlsx")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one row has, by column; `place` is where it is, for errors."""

    place: str
    columns: Mapping[str, Any]


def has_rows(path: Path) -> bool:
    """Tell whether a file has rows; else it is a text.

    Raises:
        FinetuneError: it is a table that this command does not read.
    """
    suffix = path.suffix.lower()
    if suffix in OTHER_TABLES:
        raise FinetuneError(
            f"data {path}: expected {', '.join(ROWS)} or a text but got {suffix}; convert it, for example with "
            "pandas: pandas.read_csv(...).to_json('data.jsonl', orient='records', lines=True)"
        )
    return suffix in ROWS


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        FinetuneError: it cannot be read, or a row is none; names file and line.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet(path)
        elif suffix in LINES:
            yield from _lines(path)
        else:
            yield from _array(path)
    except OSError as error:
        raise FinetuneError(f"data {path}: cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"data {path}, line {number}"
            text = _decoded(line, place)
            if text.strip():
                yield _row(_parsed(text, place, "one JSON object on each line"), place)


def _array(path: Path) -> Iterator[Row]:
    place = f"data {path}"
    text = _decoded(path.read_bytes(), place)
    if not text.strip():
        return
    rows = _parsed(text, place, "an array of JSON objects; name a file with one object on each line .jsonl")
    if not isinstance(rows, list):
        raise FinetuneError(
            f"{place}: expected an array of JSON objects but got {_kind(rows)}; name a file with one object on each "
            "line .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield _row(row, f"{place}, row {number}")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise FinetuneError(f"data {path}: pyarrow is not installed; pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(f"data {path}, row {number}", _without_nulls(columns))
    except ArrowException as error:
        raise FinetuneError(f"data {path}: cannot be read as Parquet behind row {number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Return a value of Parquet, without keys that other rows have: structs of a column have the same ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FinetuneError(
            f"{place}: expected UTF-8 but byte {error.start} does not fit; convert it first, for example: "
            "iconv -f latin1 -t utf-8"
        ) from error


def _parsed(text: str, place: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip() else f"column {error.colno}"
        raise FinetuneError(f"{place}: expected {expected} but got, at {at}: {error.msg}") from error
    except RecursionError as error:
        raise FinetuneError(f"{place}: expected {expected} but its nesting is too deep") from error


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise FinetuneError(f"{place}: expected a JSON object but got {_kind(value)}")
    return Row(place, value)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
