"""Classes of other libraries, known by their names, so that nothing has to be imported to ask for them."""

from __future__ import annotations


def is_a(value: object, package: str, name: str) -> bool:
    """Tell whether `value` is of a class called `name` in `package`, or of one made of it, without importing that."""
    return any(kind.__name__ == name and package_of(kind) == package for kind in type(value).__mro__)


def package_of(kind: type) -> str:
    """Return the name of the top package that a class is from."""
    return kind.__module__.partition(".")[0]
