"""What each lane of one of several ranks takes alone, where all of them share one machine.

Owns these seconds. They are no prediction of a step: nobody has measured how ranks' exchanges go beside the rest on
GPUs. Pure arithmetic over plain values. Next: :mod:`offload.planning.traffic` has the bytes.
"""

from __future__ import annotations

from offload.planning.hardware import Hardware
from offload.planning.moved import gradients_of, updates_of
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
    read, write = size("nvme_read", 0) * ranks, size("nvme_write", 0) * ranks
    alone = max(read / hardware.drive_read_bytes_s, write / hardware.drive_write_bytes_s)
    sent = size("collectives", 0) + size("between_nodes", 0)
    kernels = (*work.forward.items(), *work.backward.items())
    return {
        "compute": sum(kernel.seconds(hardware) * many for kernel, many in kernels),
        "h2d": size("h2d", 0) / hardware.h2d_bytes_s,
        "d2h": size("d2h", 0) / hardware.d2h_bytes_s,
        "cpu": (gradients_of(plan, [frozenset()]) + updates_of(plan)).cpu * ranks / hardware.update_bytes_s,
        "drive": max(alone, (read + write) / hardware.drive_mixed_bytes_s),
        "collectives": 2 * sent * ranks / hardware.host_bytes_s,
    }
