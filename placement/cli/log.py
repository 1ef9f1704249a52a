"""Show the cost log, or delete entries from it."""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

from placement.cli.tables import table
from placement.errors import PlacementError
from placement.measuring.log import CostLog, default_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--log", metavar="FILE", help=f"the log (default: {default_path()})")
    parser.add_argument("--backend", metavar="NAME", help="only entries of this backend")
    parser.add_argument(
        "--status",
        choices=("ok", "unsupported", "wrong", "crashed", "hung"),
        help="only entries with this outcome",
    )
    parser.add_argument(
        "--limit", type=int, default=40, metavar="N", help="entries shown (default: %(default)s)"
    )
    parser.add_argument("--prune", action="store_true", help="delete the entries instead of showing them")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="prune only entries older than this")


def run(args: argparse.Namespace) -> int:
    """Show or prune."""
    path = Path(args.log) if args.log else default_path()
    if not path.exists():
        raise PlacementError(f"there is no cost log at {path}; optimize() makes one.")
    if args.older_than is not None and not args.prune:
        raise PlacementError("--older-than says what to prune; give --prune too.")
    if args.limit < 1:
        raise PlacementError(f"--limit is {args.limit}; it must be at least 1.")
    log = CostLog(path)
    if args.prune:
        age = None if args.older_than is None else args.older_than * 86400
        print(f"{log.prune(backend=args.backend, status=args.status, older_than_s=age)} entries deleted")
        return 0
    rows = []
    for entry in islice(log.entries(backend=args.backend, status=args.status), args.limit):
        m, key = entry.measurement, entry.key
        cost = (
            f"{m.cost_s * 1e3:.4g} / {m.median_s * 1e3:.4g}{' unstable' if m.unstable else ''}"
            if m.ok
            else m.detail[:60]
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.time))
        rows.append(
            (
                key.segment[:8],
                entry.title,
                key.backend,
                m.status,
                cost,
                str(key.threads),
                f"{m.load:.1f}",
                when,
            )
        )
    head = ("segment", "operations", "backend", "status", "ms: cost / median", "threads", "load", "written")
    print(table(head, rows))
    return 0
