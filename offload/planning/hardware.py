"""What a machine can do per second: of plain numbers, what a step takes on it can be told without it.

Owns the numbers, the checks that they are plausible, and a few machines by name. Knows neither models nor plans. The
simulated device of the tests reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, did_you_mean

LEAST_SHARE = 0.25  # of host memory's bandwidth that copies and drives leave to the CPU


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, its host and its drive.

    Attributes:
        name: of the machine.
        flops_16: multiplications and additions per second of dense matrix products in 16 bits, by the data sheet.
        flops_32: the same in fp32.
        flops_share: the part of them that large products reach.
        device_bytes: device memory.
        device_bytes_s: bytes per second of it, read and written together.
        h2d_bytes_s: bytes per second from host memory to the device that copies reach.
        d2h_bytes_s: the same from the device to host memory.
        host_bytes: host memory.
        host_bytes_s: bytes per second of it, read and written together.
        update_bytes_s: the part of these that updates on the CPU reach.
        drive_read_bytes_s: bytes per second of the drive, if nothing is written.
        drive_write_bytes_s: the same of writes, if nothing is read.
        drive_mixed_bytes_s: both together, if it reads and writes.
        drive_s: seconds until the drive begins with an operation.
        kernel_s: seconds of the shortest kernel.
        copy_s: seconds of a copy between host and device, beside its bytes.
        launch_s: seconds from a call of the host until the device can begin.
        operator_s: seconds of the host per operator of torch, with its share of modules and of autograd. Of a CPU that
            computes, beside what the operators take alone.
        hook_s: seconds of the engine's hooks per call of a module.
        gradient_s: seconds of the engine's hooks per gradient.

    Raises:
        ConfigError: a number is absurd; names it, and what is expected.
    """

    name: str
    flops_16: float
    flops_32: float
    flops_share: float
    device_bytes: float
    device_bytes_s: float
    h2d_bytes_s: float
    d2h_bytes_s: float
    host_bytes: float
    host_bytes_s: float
    update_bytes_s: float
    drive_read_bytes_s: float
    drive_write_bytes_s: float
    drive_mixed_bytes_s: float
    drive_s: float
    kernel_s: float
    copy_s: float
    launch_s: float
    operator_s: float
    hook_s: float
    gradient_s: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"hardware: expected a name as text but got {self.name!r}; name the machine")
        for field in dataclasses.fields(self)[1:]:
            self._check(field.name)
        _in_order(self, "update_bytes_s", "host_bytes_s")
        if self.drive_mixed_bytes_s > self.drive_read_bytes_s + self.drive_write_bytes_s:
            raise ConfigError(
                f"hardware {self.name}: drive_mixed_bytes_s: expected at most the sum of reads alone and writes alone "
                f"but got {self.drive_mixed_bytes_s:g}; give the bytes of both together"
            )

    def _check(self, name: str) -> None:
        value, (low, high, unit) = getattr(self, name), _range_of(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # nor is NaN, or an integer that no float can be
            raise ConfigError(
                f"hardware {self.name}: {name}: expected {unit} from {low:g} to {high:g} but got {value!r}; "
                "give what was measured, in this unit"
            )

    def updates_beside(self, copied_bytes_s: float) -> float:
        """Return the bytes per second that updates on the CPU reach while so many go through host memory besides."""
        left = max(self.host_bytes_s - copied_bytes_s, self.host_bytes_s * LEAST_SHARE)
        return min(self.update_bytes_s, left)

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Hardware:
        """Return the machine that a preset's name or a JSON file describes: an object with all attributes.

        Raises:
            ConfigError: there is no such file, or a number is missing, unknown or absurd; names it.
        """
        names = ", ".join(PRESETS)
        if not isinstance(source, (str, os.PathLike)):
            raise ConfigError(
                f"hardware: expected the name of a machine, a JSON file or an offload.Hardware but got {source!r}; "
                f"pass one of {names}, or a file"
            )
        if isinstance(source, str) and source.lower() in PRESETS:
            return PRESETS[source.lower()]
        if not os.path.exists(source):  # False of a name that is too long, too
            raise ConfigError(
                f"hardware {os.fspath(source)}: expected one of {names}, or a JSON file, but there is neither"
                f"{did_you_mean(os.fspath(source), PRESETS)}; name one of them"
            )
        try:
            values: Any = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"hardware {os.fspath(source)}: cannot be read as JSON: {error}; name a file, or one of {names}"
            ) from error
        if not isinstance(values, Mapping):
            raise ConfigError(f"hardware {os.fspath(source)}: expected a JSON object at the top")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"hardware {os.fspath(source)}: unknown number {name!r}{did_you_mean(str(name), known)}"
                )
        missing = [name for name in known if name not in values]
        if missing:
            raise ConfigError(
                f"hardware {os.fspath(source)}: expected all numbers but {', '.join(missing)} are missing"
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(
                f"hardware {os.fspath(source)}: {str(error).removeprefix('hardware').lstrip(': ')}"
            ) from error


def _range_of(name: str) -> tuple[float, float, str]:
    """Return what is plausible, and the unit."""
    if name == "flops_share":
        return 0.01, 1.0, "a share"
    if name.startswith("flops"):
        return 1e9, 1e17, "operations per second"
    if name.endswith("bytes_s"):
        return 1e6, 1e15, "bytes per second"
    if name.endswith("bytes"):
        return 1e6, 1e15, "bytes"
    return 0.0, 0.1, "seconds"


def _in_order(hardware: Hardware, smaller: str, larger: str) -> None:
    if getattr(hardware, smaller) > getattr(hardware, larger):
        raise ConfigError(
            f"hardware {hardware.name}: {smaller}: expected at most {larger}, {getattr(hardware, larger):g}, but got "
            f"{getattr(hardware, smaller):g}; measure both in one run"
        )


_GB = 1e9
_HOST: dict[str, float] = {
    "drive_s": 80e-6,
    "kernel_s": 3e-6,
    "copy_s": 8e-6,
    "launch_s": 4e-6,
    "operator_s": 10.8e-6,
    "hook_s": 19.4e-6,
    "gradient_s": 21.5e-6,
}

DESKTOP = Hardware(
    name="desktop",
    flops_16=165.2e12,
    flops_32=82.6e12,
    flops_share=0.7,
    device_bytes=24 * 2**30,
    device_bytes_s=0.85 * 1008 * _GB,
    h2d_bytes_s=25 * _GB,
    d2h_bytes_s=25 * _GB,
    host_bytes=192 * 2**30,
    host_bytes_s=0.8 * 89.6 * _GB,
    update_bytes_s=0.7 * 89.6 * _GB,
    drive_read_bytes_s=7 * _GB,
    drive_write_bytes_s=5 * _GB,
    drive_mixed_bytes_s=6 * _GB,
    **_HOST,
)
"""A GeForce RTX 4090 beside two channels of DDR5-5600 and a drive on PCIe 4.0.

Data sheets: NVIDIA Ada whitepaper (165.2 TFLOPS in 16 bits with fp32 sums, 82.6 in fp32, 24 GB, 1008 GB/s); JEDEC DDR5
(5600 million transfers of 8 bytes in each of two channels, 89.6 GB/s); PCIe 4.0 x16 (31.5 GB/s before overhead).
Assumed: shares of 0.7, 0.85 and 0.8 of them, 25 GB/s for copies. The drive is not a certain one: 7 and 5 GB/s, and
6 GB/s where it does both.

Of all presets: `operator_s` is what a tiny Llama takes per operator on a CPU, forward and backward; `hook_s` and
`gradient_s` are those of ``bench/overhead.py``. Seconds of kernels, copies, launches and drives are rough guesses.
"""

H200 = Hardware(
    name="h200",
    flops_16=989.5e12,
    flops_32=67e12,
    flops_share=0.7,
    device_bytes=141e9,
    device_bytes_s=0.85 * 4800 * _GB,
    h2d_bytes_s=52 * _GB,
    d2h_bytes_s=52 * _GB,
    host_bytes=1024 * 2**30,
    host_bytes_s=0.8 * 307.2 * _GB,
    update_bytes_s=0.7 * 307.2 * _GB,
    drive_read_bytes_s=14 * _GB,
    drive_write_bytes_s=7 * _GB,
    drive_mixed_bytes_s=10 * _GB,
    **_HOST,
)
"""An H200 SXM beside one socket with eight channels of DDR5-4800 and a drive on PCIe 5.0.

Data sheets: NVIDIA H200 (989.5 TFLOPS dense in bf16, 67 in fp32, 141 GB, 4.8 TB/s); JEDEC DDR5 (307.2 GB/s); PCIe 5.0
x16 (63 GB/s before overhead); Samsung PM1743 (14 GB/s read, 7 written). Assumed: the shares of :data:`DESKTOP`, 52 GB/s
for copies, 10 GB/s for reads and writes together.
"""

GH200 = dataclasses.replace(
    H200,
    name="gh200",
    device_bytes=96e9,
    device_bytes_s=0.85 * 4000 * _GB,
    h2d_bytes_s=0.8 * 450 * _GB,
    d2h_bytes_s=0.8 * 450 * _GB,
    host_bytes=480e9,
    host_bytes_s=0.8 * 512 * _GB,
    update_bytes_s=0.7 * 512 * _GB,
)
"""A GH200: the device reaches host memory over NVLink-C2C.

Data sheet: NVIDIA GH200 Grace Hopper (96 GB of HBM3 at 4 TB/s, 450 GB/s in each direction between the two, 480 GB of
LPDDR5X at 512 GB/s). Assumed: shares of 0.8, 0.85 and 0.7 of them, the drive of :data:`H200`.
"""

RTX3090 = dataclasses.replace(
    DESKTOP, name="rtx3090", flops_16=71.2e12, flops_32=35.6e12, device_bytes_s=0.85 * 936 * _GB
)
"""A GeForce RTX 3090 in place of that of :data:`DESKTOP`.

Data sheet: NVIDIA GA102 whitepaper (71.2 TFLOPS dense in 16 bits with fp32 sums, 35.6 in fp32, 24 GB, 936 GB/s).
"""

RTX4090 = dataclasses.replace(DESKTOP, name="rtx4090")
"""By another name, :data:`DESKTOP`."""

RTX5090 = dataclasses.replace(
    DESKTOP,
    name="rtx5090",
    flops_16=209.5e12,
    flops_32=104.8e12,
    device_bytes=32 * 2**30,
    device_bytes_s=0.85 * 1792 * _GB,
    h2d_bytes_s=52 * _GB,
    d2h_bytes_s=52 * _GB,
)
"""A GeForce RTX 5090 in place of that of :data:`DESKTOP`.

Data sheet: NVIDIA Blackwell whitepaper (209.5 TFLOPS dense in 16 bits with fp32 sums, 104.8 in fp32, 32 GB, 1792 GB/s,
PCIe 5.0 x16). Assumed: copies as fast as those of :data:`H200`.
"""

A100 = dataclasses.replace(
    H200,
    name="a100",
    flops_16=312e12,
    flops_32=19.5e12,
    device_bytes=80e9,
    device_bytes_s=0.85 * 2039 * _GB,
    h2d_bytes_s=25 * _GB,
    d2h_bytes_s=25 * _GB,
    host_bytes_s=0.8 * 204.8 * _GB,
    update_bytes_s=0.7 * 204.8 * _GB,
    drive_read_bytes_s=7 * _GB,
    drive_write_bytes_s=5 * _GB,
    drive_mixed_bytes_s=6 * _GB,
)
"""An A100 SXM of 80 GB beside one socket with eight channels of DDR4-3200.

Data sheets: NVIDIA A100 (312 TFLOPS dense in bf16, 19.5 in fp32, 80 GB, 2039 GB/s, PCIe 4.0 x16); JEDEC DDR4
(204.8 GB/s). Assumed: copies and the drive of :data:`DESKTOP`.
"""

H100 = dataclasses.replace(H200, name="h100", device_bytes=80e9, device_bytes_s=0.85 * 3350 * _GB)
"""An H100 SXM in place of the device of :data:`H200`.

Data sheet: NVIDIA H100 (80 GB at 3.35 TB/s; products as an H200).
"""

PRESETS = {machine.name: machine for machine in (DESKTOP, RTX3090, RTX4090, RTX5090, A100, H100, H200, GH200)}
