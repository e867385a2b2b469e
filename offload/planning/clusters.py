"""Machines with several GPUs, many of which make a cluster: numbers per second and per node.

Owns the numbers. Next: :mod:`offload.planning.scale` makes a step of them.
"""

from __future__ import annotations

import dataclasses

from offload.planning.hardware import H200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of one kind, as many as it takes.

    Attributes:
        name: of the kind.
        gpus: of a node.
        flops: multiplications and additions per second of a GPU in 16 bits, by the data sheet.
        flops_share: the part of them that large products reach.
        device_bytes: memory of a GPU.
        fabric_bytes_s: bytes per second that a GPU receives from those of its node.
        network_bytes_s: bytes per second that a GPU receives from other nodes, if all of them do.
        link_bytes_s: bytes per second of a GPU's link to host memory in each direction, if all links are busy.
        host_bytes: memory of a node's host.
        update_bytes_s: bytes per second that updates of a node read and write.
        drive_bytes: of a node's drives.
        drive_bytes_s: bytes per second of a node's drives, read and written together.
    """

    name: str
    gpus: int
    flops: float
    flops_share: float
    device_bytes: float
    fabric_bytes_s: float
    network_bytes_s: float
    link_bytes_s: float
    host_bytes: float
    update_bytes_s: float
    drive_bytes: float
    drive_bytes_s: float


_GB, _TB = 1e9, 1e12

H200_NODE = Cluster(
    name="h200",
    gpus=8,
    flops=H200.flops_16,
    flops_share=H200.flops_share,
    device_bytes=H200.device_bytes,
    fabric_bytes_s=0.8 * 450 * _GB,
    network_bytes_s=0.8 * 50 * _GB,
    link_bytes_s=H200.h2d_bytes_s,
    host_bytes=2 * _TB,
    update_bytes_s=2 * H200.update_bytes_s,
    drive_bytes=8 * 3.84 * _TB,
    drive_bytes_s=8 * H200.drive_mixed_bytes_s,
)
"""Eight H200: NVLink 4 (450 GB/s each way), a 400 Gb/s InfiniBand adapter per GPU, two sockets, 2 TB of memory.

As described for MLPerf: ``closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json`` of mlcommons/inference_results_v4.1.
Assumed: the share of 0.8 for NVLink and InfiniBand, a drive of 3.84 TB per GPU; all else as in the preset ``h200``.
"""

DGX_2 = Cluster(
    name="dgx-2",
    gpus=16,
    flops=125e12,
    flops_share=H200.flops_share,
    device_bytes=32 * _GB,
    fabric_bytes_s=0.8 * 150 * _GB,
    network_bytes_s=0.8 * 8 * 12.5 / 16 * _GB,
    link_bytes_s=3 * _GB,
    host_bytes=1.5 * _TB,
    update_bytes_s=0.7 * 2 * 128 * _GB,
    drive_bytes=30 * _TB,
    drive_bytes_s=8 * 3.2 * _GB,
)
"""A DGX-2, on which ZeRO-Infinity was measured: sixteen V100 of 32 GB, NVSwitch (150 GB/s each way), eight InfiniBand
adapters of 100 Gb/s, 1.5 TB of memory, 30 TB of NVMe (NVIDIA's announcement); 48 GB/s between host memory and all
sixteen GPUs (arXiv 2104.07857). Assumed: eight drives of 3.2 GB/s, two sockets of 128 GB/s, shares as above.
"""

CLUSTERS = {cluster.name: cluster for cluster in (H200_NODE, DGX_2)}
