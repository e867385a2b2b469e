"""What ``activations="auto"`` chooses, and in which words.

Owns the rule: what fits stays; else the faster of moving it away and computing it again. Pure Python over plain values.
Next: :mod:`offload.predicting` and :mod:`offload.deciding` have the seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from offload.sizes import figures

AUTO, KEEP, OFFLOAD, RECOMPUTE = "auto", "keep", "offload", "recompute"


def choose(seconds: Mapping[str, float], *, fits: bool = True) -> tuple[str, str]:
    """Return the mode, and the choice in words.

    Args:
        seconds: of a step by the plan, per mode that is possible; none of them where all activations fit.
        fits: computing blocks again does; else it is not among `seconds`.
    """
    if not seconds:
        return KEEP, f"{KEEP}, for they fit the device"
    if RECOMPUTE not in seconds:
        why = "no block can be computed again" if fits else "it does not fit if blocks are computed again"
        return OFFLOAD, f"{OFFLOAD}, for {why}"
    mode = OFFLOAD if seconds[OFFLOAD] <= seconds[RECOMPUTE] else RECOMPUTE
    other = RECOMPUTE if mode == OFFLOAD else OFFLOAD
    return mode, f"{mode}, {figures(seconds[mode])} s per step by the plan; {other} {figures(seconds[other])} s"
