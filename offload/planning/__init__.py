"""What is decided before a byte moves, on plain values: units, roles, and where each of them lives."""
