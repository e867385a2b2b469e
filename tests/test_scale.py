"""A step of many GPUs on paper: bytes as the planner counts them, a simulation with bounds, a table in the docs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
from documents import blocks, read

from offload.cli.main import main
from offload.memory.budget import Tier
from offload.planning import scale
from offload.planning.asked import Homes, Request
from offload.planning.clusters import CLUSTERS, DGX_2, H200_NODE
from offload.planning.moved import update_bytes
from offload.planning.planner import make_plan
from offload.planning.scale import LANES, Case, Step, most_parameters, step_of
from offload.planning.traffic import step_bytes
from offload.planning.units import Unit, lay_out

NUMEL, UNITS = 1 << 20, 4


def case(**values: Any) -> Case:
    return Case(**{"cluster": H200_NODE, "gpus": 8, "parameters": 10**10, "layers": 32, "tokens": 4096, **values})


def found(**values: Any) -> Step:
    step = step_of(case(**values))
    assert step is not None
    return step


def units(world: int) -> list[Unit]:
    laid = [lay_out([(f"{number}.weight", (NUMEL,))], ranks=world) for number in range(UNITS)]
    return [
        Unit(number, f"{number}", "bfloat16", 2, True, numel, slots, ranks=world)
        for number, (slots, numel) in enumerate(laid)
    ]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_bytes_are_those_of_the_planner(tier: Tier, world: int) -> None:
    """Of the same homes, for the links that an engine has today; records are padded to pages."""
    request = Request(
        units(world), dict.fromkeys(Tier, 1 << 40), accumulate=True, device_is_host=False, world_size=world, stage=3
    )
    homes = [Homes(tier, tier, tier)] * UNITS
    planned = step_bytes(request, homes, NUMEL)
    every = {kind: {each: float(each is tier) for each in Tier} for kind in ("parameters", "gradients", "states")}
    asked = case(gpus=world, parameters=NUMEL * UNITS)
    moved = scale._moved(asked, every)
    assert moved["drive"] == pytest.approx(planned["nvme_read"] + planned["nvme_write"], rel=0.02)
    # On paper slices go up, and become whole between GPUs. An engine's ranks send from host memory: all of it goes up.
    assert world * moved["h2d"] == pytest.approx(planned["h2d"], rel=0.02)
    plan = make_plan(dataclasses.replace(request, param_tier=tier, optimizer_tier=tier))
    assert moved["cpu"] == pytest.approx(sum(update_bytes(plan, unit) for unit in request.units), rel=0.02)
    assert moved["fabric"] == pytest.approx(planned["collectives"], rel=0.02) and not moved["network"]


@pytest.mark.parametrize("two_level", [False, True])
def test_bytes_between_gpus(two_level: bool) -> None:
    """Of 3 nodes of 8 GPUs, counted slice by slice: who receives what from whom."""
    asked = case(gpus=24, parameters=24 * 10**9, two_level=two_level)
    own = asked.parameters / 24
    fabric = network = 0.0
    for sender in range(1, 24):  # of what rank 0 gets, with ranks 0 to 7 in its node
        for _ in range(2):  # passes: a slice of its own rail comes over the network, and is passed on in the node
            network += 2 * own * (sender % 8 == 0)
            fabric += 2 * own * (sender % 8 != 0)
        if not two_level:
            network, fabric = network + 2 * own * (sender >= 8), fabric + 2 * own * (sender < 8)
        elif sender < 8:  # its part of the node's sum, a 1/8 of the model, of each of these
            fabric += 2 * asked.parameters / 8
        elif sender % 8 == 0:
            network += 4 * own
    step = step_of(asked)
    assert step is not None
    moved = step.bytes
    assert (moved["fabric"], moved["network"]) == (pytest.approx(fabric), pytest.approx(network))


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("parameters", [7 * 10**9, 10**11, 10**12])
@pytest.mark.parametrize("gpus", [16, 128])
def test_a_step_is_no_shorter_than_its_busiest_lane(name: str, parameters: int, gpus: int) -> None:
    step = found(cluster=CLUSTERS[name], gpus=gpus, parameters=parameters)
    assert set(step.seconds) == set(LANES)
    assert max(step.seconds.values()) <= step.step_s * (1 + 1e-9)
    assert step.step_s <= sum(step.seconds.values()) * (1 + 1e-9)
    assert step.seconds[step.binding] == max(step.seconds.values()) and 0 < step.efficiency <= 1
    for where in step.homes.values():
        assert sum(where.values()) == pytest.approx(1) and min(where.values()) >= 0


def test_lanes_beside_each_other_and_behind_each_other() -> None:
    graph = scale._Graph()
    first = graph.add("drive", 2.0, [])
    second = graph.add("drive", 3.0, [])
    beside = graph.add("cpu", 4.0, [first])
    last = graph.add("compute", 1.0, [beside, second])
    assert graph.run() == [2.0, 5.0, 6.0, 7.0] and last == 3


def test_faster_links_and_more_room_are_no_slower() -> None:
    slow = {"cluster": DGX_2, "gpus": 16, "parameters": 10**12}
    before = found(**slow)
    assert before.binding == "drive" and before.homes["states"][Tier.NVME] > 0.9
    for name in ("drive_bytes_s", "update_bytes_s", "link_bytes_s", "fabric_bytes_s", "host_bytes"):
        faster = dataclasses.replace(DGX_2, **{name: 2 * getattr(DGX_2, name)})
        assert found(**{**slow, "cluster": faster}).step_s <= before.step_s * (1 + 1e-9), name


def test_what_does_not_fit() -> None:
    asked = case(cluster=DGX_2, gpus=16)
    most = most_parameters(asked)
    assert step_of(dataclasses.replace(asked, parameters=int(most * 0.99), layers=4096)) is not None
    assert step_of(dataclasses.replace(asked, parameters=2 * most)) is None


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)[3:]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 2))])
def test_the_tables_of_the_docs_are_what_the_command_prints(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = read("docs/scale.md")
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    shown = blocks(text, "text")
    assert len(commands) == len(shown) == 3
    assert printed(commands[number], capsys) == shown[number]


def test_the_worked_example_of_the_docs() -> None:
    """Each line of the blocks is an equation of numbers."""
    values: dict[str, float] = {}
    for block in blocks(read("docs/scale.md")):
        exec(block, values)
    step = found(parameters=10**12, layers=128, tokens=16384)
    for name in ("drive", "cpu", "h2d", "fabric", "compute"):
        assert values[f"{name}_s"] == pytest.approx(step.seconds[name], rel=1e-9), name
    step = found(cluster=DGX_2, gpus=16, tokens=1024)
    assert values["needed"] == pytest.approx(step.bytes["fabric"] * 16 / 15 / step.seconds["compute"], rel=1e-9)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed("python -m offload scale --gpus 8 --parameters 7B,90T --json", capsys))
    assert [row["fits"] for row in rows] == [True, False]
    assert rows[0]["binding"] == "compute" and rows[0]["homes"]["states"]["device"] == 1
    assert rows[0]["seconds"]["fabric"] == pytest.approx(rows[0]["bytes"]["fabric"] / H200_NODE.fabric_bytes_s)


def test_a_part_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--gpus", "12"]) == 1
    assert "--gpus: expected at most 8, which a node of h200 has, or a multiple of it, but got 12" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cluster", "dgx2"], "invalid choice"),
        (["--gpus", "0"], "whole number from 1 to"),
        (["--gpus", "8,x"], "whole number from 1 to"),
        (["--parameters", "7"], "parameters such as 7B"),
        (["--parameters", "0B"], "parameters such as 7B"),
        (["--parameters", "0.0000001M"], "parameters such as 7B"),
        (["--parameters", "9" * 310 + "T"], "parameters such as 7B"),
        (["--tokens", "-1"], "whole number from 1 to"),
        (["--tokens", "9" * 310], "whole number from 1 to"),
    ],
)
def test_bad_input(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", *words])
    assert text in capsys.readouterr().err
