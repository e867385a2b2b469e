"""The script deepspeed_before.py through the door: trains a small random model in host memory."""

import argparse

import torch

from offload import deepspeed

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def main() -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", help="folder to save to")
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    given = torch.randn(128, 64)
    data = torch.utils.data.TensorDataset(given, given.flip(1))
    engine, _, loader, _ = deepspeed.initialize(
        args=arguments,
        model=model,
        model_parameters=model.parameters(),
        training_data=data,
        config=CONFIG,
    )
    losses = []
    for given, wanted in loader:
        loss = (engine(given.to(engine.device)) - wanted.to(engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.was_step_applied():
            print(engine.global_steps, losses[-1], engine.get_lr(), engine.get_global_grad_norm())
    if arguments.checkpoints:
        engine.save_checkpoint(arguments.checkpoints, client_state={"losses": losses})
    return losses


if __name__ == "__main__":
    main()
