"""Hypothesis profiles: `default`, `ci` (the same examples each time) and `fuzz` (many more of them)."""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
