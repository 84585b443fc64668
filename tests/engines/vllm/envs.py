"""Stands in for the module of vLLM 0.33."""

VLLM_BATCH_INVARIANT: bool = False
