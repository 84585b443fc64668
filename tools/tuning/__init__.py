"""What tools/tune.py consists of."""
