"""Reads pickles and the files of ``torch.save`` without running anything that they name.

Owns the list of what a pickle may name. Nothing on it does more than hold values: a class that it names becomes a
:class:`Record`, a tensor becomes a place in the file. ``torch.load(weights_only=True)`` is close to it, but it takes
what a user has added to a list of the whole process, has a file's tensors in memory or in one map, and does not read
the pickles that torch.distributed.checkpoint writes beside them. Next: :mod:`offload.checkpoint.foreign.files`.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.checkpoint.foreign.files import FileTensor
from offload.errors import ConfigError
from offload.torch_private import REBUILD_PARAMETER, REBUILD_SUBCLASS, REBUILD_TENSOR, REBUILD_TYPED_TENSOR

_LOCAL_HEADER_BYTES = 30  # of a zip file's record, before its name
_NUMBERS = re.compile(r"[?biuf][1248]?")  # dtypes of numpy that hold numbers


class Record:
    """What stands for an object of a class that is known by name only: what it was made of, and its attributes."""

    __slots__ = ("arguments", "attributes")
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Record:
        """Keep what the object was made of."""
        self = super().__new__(cls)
        self.arguments = arguments
        self.attributes = {}
        return self

    def __init__(self, *arguments: Any) -> None:
        """Do nothing more."""

    def __setstate__(self, state: Any) -> None:
        """Keep attributes; a state that is no dict is kept as ``state``."""
        values = state[0] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict) else state
        self.attributes = dict(values) if isinstance(values, dict) else {"state": values}

    def __getitem__(self, name: str) -> Any:
        """Return an attribute."""
        return self.attributes[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default`."""
        return self.attributes.get(name, default)

    def __hash__(self) -> int:
        return hash((type(self).__name__, *map(repr, self.arguments), *map(repr, self.attributes.items())))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Record)
            and type(other).__name__ == type(self).__name__
            and other.arguments == self.arguments
            and other.attributes == self.attributes
        )


