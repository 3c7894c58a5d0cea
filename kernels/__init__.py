"""Compiled twins of the operations, one folder a target; the definitions are in gru_ref/ops.

A twin is proven against its definition by tests/test_twins.py and tests/test_backend.py, and is there only
because it is faster.
"""
