"""What rows cost: the model, what it takes from a datasheet, and the files of GPUs that were measured.

How costs are measured and fitted is ``calibrate``'s.
"""

from cutlass_fmha.cost.model import BYTES_PER_ELEMENT, PRICES, Counts, Priced, RowCost, count, predict

__all__ = ["BYTES_PER_ELEMENT", "PRICES", "Counts", "Priced", "RowCost", "count", "predict"]
