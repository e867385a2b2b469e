"""Measure a drive, and keep the settings that served it best for the engine."""
