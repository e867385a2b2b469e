"""The compiled I/O engines; where they are missing, the error says how to build them.

Owns the import of ``swap._aio``: everybody else takes it from here. Next: `aio`, its typed face.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["_aio"]

if TYPE_CHECKING:
    from swap import _aio
else:
    try:
        _aio = importlib.import_module("swap._aio")
    except ImportError as error:
        raise ImportError(
            f"swap._aio: expected the compiled I/O engines but got: {error}; build them with 'pip install .' or 'make "
            "venv' in a checkout, which needs a C++20 compiler",
            name="swap._aio",
        ) from error
