"""Fuzz for as long as you like: `python -m tests.fuzz --minutes 60 --out FILE.json`.

Each seed is a search of its own; failing programs are shrunk, printed, and written beside the record as
`failure_SEED.py`. A seed is repeated with `--first-seed SEED --seeds 1`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings

from bench.records import environment
from coexec import program_state
from tests.coexec.uncompiled import use_graphs
from tests.fuzz.check import check, tally
from tests.fuzz.nearly import nearly
from tests.fuzz.programs import programs


def search(number, examples, user_code, **options):
    """Return the message and the source of a failing program, or None."""
    last = []

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(user_code))
    def equal(program):
        last[:] = [program]
        check(program, **options)

    try:
        equal()
    except Exception as error:
        return f"{type(error).__name__}: {error}", last[0].source
    return None


def main():
    """Search until the time is up; the exit status says whether every program equalled eager."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first search (default: 0)")
    parser.add_argument("--seeds", type=int, help="how many searches at most (default: no limit)")
    parser.add_argument("--examples", type=int, default=100, help="programs a search (default: 100)")
    parser.add_argument("--mode", default="coexec", choices=["coexec", "lazy"], help="(default: coexec)")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="leave blocks without waiting, and look at every fourth step",
    )
    parser.add_argument(
        "--blocks",
        action="store_true",
        help="run the blocks of the inductor executor, without a compiler, and compare up to rounding",
    )
    parser.add_argument(
        "--user-code",
        type=int,
        default=30,
        metavar="PERCENT",
        help="how often autograd calls functions of the program (default: %(default)s)",
    )
    parser.add_argument(
        "--pieces", action="store_true", help="take backward passes to pieces from the first trace on"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"), help="record (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    program_state.ALWAYS_IN_PIECES = options.pieces
    if options.blocks:
        use_graphs()
    start, failures, number = time.monotonic(), [], options.first_seed
    options.out.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() - start < 60 * options.minutes:
        if options.seeds is not None and number >= options.first_seed + options.seeds:
            break
        how = {"synchronous": False, "every": 4} if options.ahead else {}
        if options.blocks:
            how |= {"executor": "inductor", "same": nearly}
        failed = search(number, options.examples, options.user_code, mode=options.mode, **how)
        if failed:
            message, source = failed
            path = options.out.with_name(f"failure_{number}.py")
            comment = re.sub("^", "# ", message, flags=re.MULTILINE)
            path.write_text(f"{comment}\n{source}")
            failures.append({"seed": number, "message": message, "program": str(path)})
            print(f"seed {number}: {message.splitlines()[0]}\n  {path}", flush=True)
        number += 1
        record = {
            "environment": environment(),
            "minutes": (time.monotonic() - start) / 60,
            "seeds": [options.first_seed, number - 1],
            "mode": options.mode,
            "ahead": options.ahead,
            "blocks": options.blocks,
            "user_code": options.user_code,
            "programs": tally.programs,
            "summary": str(tally),
            "failures": failures,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"seeds {options.first_seed} to {number - 1}: {tally}; {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
