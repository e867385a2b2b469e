"""Bytes between memory and files: asynchronous requests, their faults and checksums. Knows no objects."""
