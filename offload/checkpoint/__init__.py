"""Tensors by name, in and out of the tiers."""
