"""Clipping on the simulated device: what torch's own function and clipping all at once ask of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated import LAZY, counts, running
from test_simulated_engine import batch, loss_of, net, placed

from offload import AdamW, Engine
from offload.module.clipping import clip_grad_norm_

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

ASKED = ("synchronizations", "h2d_copies")


def asked_now() -> list[int]:
    """Return what torch's own stream was asked; what the next forward needs comes on another one, at any time."""
    return [counts()["sim:0/0"][what] for what in ASKED]


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_the_host_asks_the_device_once(home: str, tmp_path: Path) -> None:
    """Torch's function brings each norm there, and reads the factor for each gradient."""
    asked, digests, norms = [], [], []
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        model = net()
        count = len(list(model.parameters()))
        with running(LAZY) as seen, Engine(model, AdamW(lr=1e-2), **placed(home, model, tmp_path)) as engine:
            engine.backward(loss_of(engine, batch(0).to("sim")))
            assert engine.grad_norm is not None  # all gradients have come to the host
            before = asked_now()
            norm = clip(model.parameters(), 1e-3)
            asked.append([now - then for now, then in zip(asked_now(), before, strict=True)])
            engine.step()
            norms.append(norm.cpu())
            digests.append(engine.digests())
        assert seen.races == []
    assert asked == [[2 * count, count], [2, 1]]  # an upload from memory that is not page-locked is waited for, too
    assert digests[0] == digests[1] and torch.equal(*norms) and float(norms[0]) > 1e-3
