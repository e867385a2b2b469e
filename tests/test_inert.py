"""Pickles that would run something are refused and not run; ranges of tensors in files are the tensors' elements."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.checkpoint.foreign.files import FileTensor, read_safetensors
from offload.checkpoint.foreign.inert import Record, read_pickle, read_torch_file
from offload.checkpoint.foreign.opening import open_foreign
from offload.checkpoint.sources import Joined, Part, whole
from offload.errors import ConfigError


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def zipped(path: Path, content: bytes) -> Path:
    """Write a file of ``torch.save`` around any pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("run/data.pkl", content)
        archive.writestr("run/byteorder", b"little")
        archive.writestr("run/data/0", bytes(16))
    return path


@pytest.mark.parametrize(
    "where", ["torch.save", "protocol 4", "optimizer.pt", "rng_state.pth", "DeepSpeed", ".metadata"]
)
def test_a_command_is_refused_and_not_run(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = {"model": {"weight": torch.zeros(2)}, "args": Hostile(mark)}
    path = tmp_path / "run"
    if where in ("torch.save", "protocol 4"):
        torch.save(content, path, pickle_protocol=2 if where == "torch.save" else 4)
    else:
        path.mkdir()
        torch.save({"weight": torch.zeros(2)}, path / "pytorch_model.bin")
        torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
        if where == "DeepSpeed":
            torch.save(content, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
            torch.save(content, path / "mp_rank_00_model_states.pt")
        elif where == ".metadata":
            (path / where).write_bytes(pickle.dumps(content["args"]))
        else:
            torch.save(content, path / where)
    system = os.system.__module__
    with pytest.raises(ConfigError, match=rf"but got a pickle that names {system}.system; nothing of it was run"):
        open_foreign(path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["builtins getattr", "builtins eval", "torch load", "os getcwd", "offload Engine"])
def test_names_that_are_not_on_the_list_are_refused(name: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "run.pt", b"c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(ConfigError, match=rf"{path}: .* names {name.replace(' ', '.')}; "):
        read_torch_file(path)


def test_what_is_on_the_list_cannot_be_changed(tmp_path: Path) -> None:
    """A pickle can give any object a state: neither functions nor classes of the list take one."""
    for name in ("_codecs encode", "torch Size", "collections OrderedDict", "argparse Namespace", "torch float32"):
        for state in (b"}(\x8c\x08__code__\x4b\x01ub.", b"N}(\x8c\x0c__defaults__N\x75\x86b."):
            path = zipped(tmp_path / "run.pt", b"\x80\x04c" + name.replace(" ", "\n").encode() + b"\n" + state)
            with pytest.raises(ConfigError, match="expected a whole pickle of tensors and plain values"):
                read_torch_file(path)


@pytest.mark.parametrize(
    "call",
    [
        "torch.float32, 4, 3",  # one element too many
        "torch.float32, 0, 5",
        "torch.float64, 0, 3",
        "torch.float32, -1, 2",
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(call: str, tmp_path: Path) -> None:
    dtype, first, numel = call.split(", ")
    storage = {"torch.float32": "FloatStorage", "torch.float64": "DoubleStorage"}[dtype]
    content = (
        f"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\n{storage}\nS'0'\nS'cpu'\nI2\ntQ"
        f"I{first}\n(I{numel}\nt(I1\ntI00\nNtR."
    )
    with pytest.raises(ConfigError, match=r"expected a whole pickle .* got ValueError: a tensor"):
        read_torch_file(zipped(tmp_path / "run.pt", content.encode()))


def test_arrays_hold_numbers_only(tmp_path: Path) -> None:
    for array in (np.array([{}], dtype=object), np.zeros(2, ">f4"), np.zeros(2, "f4,i4"), np.array("text")):
        torch.save({"array": array}, tmp_path / "run.pt")
        with pytest.raises(ConfigError, match=r"got ValueError: an array of"):
            read_torch_file(tmp_path / "run.pt")


def test_what_torch_saves_comes_back(tmp_path: Path) -> None:
    class Named(nn.Parameter):
        pass

    values: dict[str, Any] = {
        "numbers": [1, 2.5, True, None, "text", b"bytes", (1, 2), {3}, 1j, slice(1, 2)],
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict(a=1),
        "args": argparse.Namespace(lr=0.5),
        "parameter": nn.Parameter(torch.arange(6.0).view(2, 3)),
        "array": np.arange(5, dtype=np.uint32),
        "scalar": np.float64(2.5),
        "counter": collections.Counter("aab"),
    }
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        values[str(dtype)] = torch.arange(6).view(2, 3).to(dtype)
    values["typed"] = torch.arange(6).to(torch.float8_e4m3fn)
    torch.save(values, tmp_path / "run.pt")
    found = read_torch_file(tmp_path / "run.pt")
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            back = whole(found[name])
            assert back.dtype == value.dtype and torch.equal(back.float(), value.detach().float())
        elif isinstance(value, argparse.Namespace):
            assert isinstance(found[name], Record) and found[name]["lr"] == 0.5
        elif isinstance(value, np.ndarray):
            assert np.array_equal(found[name], value)
        else:
            assert found[name] == value


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    base = torch.arange(7 + int(np.prod(shape)), dtype=draw(st.sampled_from([torch.float32, torch.int64, torch.uint8])))
    tensor = base[draw(st.integers(0, 7)) :][: int(np.prod(shape))].view(shape)
    for dimension in range(len(shape)):
        if draw(st.booleans()):
            tensor = tensor.transpose(dimension, draw(st.integers(0, len(shape) - 1)))
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 2)), *tensor.shape)
    return tensor


@given(tensor=views(), data=st.data())
def test_any_range_of_any_view_is_its_elements(
    tensor: torch.Tensor, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "view.pt"
    torch.save({"a": torch.ones(3), "t": tensor}, path)
    found = read_torch_file(path)["t"]
    flat = tensor.reshape(-1)
    begin = data.draw(st.integers(0, flat.numel()))
    end = data.draw(st.integers(begin, flat.numel()))
    assert found.shape == tuple(tensor.shape) and torch.equal(found.read(begin, end), flat[begin:end])
    assert torch.equal(whole(found), tensor)


class _Held:
    """A source in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.dtype = values, tuple(values.shape), values.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= self.values.numel()
        return self.values[start:stop]


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), data=st.data())
def test_joined_parts_are_one_tensor(sizes: list[int], data: st.DataObject) -> None:
    pieces = [torch.randn(3 + size + 2) for size in sizes]
    joined = Joined((sum(sizes),), [Part(_Held(piece), 3, size) for piece, size in zip(pieces, sizes, strict=True)])
    truth = torch.cat([piece[3 : 3 + size] for piece, size in zip(pieces, sizes, strict=True)])
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    assert torch.equal(joined.read(begin, end), truth[begin:end])


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1000)}, tmp_path / "run.pt")
    found = read_torch_file(tmp_path / "run.pt")["t"]
    os.truncate(tmp_path / "run.pt", 1500)
    with pytest.raises(ConfigError, match=r"run.pt: expected 4000 bytes at \d+ but got \d+; it was cut off"):
        found.read(0, 1000)


def test_old_and_foreign_files_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"t": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"torch 1.6 or later .* rewrite it with torch.save\(torch.load"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"b")
    with pytest.raises(ConfigError, match=r"run.pt: .* a zip archive without data.pkl"):
        read_torch_file(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run.pt: expected a whole file of torch.save but got BadZipFile"):
        read_torch_file(path)
    with pytest.raises(ConfigError, match=r"run.pt: expected a whole pickle"):
        read_pickle(path)


def test_safetensors_are_read_without_the_library(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(7).bfloat16(), "d": torch.zeros(0, 2)}
    save_file(values, str(tmp_path / "w.safetensors"), {"format": "pt"})
    found = read_safetensors(tmp_path / "w.safetensors")
    assert found.keys() == values.keys()
    assert all(isinstance(found[name], FileTensor) and torch.equal(whole(found[name]), values[name]) for name in values)
    content = (tmp_path / "w.safetensors").read_bytes()
    for left in (0, 4, 50, len(content) - 1):
        (tmp_path / "w.safetensors").write_bytes(content[:left])
        with pytest.raises(ConfigError, match=r"w.safetensors: expected"):
            read_safetensors(tmp_path / "w.safetensors")


def test_a_zip_inside_of_a_file_is_read_where_it_is(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(torch.arange(10.0), inner)
    (tmp_path / "x").write_bytes(b"abc" + inner.getvalue() + b"tail")
    found = read_torch_file(tmp_path / "x", 3, len(inner.getvalue()))
    assert torch.equal(found.read(2, 9), torch.arange(10.0)[2:9])


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_or_read(
    at: float, flip: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever byte is wrong or missing: no other error, and nothing runs."""
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([("weight", weight)], lr=1.0, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    torch.save({"model": {"weight": weight}, "optimizer": optimizer.state_dict()}, path)
    content = bytearray(path.read_bytes())
    place = int(at * len(content))
    content[place] ^= flip
    path.write_bytes(content[:place] if cut else content)
    with contextlib.suppress(ConfigError):
        open_foreign(path)
