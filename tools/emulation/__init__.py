"""What tools/emulate.py consists of."""
