"""What does this drive give, beside fio, DeepSpeed's aio handle and common ways to keep tensors in files?"""
