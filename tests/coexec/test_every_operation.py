"""Every operation that PyTorch's own tests know, with its gradients and theirs, has eager's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compare(first, end, step):
    command = [sys.executable, "-m", "tests.coexec.every_operation", str(first), str(end), str(step)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_every_twentieth_operation_has_eagers_bits():
    pytest.importorskip("expecttest", reason="PyTorch's list of operations needs it")
    compare(7, 10_000, 20)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 800, 100))
def test_every_operation_has_eagers_bits(first):
    pytest.importorskip("expecttest", reason="PyTorch's list of operations needs it")
    compare(first, first + 100, 1)
