"""Classes of other libraries, known by their names, so that nothing has to be imported to ask for them.

Owns, too, what is said where transformers is needed and cannot be imported.
"""

from __future__ import annotations

from typing import Any

from offload.errors import ConfigError


def is_a(value: object, package: str, name: str) -> bool:
    """Tell whether `value` is of a class called `name` in `package`, or of one made of it, without importing that."""
    return any(kind.__name__ == name and package_of(kind) == package for kind in type(value).__mro__)


def package_of(kind: type) -> str:
    """Return the name of the top package that a class is from."""
    return kind.__module__.partition(".")[0]


def import_transformers() -> Any:
    """Return the library transformers.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"transformers: expected to be installed but got: {error}; pip install '.[hf]' in the checkout, or "
            "'.[finetune]' for all commands"
        ) from error
    return transformers
