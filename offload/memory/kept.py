"""Small JSON files in the user's cache folder: what was measured once, and is measured again where they are lost.

Owns how they are read and replaced; what is in them is their owners' business. Next: :mod:`offload.memory.drives`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_kept(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def keep(file: Path, name: str, value: Any) -> None:
    """Let the object in a file have `value` at `name`; readers find the old or the new one, whole.

    Raises:
        OSError: it cannot be written.
    """
    content = {**read_kept(file), name: value}
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2, sort_keys=True)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
