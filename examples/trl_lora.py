"""Adapters (LoRA) with the SFTTrainer of TRL: the frozen model stays on the drive."""

import common
import datasets
import peft
import trl

import offload

given = common.command_line(__doc__)


class OffloadSFTTrainer(offload.hf.OffloadTrainerMixin, trl.SFTTrainer):
    """Trains through an engine."""


trainer = OffloadSFTTrainer(
    model=common.model(given),
    args=trl.SFTConfig(
        given.output,
        max_steps=given.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=common.ON_CPU,
    ),
    train_dataset=datasets.Dataset.from_dict({"text": common.sentences()}),
    processing_class=common.tokenizer(given),
    peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    offload=common.options(given),
)
trainer.train()
trainer.save_model()  # the adapters
print(trainer.engine.plan)
trainer.engine.close()
