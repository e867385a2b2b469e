"""What each lane of one of several ranks takes alone, where all of them share one machine.

Owns these seconds. They are no prediction of a step, but tell how long it takes at least: nobody has measured how
ranks' exchanges go beside the rest on GPUs. Pure arithmetic over plain values. Next: :mod:`offload.planning.traffic`
has the bytes.
"""

from __future__ import annotations

import dataclasses

from offload.memory.budget import Tier
from offload.planning.hardware import Hardware
from offload.planning.moved import Moved, gradients_of, lane_seconds, updates_of
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.work import Work


def lanes_of(plan: Plan, work: Work, hardware: Hardware) -> dict[str, float]:
    """Return seconds per lane, of a step with one micro-batch of each rank.

    Each rank has a device and a link of its own. They share the updates' and the drive's bytes per second. What a rank
    sends goes through host memory: it is read there once, and written once.

    Args:
        plan: of one rank; bytes of links are those of :attr:`Plan.step_bytes`.
        work: of one micro-batch.
        hardware: the machine, with one of its devices.
    """
    ranks, size = plan.request.world_size, plan.step_bytes.get
    moved = Moved(
        h2d=size("h2d", 0),
        d2h=size("d2h", 0),
        cpu=(gradients_of(plan, [frozenset()]) + updates_of(plan)).cpu * ranks,
        drive_read=size("nvme_read", 0) * ranks,
        drive_write=size("nvme_write", 0) * ranks,
    )
    sent = size("collectives", 0) + size("between_nodes", 0)
    kernels = (*work.forward.items(), *work.backward.items())
    return {
        "compute": sum(kernel.seconds(hardware) * many for kernel, many in kernels),
        **lane_seconds(moved, hardware),
        "collectives": 2 * sent * ranks / hardware.host_bytes_s,
    }


def least_of(plan: Plan, work: Work, hardware: Hardware) -> dict[str, float]:
    """Return seconds per lane that every step takes: those of bytes that move whatever is in memory still.

    The working region may have units where a pass turns into the next one. A forward may find parameters in memory that
    are at home on NVMe, for they come to it from their update. Activations that are leaving may not have to come back.

    Args:
        plan: as for :func:`lanes_of`, as all others.
        work: of one micro-batch.
        hardware: the machine.
    """
    on_drive = [unit for unit in plan.request.units if plan.home(unit, Role.PARAM) is Tier.NVME]
    one_pass = sum(plan.role_bytes(unit, Role.PARAM) for unit in on_drive)
    kept, back = plan.working_bytes, plan.activation_step_bytes.get
    saved = {"nvme_read": one_pass + min(kept, one_pass) + back("nvme_read", 0), "h2d": 2 * kept + back("h2d", 0)}
    saved["collectives"] = kept
    moved = {link: max(size - saved.get(link, 0), 0) for link, size in plan.step_bytes.items()}
    return lanes_of(dataclasses.replace(plan, step_bytes=moved), work, hardware)
