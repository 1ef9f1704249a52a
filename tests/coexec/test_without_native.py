"""Where no C++ compiler was found, programs equal eager as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def passes(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    environment = {**os.environ, "COEXEC_NATIVE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_settings_and_paths_are_eagers_without_the_native_core():
    passes("tests/coexec/test_settings.py", "tests/coexec/test_adversarial_paths.py")


@pytest.mark.slow
def test_everything_is_eagers_without_the_native_core():
    passes("tests/coexec", f"--ignore={Path(__file__)}")
