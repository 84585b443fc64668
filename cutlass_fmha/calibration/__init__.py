"""Measured costs of rows: problems to time, timing, the fit, and where it is kept. See docs/selection.md.

Selection needs ``store`` only; the rest is imported by what measures.
"""
