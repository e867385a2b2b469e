"""How long threads of OpenMP spin before they sleep, in processes that this project starts.

Owns the setting. Torch's threads wait for each other some hundred times per step. While they spin, they take cores from
transfers, updates and other processes; each sleep costs a step some time. ``bench/waiting.py`` has measured the bound.
A process that a user starts is the user's: nothing is set there. Next: :mod:`offload.cli.main`.

Source: the manual of GNU libgomp, ``GOMP_SPINCOUNT``. Other runtimes of OpenMP ignore it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "100000"
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let threads of OpenMP spin for a while and then sleep, unless the environment says how they wait.

    Read when torch is first imported; later it changes nothing.
    """
    if not any(name in environment for name in _CHOICES):
        environment["GOMP_SPINCOUNT"] = SPINS
