"""Commands: finetune, tune (or bench nvme), doctor."""
