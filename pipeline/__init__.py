"""Pipeline-parallel training: what is planned is what is validated, simulated and run.

    ModelGraph, Cost -> ProfiledGraph -+
                        Topology ------+-> planner -> Plan -> compile -> Program -> validate
                                                                                 -> simulate
                                                                                 -> run

Each arrow is a function from one frozen structure to the next, with JSON or strict text on both sides:

    graph, profiles, transformer   what a model is and costs: measured, read from a file, or by formula
    topology                       what the machines are
    planners                       PipeDream, PipeDream-2BW, PTD-P
    plans                          stages, replicas, placement, schedule
    schedules, passes              GPipe, 1F1B, interleaved, PipeDream, 2BW, ZB-H1, ZB-V; communication, BPipe
    actions, program               what each rank does, in text: `F 0 3 w0`
    validator                      dependencies, messages, deadlock, memory, weight versions
    simulator                      time, bubble, memory, critical path; traces and pictures
    runtime                        runs programs on torch.distributed
    capture, profiling             a module as a graph, and what its parts cost on this machine

`runtime`, `capture` and `profiling` load torch, so that they are imported by name and not from here.

`python -m pipeline --help` has all of this as commands. Start at `program.Program`.
"""

from pipeline.compile import compile_plan
from pipeline.errors import PipelineError
from pipeline.graph import Cost, ModelGraph, Node, ProfiledGraph
from pipeline.planners import plan
from pipeline.plans import Plan, Stage, StageCost, read_plan, write_plan
from pipeline.profiles import read_profile
from pipeline.program import Layout, Program, parse_program
from pipeline.simulator import simulate, simulate_plan
from pipeline.topology import Level, Topology, read_topology
from pipeline.validator import check, validate

__all__ = [
    "Cost",
    "Layout",
    "Level",
    "ModelGraph",
    "Node",
    "PipelineError",
    "Plan",
    "ProfiledGraph",
    "Program",
    "Stage",
    "StageCost",
    "Topology",
    "check",
    "compile_plan",
    "parse_program",
    "plan",
    "read_plan",
    "read_profile",
    "read_topology",
    "simulate",
    "simulate_plan",
    "validate",
    "write_plan",
]
