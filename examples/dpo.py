"""Preferences (DPO) with TRL: the reference model is in the engine of the model, and has no memory of its own."""

import common
import datasets
import trl

import offload

given = common.command_line(__doc__)
sentences = common.sentences()


class OffloadDPOTrainer(offload.hf.OffloadTrainerMixin, trl.DPOTrainer):
    """Trains through an engine."""


trainer = OffloadDPOTrainer(
    model=common.model(given),
    ref_model=common.model(given),
    args=trl.DPOConfig(
        given.output,
        max_steps=given.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=common.ON_CPU,
    ),
    train_dataset=datasets.Dataset.from_dict(
        {"prompt": sentences, "chosen": sentences[1:] + sentences[:1], "rejected": sentences[::-1]}
    ),
    processing_class=common.tokenizer(given),
    offload=common.options(given),
)
trainer.train()
print(trainer.engine.plan)
trainer.engine.close()
