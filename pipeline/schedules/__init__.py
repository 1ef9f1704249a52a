"""Schedules: the order in which ranks compute.

Each is a function that gives a `Program` of computation and weight updates; `pipeline.passes` adds the rest.

    gpipe, one_f_one_b   with a flush, over any graph of stages; `sequential` without pipelining
    interleaved          several chunks of the model a rank
    pipedream, two_bw    no flush, several weight versions
    zb_h1, zbv           backward split into input and weight part
"""

from pipeline.schedules.asynchronous import pipedream, two_bw
from pipeline.schedules.interleaving import interleaved
from pipeline.schedules.synchronous import gpipe, in_flight, one_f_one_b, sequential
from pipeline.schedules.zero_bubble import zb_h1, zbv

__all__ = [
    "gpipe",
    "in_flight",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "sequential",
    "two_bw",
    "zb_h1",
    "zbv",
]
