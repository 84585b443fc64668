"""What attention allocates, known before the call: ``cutlass_fmha.memory_plan``."""
