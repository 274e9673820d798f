"""`python -m zerobubble`."""

import sys

from zerobubble.cli import main

if __name__ == "__main__":
    sys.exit(main())
