"""The files of a checkpoint: what they are called, what is in them, how their bytes come and go."""
