"""The suite: one program a file, each with a `PROGRAM`."""

from __future__ import annotations

from bench.program import Program
from bench.programs import charlm, digits

PROGRAMS: dict[str, Program] = {program.name: program for program in (digits.PROGRAM, charlm.PROGRAM)}
