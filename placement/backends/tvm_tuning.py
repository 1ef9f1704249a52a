"""MetaSchedule's tuning in a process of its own, without PyTorch, and its results in the cost log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placement.backends.base import Tunings

log = logging.getLogger(__name__)

_TUNE = """
import json, os, sys, tempfile
job = json.load(sys.stdin)
import tvm
from tvm.s_tir import meta_schedule
with tempfile.TemporaryDirectory() as folder:
    meta_schedule.relax_integration.tune_relax(
        tvm.script.from_source(job["script"]), {}, tvm.target.Target(job["target"]), folder,
        max_trials_global=job["trials"], num_trials_per_iter=min(16, job["trials"]),
        cost_model="random", seed=1,
    )
    read = lambda name: open(os.path.join(folder, name)).read()
    result = {"workloads": read("database_workload.json"), "records": read("database_tuning_record.json")}
with open(job["out"], "w") as file:
    json.dump(result, file)
"""
"""What the process runs. It gets TVMScript, since JSON of modules crashed in one version of tvm-ffi."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """A MetaSchedule database, as text."""

    workloads: str
    records: str

    def write(self, folder: Path) -> None:
        """Writes the files that MetaScheduleApplyDatabase reads."""
        (folder / "database_workload.json").write_text(self.workloads)
        (folder / "database_tuning_record.json").write_text(self.records)


def tune(
    name: str, module: Any, target: dict[str, Any], trials: int, seconds: float, tunings: Tunings
) -> Tuning | None:
    """The tuning kept under a name, or a new one if trials are allowed; None if there is none.

    A tuning that fails or takes too long is a warning: the segment stays untuned.
    """
    known = tunings.tuned(name)
    if known is not None:
        return Tuning(**json.loads(known))
    if trials <= 0:
        return None
    try:
        tuning = _tune(module.script(), target, trials, seconds)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        log.warning("tuning failed, the segment stays untuned: %s", error)
        return None
    tunings.keep_tuned(name, json.dumps(asdict(tuning)).encode())
    return tuning


def _tune(script: str, target: dict[str, Any], trials: int, seconds: float) -> Tuning:
    with tempfile.TemporaryDirectory() as folder:
        # TVM imports PyTorch where it finds it, in its worker processes as well: this hides it.
        hidden = Path(folder) / "without" / "torch"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('kept out of tuning')\n")
        out = Path(folder) / "tuning.json"
        job = {"script": script, "target": target, "trials": trials, "out": str(out)}
        environment = {**os.environ, "PYTHONPATH": str(hidden.parent)}
        subprocess.run(
            [sys.executable, "-c", _TUNE],
            input=json.dumps(job),
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
        return Tuning(**json.loads(out.read_text()))
