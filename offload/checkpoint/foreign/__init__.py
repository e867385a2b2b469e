"""Reads what other programs have saved of a run: weights, masters, optimizer states and counts, by parameter."""
