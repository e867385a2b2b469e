"""``offload checkpoint``: lists checkpoints, compares every byte with its checksum, writes them in other formats."""
