"""Runs the command ``bandmaster`` as ``python -m bandmaster``."""

import sys

from bandmaster.cli import main

if __name__ == "__main__":
    sys.exit(main())
