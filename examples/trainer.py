"""The trainer of transformers: saves a checkpoint in the middle, and resumes it."""

import common
import transformers

import offload

given = common.command_line(__doc__)
arguments = transformers.TrainingArguments(
    given.output,
    max_steps=given.steps,
    learning_rate=1e-2,
    gradient_accumulation_steps=2,
    save_steps=max(1, given.steps // 2),
    logging_steps=1,
    per_device_train_batch_size=2,
    use_cpu=common.ON_CPU,
    report_to=[],
)


def trainer() -> offload.hf.OffloadTrainer:
    return offload.hf.OffloadTrainer(
        model=common.model(given),
        args=arguments,
        train_dataset=common.rows(given),
        callbacks=[offload.hf.OffloadCallback()],
        offload=common.options(given),
    )


whole = trainer()
whole.train()
whole.engine.close()
resumed = trainer()
resumed.train(resume_from_checkpoint=f"{given.output}/checkpoint-{max(1, given.steps // 2)}")
print(resumed.evaluate(common.rows(given)[:4]))
resumed.engine.close()


def losses(of: offload.hf.OffloadTrainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


assert losses(resumed) == losses(whole)
