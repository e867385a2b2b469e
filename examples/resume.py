"""Save a checkpoint, and go on from it in another engine with its states elsewhere: the same bits."""

import common

import offload

given = common.command_line(__doc__)
rows = common.rows(given)


def train(engine: offload.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = {name: value[None].to(engine.device) for name, value in rows[step % len(rows)].items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


with offload.Engine(common.model(given), offload.AdamW(lr=1e-2), **common.options(given)) as engine:
    train(engine, range(given.steps))
    engine.save_checkpoint(given.output, client_state={"batch": given.steps})
    whole = train(engine, range(given.steps, 2 * given.steps))

elsewhere = {**common.options(given), "offload_optimizer": "cpu"}
with offload.Engine(common.model(given), offload.AdamW(lr=1e-2), **elsewhere) as engine:
    first = engine.load_checkpoint(given.output)["batch"]
    resumed = train(engine, range(first, 2 * given.steps))

print("whole:  ", whole)
print("resumed:", resumed)
assert resumed == whole
