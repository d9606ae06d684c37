"""Benchmarks: measured side by side, printed as tables, never asserted in tests."""
