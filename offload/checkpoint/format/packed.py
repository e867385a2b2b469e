"""Nested plain values as one piece of bytes, tensors included: for what is small and written often.

Owns the layout: a line of JSON (lengths, the values, the tensors' dtypes and shapes), then the tensors' bytes. Next:
:mod:`offload.durable`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import Any

import torch

from offload.checkpoint.format.nested import Encoder, decode

_LENGTH_DIGITS = 16


def pack(value: Any, path: str) -> bytes:
    """Return `value` as bytes; `path` is what errors call it.

    Raises:
        CheckpointError: something in it is neither a plain value nor an ordinary tensor; names it.
    """
    encoder = Encoder()
    return pack_encoded(encoder.encode(value, path), encoder.tensors)


def pack_encoded(values: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return what an encoder has made as bytes."""
    rows, parts = [], []
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        parts.append(ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b"")
        rows.append([name, str(plain.dtype).removeprefix("torch."), list(plain.shape)])
    head = json.dumps({"values": values, "tensors": rows}, separators=(",", ":")).encode("ascii")
    return b"%0*x" % (_LENGTH_DIGITS, len(head)) + head + b"".join(parts)


def unpack(content: bytes) -> Any:
    """Return a fresh copy of what was packed; what follows it in `content` is ignored."""
    end = _LENGTH_DIGITS + int(content[:_LENGTH_DIGITS], 16)
    head = json.loads(content[_LENGTH_DIGITS:end])
    tensors = {}
    for name, kind, shape in head["tensors"]:
        tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, kind), device="cpu")
        if tensor.nbytes:
            ctypes.memmove(tensor.data_ptr(), content[end : end + tensor.nbytes], tensor.nbytes)
        end += tensor.nbytes
    return decode(head["values"], tensors.__getitem__)
