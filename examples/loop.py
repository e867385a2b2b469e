"""A training loop of your own: forward, backward, step, and a schedule."""

import common
import torch

import offload

given = common.command_line(__doc__)
rows = common.rows(given)

engine = offload.Engine(common.model(given), offload.AdamW(lr=1e-2), **common.options(given), max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, given.steps)
print(engine.plan)
for step in range(given.steps):
    batch = {name: value[None].to(engine.device) for name, value in rows[step % len(rows)].items()}
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    schedule.step()
    print(f"step {step}: loss {loss.item():.4f}, gradient norm {engine.grad_norm:.3f}")
engine.save_pretrained(given.output)
engine.close()
