"""What each lane of one of several ranks takes alone, where all of them share one machine.

Owns these seconds. They are no prediction of a step: nobody has measured how ranks' exchanges go beside the rest on
GPUs. Pure arithmetic over plain values. Next: :mod:`offload.planning.traffic` has the bytes.
"""

from __future__ import annotations

from offload.planning.hardware import Hardware
from offload.planning.moved import Moved, gradients_of, lane_seconds, updates_of
from offload.planning.plan import Plan
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
