"""Entry point of `python -m bench`."""

import sys

from bench.cli import main

if __name__ == "__main__":  # a process that a command starts imports this file, too
    sys.exit(main())
