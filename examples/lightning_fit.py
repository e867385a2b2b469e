"""A LightningModule: one more argument of the trainer."""

from typing import Any

import common
import lightning
import torch

import offload

given = common.command_line(__doc__)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = common.model(given)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    strategy=offload.lightning.OffloadStrategy(**common.options(given)),
    max_steps=given.steps,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    devices=1,
)
trainer.fit(Module(), torch.utils.data.DataLoader(common.rows(given), batch_size=2))
trainer.save_checkpoint(f"{given.output}/last.ckpt")  # a folder, with the engine's checkpoint in it
print("loss:", trainer.callback_metrics["loss"].item())
trainer.strategy.engine.close()
