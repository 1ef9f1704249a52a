"""Programs of every kind that the tests share, by name."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.passes import add_communication, bpipe, recompute
from pipeline.program import Layout, Program, StageLayout, chain
from pipeline.schedules import gpipe, interleaved, one_f_one_b, pipedream, two_bw, zb_h1, zbv

# A diamond whose stages use micro-batches of 4, 2, 6 and 4 samples, one of them on two ranks.
DIAMOND = Layout(
    (
        StageLayout(4, (0,), 24),
        StageLayout(2, (1, 2), 24),
        StageLayout(6, (3,), 24),
        StageLayout(4, (4,), 24),
    ),
    ((0, 1), (0, 2), (1, 3), (2, 3)),
    24,
)

COMPUTATION: dict[str, Callable[[], Program]] = {
    "gpipe": lambda: gpipe(chain(4, [1, 1, 1])),
    "1f1b": lambda: one_f_one_b(chain(6, [1, 1, 1, 1])),
    "1f1b, two replicas": lambda: one_f_one_b(chain(6, [2, 2])),
    "1f1b, unequal replicas": lambda: one_f_one_b(chain(6, [3, 1, 2])),
    "1f1b, unequal sizes": lambda: one_f_one_b(chain(6, [1, 1, 1], sizes=[4, 2, 6])),
    "1f1b, diamond": lambda: one_f_one_b(DIAMOND),
    "1f1b, recomputed": lambda: recompute(one_f_one_b(chain(5, [1, 1, 1])), {0, 1}),
    "interleaved": lambda: interleaved(3, 6, 2),
    "interleaved, two replicas": lambda: interleaved(2, 4, 2, replicas=2),
    "pipedream": lambda: pipedream(chain(8, [1, 1, 1])),
    "pipedream, vertical sync": lambda: pipedream(chain(8, [1, 1, 1]), vertical_sync=True),
    "pipedream, 2-1": lambda: pipedream(chain(8, [2, 1])),
    "2bw": lambda: two_bw(chain(9, [1, 1, 1]), 3),
    "2bw, two replicas": lambda: two_bw(chain(12, [2, 2]), 3),
    "zb-h1": lambda: zb_h1(3, 5),
    "zbv": lambda: zbv(3, 6),
    "bpipe": lambda: bpipe(one_f_one_b(chain(8, [1, 1, 1, 1]))),
    "bpipe, two replicas": lambda: bpipe(one_f_one_b(chain(12, [2, 2, 2, 2]))),
    "bpipe, interleaved": lambda: bpipe(interleaved(4, 8, 2)),
}

PROGRAMS: dict[str, Callable[[], Program]] = {
    name: lambda make=make: add_communication(make())  # type: ignore[misc]
    for name, make in COMPUTATION.items()
}