# Classes whose objects become records.
RECORDS = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes in a file that tensors view."""

    path: Path
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype


def _tensor(storage: _Storage, first: int, shape: Any, stride: Any, *rest: Any) -> FileTensor:
    return _typed_tensor(storage, first, shape, stride, storage.dtype)


def _tensor_of_dtype(
    storage: _Storage, first: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, *rest: Any
) -> FileTensor:
    return _typed_tensor(storage, first, shape, stride, dtype)


def _typed_tensor(storage: _Storage, first: int, shape: Any, stride: Any, dtype: torch.dtype) -> FileTensor:
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    if len(shape) != len(stride) or min((first, *shape, *stride)) < 0:
        raise ValueError(f"a tensor of shape {shape}, stride {stride}, from element {first} on")
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * dtype.itemsize > storage.size_bytes:
        raise ValueError(f"a tensor up to element {last} in {storage.size_bytes} bytes")
    kept = tuple(
        step if size > 1 else math.prod(shape[d + 1 :])
        for d, (size, step) in enumerate(zip(shape, stride, strict=True))
    )  # of what has one element, torch keeps any stride
    return FileTensor(storage.path, storage.offset_bytes + first * dtype.itemsize, shape, kept, dtype)


class _NumberType:
    """A dtype of numpy that holds plain numbers; numpy's own would take flags from a pickle."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any, *rest: Any) -> None:
        if not isinstance(name, str) or not _NUMBERS.fullmatch(name):
            raise ValueError(f"an array of {name!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        """Check the byte order, which is all that there is to say of numbers."""
        if state[1] == ">":
            raise ValueError("an array of big-endian numbers")


class _Array(np.ndarray[Any, Any]):
    """An array of plain numbers."""

    def __setstate__(self, state: Any) -> None:
        """Take shape and content."""
        _, shape, kind, in_fortran_order, content = state
        if not isinstance(kind, _NumberType) or not isinstance(content, bytes):
            raise ValueError("an array of objects")
        super().__setstate__((1, shape, kind.dtype, in_fortran_order, content))


def _array(kind: object, shape: object, code: object) -> _Array:
    return _Array((0,), "u1")  # its __setstate__ gives it all


def _scalar(kind: Any, content: Any) -> Any:
    if not isinstance(kind, _NumberType) or not isinstance(content, bytes):
        raise ValueError("a number of another kind")
    return np.frombuffer(content, kind.dtype, 1)[0].item()


def _latin1(text: str, coding: str = "latin1") -> bytes:
    if coding != "latin1":
        raise ValueError(f"text in {coding!r}")
    return text.encode("latin1")


# Everything else that a pickle may name, by what stands for it.
_INERT: dict[str, Any] = {
    REBUILD_TENSOR: _tensor,
    REBUILD_TYPED_TENSOR: _tensor_of_dtype,
    REBUILD_SUBCLASS: lambda build, kind, arguments, state: build(*arguments),
    **dict.fromkeys(REBUILD_PARAMETER, lambda tensor, *rest: tensor),
    "torch.Tensor": "torch.Tensor",
    "torch.nn.parameter.Parameter": "torch.nn.Parameter",
    "pathlib.PosixPath": lambda *parts: "/".join(parts),
    "pathlib.WindowsPath": lambda *parts: "/".join(parts),
    "pathlib._local.PosixPath": lambda *parts: "/".join(parts),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *where: ":".join(map(str, where)),
    "torch.serialization._get_layout": str,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": dict,
    "collections.defaultdict": lambda *rest: {},
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
    "builtins.complex": complex,
    "builtins.bytearray": bytearray,
    "builtins.dict": dict,
    "builtins.list": list,
    "numpy.ndarray": "numpy.ndarray",
    "numpy.dtype": _NumberType,
    "_codecs.encode": _latin1,
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{f"torch.{name}": name for name in _STORAGES},
    **{f"torch.storage.{name}": name for name in _STORAGES},
    **{f"{package}.multiarray._reconstruct": _array for package in ("numpy.core", "numpy._core")},
    **{f"{package}.multiarray.scalar": _scalar for package in ("numpy.core", "numpy._core")},
}


class _Call:
    """A function that a pickle may call but not change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        """Refuse to be changed."""
        raise ValueError("a state for a function")


class _Unpickler(pickle.Unpickler):
    """Makes inert values of a pickle."""

    def __init__(self, file: Any, path: Path, storage: Callable[[Any], _Storage]) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path
        self._storage = storage
        self._classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global.

        Raises:
            ConfigError: it is not on the list.
        """
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in _INERT:
            found = _INERT[full]
            return _Call(found) if callable(found) else found
        if full not in RECORDS:
            raise ConfigError(
                f"{self._path}: expected tensors and plain values but got a pickle that names {full}; nothing of it "
                "was run. Load the file where you trust it, and save tensors, numbers and text alone"
            )
        if full not in self._classes:  # one of this pickle's own, which it cannot change for others
            self._classes[full] = type(full, (Record,), {"__slots__": ()})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that a tensor views."""
        return self._storage(pid)


def read_pickle(path: Path) -> Any:
    """Return what a plain pickle holds, with records for objects.

    Raises:
        ConfigError: it cannot be read, is none, or names what is not on the list.
    """

    def refuse(pid: Any) -> _Storage:
        raise ValueError("a storage outside of a file of torch.save")

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return _unpickle(io.BytesIO(content), path, refuse)


def _unpickle(file: Any, path: Path, storage: Callable[[Any], _Storage]) -> Any:
    try:
        return _Unpickler(file, path, storage).load()
    except ConfigError:
        raise
    except Exception as error:  # a hostile or damaged pickle can make any call of what is on the list
        raise ConfigError(
            f"{path}: expected a whole pickle of tensors and plain values but got {type(error).__name__}: {error}; "
            "copy the file again"
        ) from error


def read_torch_file(path: Path, begin: int = 0, size_bytes: int | None = None) -> Any:
    """Return what ``torch.save`` has written, with a :class:`FileTensor` for each tensor.

    Args:
        path: the file.
        begin: where in it the zip archive begins, in bytes.
        size_bytes: of the archive; None for all that follows.

    Raises:
        ConfigError: it cannot be read, was cut off, is of a format before torch 1.6 or of another byte order, or names
            what is not on the list.
    """
    try:
        with path.open("rb") as file:
            head = file.read(2) if not begin else b""
            slice_ = _Slice(file, begin, path.stat().st_size - begin if size_bytes is None else size_bytes)
            if head == b"\x80\x02":
                raise ConfigError(
                    f"{path}: expected a file that torch 1.6 or later has saved but got an older format; rewrite it "
                    "with torch.save(torch.load(path, weights_only=True), path)"
                )
            with zipfile.ZipFile(slice_) as archive:
                return _read_archive(archive, slice_, path, begin)
    except ConfigError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, EOFError, ValueError, RuntimeError, struct.error) as error:
        raise ConfigError(
            f"{path}: expected a whole file of torch.save but got {type(error).__name__}: {error}; copy it again"
        ) from error


def _read_archive(archive: zipfile.ZipFile, file: _Slice, path: Path, begin: int) -> Any:
    root = next((name[: -len("data.pkl")] for name in archive.namelist() if name.endswith("/data.pkl")), None)
    if root is None:
        raise ConfigError(f"{path}: expected a file of torch.save but got a zip archive without data.pkl; pass another")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ConfigError(f"{path}: expected little-endian tensors; save them again on such a machine")

    def storage(pid: Any) -> _Storage:
        kind, storage_type, key, _, numel = pid
        dtype = _STORAGES[storage_type]
        info = archive.getinfo(f"{root}data/{key}")
        if kind != "storage" or info.compress_type != zipfile.ZIP_STORED or info.file_size < numel * dtype.itemsize:
            raise ValueError(f"a storage of {numel} elements in a record of {info.file_size} bytes")
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        offset = info.header_offset + _LOCAL_HEADER_BYTES
        offset += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return _Storage(path, begin + offset, info.file_size, dtype)

    return _unpickle(io.BytesIO(archive.read(f"{root}data.pkl")), path, storage)


class _Slice(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: Any, begin: int, size_bytes: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size_bytes, 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that any place can be read."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes from the place on."""
        left = max(self._size - self._at, 0)
        self._file.seek(self._begin + self._at)
        found: bytes = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(found)
        return found
