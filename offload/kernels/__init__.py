"""Arithmetic on raw addresses: the typed face of ``csrc/cpu_adam``. Knows neither tensors nor tiers."""
