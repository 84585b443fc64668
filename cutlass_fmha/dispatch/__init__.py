"""Which kernel runs a problem, and why."""
