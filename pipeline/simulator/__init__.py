"""Run a program on a model of the machines: how long, how idle, how full.

In:  a program, what its stages cost, and a topology with the devices of each rank.
Out: a `Result` with every computation and transfer in time.

    simulate        a program
    simulate_plan   a plan, one replica standing for all where they are alike
    write_trace     the result for Perfetto (ui.perfetto.dev)
    draw            the result as a picture

Start at `engine.simulate`.
"""

from pipeline.simulator.engine import simulate
from pipeline.simulator.perfetto import write_trace
from pipeline.simulator.picture import draw
from pipeline.simulator.plans import simulate_plan
from pipeline.simulator.result import Event, Result

__all__ = ["Event", "Result", "draw", "simulate", "simulate_plan", "write_trace"]
