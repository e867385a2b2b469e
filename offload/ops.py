"""Operations for tensors and layers that are too large at once: ``offload.ops``.

They need no engine, and work in one. Owns nothing: see :mod:`offload.activations.cross_entropy`,
:mod:`offload.activations.causal_loss` and :mod:`offload.activations.tiling`.
"""

from __future__ import annotations

from offload.activations.causal_loss import chunk_loss
from offload.activations.cross_entropy import LinearCrossEntropy, linear_cross_entropy
from offload.activations.tiling import TiledLinear, join_tiles, split_tiles, tile_

__all__ = [
    "LinearCrossEntropy",
    "TiledLinear",
    "chunk_loss",
    "join_tiles",
    "linear_cross_entropy",
    "split_tiles",
    "tile_",
]
