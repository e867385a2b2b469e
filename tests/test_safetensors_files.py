"""Headers are read as the format's own library writes them; damaged files are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload.checkpoint.safetensors_files import FileReader, OpenFiles, find_tensors
from offload.errors import ConfigError

TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "mask": torch.tensor([True, False]),
}


def sharded(folder: Path) -> Path:
    names = list(TENSORS)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, part in shards.items():
        save_file({name: TENSORS[name] for name in part}, folder / file)
    places = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "path",
    [single, sharded, lambda f: single(f) / "model.safetensors", lambda f: sharded(f) / "model.safetensors.index.json"],
)
def test_tensors_are_found_and_read(path: Callable[[Path], Path], tmp_path: Path) -> None:
    found = find_tensors(path(tmp_path))
    assert found.keys() == TENSORS.keys()
    files = OpenFiles()
    for name, truth in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (truth.dtype, tuple(truth.shape))
        out = torch.empty_like(truth)
        FileReader(files, found[name]).read(0, truth.numel(), out.data_ptr())
        assert torch.equal(out, truth)
    part = torch.empty(3)
    files.read(found["weight"], 5, 8, part.data_ptr())
    assert part.tolist() == [5, 6, 7]
    files.close()
    files.close()


def test_a_single_file_is_read_before_an_index(tmp_path: Path) -> None:
    """transformers leaves the index of earlier shards, which it deletes, beside its single file."""
    index = sharded(tmp_path) / "model.safetensors.index.json"
    assert {found.path for found in find_tensors(single(tmp_path)).values()} == {tmp_path / "model.safetensors"}
    assert {found.path.name for found in find_tensors(index).values()} == {"a.safetensors", "b.safetensors"}
    (tmp_path / "b.safetensors").unlink()
    assert find_tensors(tmp_path).keys() == TENSORS.keys()


def header(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}
    text = json.dumps({"first": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"its header would take 0 of 0 bytes.*download it again"),
        (b"\xff" * 100, "its header would take"),
        (header()[:-1], r"expected tensor first to end at byte (\d+) but the file has \d+; it is cut off"),
        (header()[:30], "its header would take .* of 30 bytes"),
        ((20).to_bytes(8, "little") + b"{" * 40, "expected JSON but got"),
        ((20).to_bytes(8, "little") + b"[" + b" " * 18 + b"]", "expected a JSON object"),
        (header(dtype="F4"), "tensor first: expected one of F64, .* but got dtype F4"),
        (header(shape=[2, 4]), r"tensor first: expected 32 bytes for shape \(2, 4\) of F32 but got 24"),
        (header(shape=[2, -3]), "tensor first: expected dtype, shape and data_offsets"),
        (header(shape="2"), "tensor first: expected dtype, shape and data_offsets"),
        (header(data_offsets=[0]), "tensor first: expected dtype, shape and data_offsets"),
        (header(data_offsets=None), "tensor first: expected dtype, shape and data_offsets"),
    ],
)
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{message}"):
        find_tensors(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: .*does not exist; .*snapshot_download"):
        find_tensors(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"but got pytorch_model.bin; load other formats with transformers"):
        find_tensors(tmp_path)
    (sharded(tmp_path) / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b.safetensors: expected a file with 3 tensors, count the first"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "expected a weight_map"),
        ({"weight_map": {"weight": 1}}, "expected a weight_map"),
        ({"weight_map": {"other": "a.safetensors"}}, r"a.safetensors: expected tensor other, as .* says"),
        ({"weight_map": {"weight": "../a.safetensors"}}, "does not exist"),
    ],
)
def test_wrong_indices_are_refused(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        find_tensors(tmp_path)


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path) -> None:
    found = find_tensors(single(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: found["weight"].offset_bytes + 8])
    files, out = OpenFiles(), torch.empty(12)
    with pytest.raises(ConfigError, match=r"model.safetensors: expected tensor weight to have 48 B.*ends at byte"):
        files.read(found["weight"], 0, 12, out.data_ptr())
    files.close()
