"""Bytes of this machine: tiers, budgets, arenas, copies between them, drives. Knows no model."""
