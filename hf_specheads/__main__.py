"""`python -m hf_specheads ...`, the same as the console script `specheads`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
