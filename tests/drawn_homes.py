"""Homes by chance: each unit's parameters, gradients and states anywhere that a plan may put them."""

from __future__ import annotations

import random

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request

AWAY = (Tier.HOST, Tier.NVME)
WHOLE_SHARE = 0.25  # of units whose gradients and states are on the device, where they may be


def any_homes(request: Request, seed: int) -> list[Homes]:
    """Return homes that depend on nothing but units and seed.

    A device that is not the CPU has all of a unit, or its parameters alone; slices of parameters are not there.
    """
    chance, found = random.Random(seed), []
    near = () if request.slices_parameters and not request.device_is_host else (Tier.DEVICE,)
    there = request.device_is_host or (request.updates_on_device and request.own is None)
    for unit in request.units:
        param, grad, states = chance.choice((*near, *AWAY)), chance.choice(AWAY), chance.choice(AWAY)
        if there and unit.trainable and chance.random() < WHOLE_SHARE:
            grad = states = Tier.DEVICE
            param = param if request.device_is_host else Tier.DEVICE
        found.append(Homes(param, grad, states) if unit.trainable else Homes(param, None, None))
    return found
