"""A loop of Accelerate: accumulates, clips, saves in the middle and goes on. torchrun starts several processes."""

from typing import Any

import common
import accelerate
import torch

import offload

ACCUMULATION = 2

given = common.command_line(__doc__)
accelerator = accelerate.Accelerator(cpu=common.ON_CPU, gradient_accumulation_steps=ACCUMULATION)
model: Any = common.model(given)
engine = offload.Engine(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    **common.options(given),
    gradient_accumulation_steps=ACCUMULATION,
    gradient_reduction="sum",  # the accelerator divides the loss
    stage="auto",  # of several processes
)
schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 2 * given.steps)
loader: Any = torch.utils.data.DataLoader(common.rows(given) * accelerator.num_processes, batch_size=1)
model, optimizer, loader, schedule = offload.accelerate.prepare(accelerator, engine, loader, schedule)


def train(first: int, count: int) -> list[float]:
    losses = []
    for batch, _ in zip(accelerator.skip_first_batches(loader, first), range(count), strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


half = ACCUMULATION * given.steps
train(0, half)
accelerator.save_state(given.output)
whole = train(half, half)
accelerator.load_state(given.output)
resumed = train(half, half)
accelerator.print("whole:  ", whole)
accelerator.print("resumed:", resumed)
assert resumed == whole
assert engine.stats().step == 2 * given.steps
engine.close()
