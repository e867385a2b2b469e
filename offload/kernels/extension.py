"""The compiled optimizer kernels; where they are missing, the error says how to build them.

Owns the import of ``offload._cpu_adam``: everybody else takes it from here. Next: :mod:`offload.kernels.cpu_adam`, its
typed face.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["_cpu_adam"]

if TYPE_CHECKING:
    from offload import _cpu_adam
else:
    try:
        _cpu_adam = importlib.import_module("offload._cpu_adam")
    except ImportError as error:
        raise ImportError(
            f"offload._cpu_adam: expected the compiled optimizer kernels but got: {error}; build them with 'pip "
            "install .' or 'make venv' in a checkout, which needs a C++20 compiler",
            name="offload._cpu_adam",
        ) from error
