"""Parts of tools/emulate.py: building, measuring and reporting rows on an sm_90 GPU that resembles others."""
