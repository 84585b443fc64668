"""Stands in for the module of vLLM 0.33: older ones have other caches."""
