"""`python -m placement`; see `placement.cli`."""

from placement.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
