"""Doors: one file per library whose scripts run here with three lines changed."""
