"""Commands: finetune, bench nvme, doctor."""
