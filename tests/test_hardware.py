"""Descriptions of machines: plausible numbers come through, all others are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.planning.hardware import PRESETS, Hardware

DESKTOP = PRESETS["desktop"]
NUMBERS = [field.name for field in dataclasses.fields(Hardware) if field.name != "name"]


def written(path: Path, **changes: Any) -> Path:
    """Write the desktop's numbers with changes; None leaves one out."""
    values = {name: value for name, value in {**dataclasses.asdict(DESKTOP), **changes}.items() if value is not None}
    file = path / "machine.json"
    file.write_text(json.dumps(values))
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert Hardware.load(written(tmp_path)) == DESKTOP
    assert Hardware.load(written(tmp_path, h2d_bytes_s=20e9)).h2d_bytes_s == 20e9


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_names(name: str) -> None:
    assert Hardware.load(name).name == name
    assert Hardware.load(name.upper()) == Hardware.load(name)


def test_what_is_in_the_desktop_has_a_name_of_its_own() -> None:
    assert dataclasses.replace(Hardware.load("rtx4090"), name="desktop") == DESKTOP
    with pytest.raises(ConfigError, match=r"did you mean 'rtx4090'\?"):
        Hardware.load("rtx4080")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_missing_number_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"expected all numbers but {name} are missing"):
        Hardware.load(written(tmp_path, **{name: None}))


@pytest.mark.parametrize("value", [-1.0, 1e18, 10**400, True, "fast", float("nan"), float("inf")])
@pytest.mark.parametrize("name", NUMBERS)
def test_an_absurd_number_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"hardware .*machine.json: desktop: {name}: expected .* from .* to .* but got"
    ):
        Hardware.load(written(tmp_path, **{name: value}))


def test_gigabytes_are_no_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="h2d_bytes_s: expected bytes per second from 1e\\+06 to 1e\\+15 but got 25"):
        Hardware.load(written(tmp_path, h2d_bytes_s=25))


def test_numbers_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="update_bytes_s: expected at most host_bytes_s"):
        Hardware.load(written(tmp_path, update_bytes_s=1e12))
    with pytest.raises(ConfigError, match="drive_mixed_bytes_s: expected at most the sum"):
        Hardware.load(written(tmp_path, drive_mixed_bytes_s=13e9))


def test_what_is_no_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown number 'h2d_byte_s' \(did you mean 'h2d_bytes_s'\?\)"):
        Hardware.load(written(tmp_path, h2d_byte_s=1e9))
    with pytest.raises(ConfigError, match=r"hardware desk: expected one of desktop.*\(did you mean 'desktop'\?\)"):
        Hardware.load("desk")
    with pytest.raises(ConfigError, match=r"hardware: expected the name .* but got 3; pass one of desktop, rtx3090"):
        Hardware.load(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be read as JSON: .*; name a file, or one of desktop"):
        Hardware.load(tmp_path)
    file = tmp_path / "list.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        Hardware.load(file)
    with pytest.raises(ConfigError, match="expected a name as text"):
        Hardware.load(written(tmp_path, name=""))
