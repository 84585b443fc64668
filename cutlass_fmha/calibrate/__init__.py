"""``python -m cutlass_fmha calibrate``: problems to time, timing and the fit. See docs/selection.md."""
