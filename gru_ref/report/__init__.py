"""Figures of training runs, from the files that a run directory holds; nothing here trains or evaluates."""
