"""``python -m cutlass_fmha``: the command line, which ``cutlass-fmha`` runs, too."""

import sys

from cutlass_fmha.cli import main

if __name__ == "__main__":
    sys.exit(main())
