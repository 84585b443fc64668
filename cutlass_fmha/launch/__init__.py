"""From a call to a kernel: plans of what never changes between calls, and launches by them."""
