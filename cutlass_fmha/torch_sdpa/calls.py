"""The calls that torch had for us."""

from cutlass_fmha.tally import Tally

calls = Tally("torch")
