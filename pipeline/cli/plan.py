"""Decide how to cut, replicate and place a model.

Planners:
  pipedream   cuts and replicas by dynamic programming, no flush; --cost-model paper or original
  2bw         parallel pipelines of equal stages, double-buffered weights; needs --batch
  ptdp        pipeline, tensor and data parallelism; needs --batch and --transformer; --cost-model paper or
              communication; without --profile, times follow from --flops

The plan is JSON; its `predicted.time_s` is seconds per micro-batch (pipedream) or per batch (2bw, ptdp).
"""

from __future__ import annotations

import argparse
import sys

from pipeline import planners
from pipeline.cli.common import add_topology_arguments, integers, say, topology_of, write_json
from pipeline.errors import PlanError
from pipeline.graph import ProfiledGraph
from pipeline.planners import pipedream, ptdp, two_bw
from pipeline.plans import Plan, plan_to_json
from pipeline.profiles import read_profile
from pipeline.topology import Topology
from pipeline.transformer import (
    GPT3_13B,
    GPT3_96B,
    GPT3_134B,
    STATE_BYTES,
    Transformer,
    transformer_profile,
)

KNOWN = {model.name: model for model in (GPT3_13B, GPT3_96B, GPT3_134B)}
"""Transformers that can be named."""

ONLY = {
    "pipedream": ("straight", "check_memory", "fewer_machines", "compression"),
    "2bw": ("recompute_factor",),
    "ptdp": ("transformer", "flops", "chunks", "bpipe", "state_bytes", "shard_optimizer"),
}
"""Options that one planner alone understands."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`."""
    parser.add_argument(
        "--profile", metavar="FILE", help="profile of the model (JSON, milliseconds and bytes)"
    )
    parser.add_argument("--model", metavar="NAME", help="which model of the profile, when it holds several")
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="2bw, ptdp: profile of the same model at another micro-batch size; may be repeated",
    )
    parser.add_argument("--planner", choices=list(ONLY), default="pipedream", help="default: %(default)s")
    parser.add_argument(
        "--cost-model", metavar="NAME", help="default: paper (pipedream), communication (ptdp)"
    )
    parser.add_argument("--out", metavar="FILE", help="where the plan goes (default: standard output)")
    add_topology_arguments(parser)
    group = parser.add_argument_group("pipedream")
    group.add_argument("--straight", action="store_true", help="no replicas")
    group.add_argument("--check-memory", action="store_true", help="keep within --memory (original)")
    group.add_argument(
        "--fewer-machines", action="store_true", help="leave devices unused if faster (original)"
    )
    group.add_argument(
        "--compression", type=float, metavar="X", help="count activation transfers, divided by X (original)"
    )
    group = parser.add_argument_group("2bw and ptdp")
    group.add_argument("--batch", type=int, metavar="N", help="samples in a batch")
    group.add_argument(
        "--recompute-factor",
        type=float,
        metavar="X",
        help="2bw: computing time with recomputation (default: 4/3)",
    )
    group.add_argument(
        "--transformer",
        metavar="SHAPE",
        help=f"ptdp: layers,hidden,heads[,sequence,vocabulary] or one of {', '.join(KNOWN)}",
    )
    group.add_argument(
        "--flops",
        type=float,
        metavar="N",
        help="ptdp: operations per second that a device reaches (default: 140e12)",
    )
    group.add_argument(
        "--chunks", type=integers, metavar="V,V", help="ptdp: chunks a device to try (default: 1,2,4)"
    )
    group.add_argument(
        "--bpipe", action="store_true", help="ptdp: also try moving activations to late stages"
    )
    group.add_argument(
        "--state-bytes",
        type=float,
        metavar="N",
        help="ptdp: bytes a parameter, with gradient and optimizer state (default: 20)",
    )
    group.add_argument(
        "--shard-optimizer", action="store_true", help="ptdp: spread optimizer state over replicas (ZeRO-1)"
    )


def run(args: argparse.Namespace) -> int:
    """Plan, and write the plan."""
    for planner, options in ONLY.items():
        for option in options:
            if planner != args.planner and getattr(args, option):
                name = option.replace("_", "-")
                raise PlanError(f"--{name} is an option of the planner {planner}, not of {args.planner}.")
    topology = topology_of(args)
    if topology is None:
        raise PlanError("on which machines? Give --machines and --bandwidth, or --topology.")
    say(f"planning for {topology.devices} devices")
    found = {"pipedream": _pipedream, "2bw": _two_bw, "ptdp": _ptdp}[args.planner](args, topology)
    write_json(plan_to_json(found), args.out)
    print(summary(found), file=sys.stderr)
    return 0


def summary(plan: Plan) -> str:
    """A plan in a few lines."""
    lines = [
        f"{plan.model}: {len(plan.stages)} stages, schedule {plan.schedule}, {plan.in_flight} in flight,"
        f" {plan.predicted.time_s:.6g} s per {plan.predicted.per}"
    ]
    for s, stage in enumerate(plan.stages):
        ends = stage.nodes[0] if len(stage.nodes) == 1 else f"{stage.nodes[0]} ... {stage.nodes[-1]}"
        extra = f", tensor-parallel {stage.tensor_parallel}" if stage.tensor_parallel > 1 else ""
        again = f", recompute {stage.recompute}" if stage.recompute != "none" else ""
        lines.append(f"  {s}: {len(stage.nodes)} nodes ({ends}), {stage.replicas} replicas{extra}{again}")
    return "\n".join(lines)


def _profile(args: argparse.Namespace) -> ProfiledGraph:
    if args.profile is None:
        raise PlanError("of which model? Give --profile.")
    return read_profile(args.profile, args.model)


def _measured(args: argparse.Namespace) -> tuple[ProfiledGraph, ...]:
    return tuple(read_profile(path, args.model) for path in args.measured)


def _batch(args: argparse.Namespace) -> int:
    if args.batch is None:
        raise PlanError(f"the planner {args.planner} needs --batch.")
    return int(args.batch)


def _pipedream(args: argparse.Namespace, topology: Topology) -> Plan:
    limits = pipedream.Limits(
        args.cost_model or "paper",
        straight=args.straight,
        check_memory=args.check_memory,
        fewer_machines=args.fewer_machines,
        compression=args.compression,
    )
    return planners.plan(_profile(args), topology, limits)


def _two_bw(args: argparse.Namespace, topology: Topology) -> Plan:
    limits = two_bw.Limits(_batch(args), args.recompute_factor or 4 / 3, _measured(args))
    return planners.plan(_profile(args), topology, limits)


def _ptdp(args: argparse.Namespace, topology: Topology) -> Plan:
    if args.transformer is None:
        raise PlanError("the planner ptdp needs --transformer.")
    model = _transformer(args.transformer)
    graph = _profile(args) if args.profile else transformer_profile(model, flops_per_s=args.flops or 140e12)
    limits = ptdp.Limits(
        model,
        _batch(args),
        args.cost_model or "communication",
        chunks=args.chunks or (1, 2, 4),
        bpipe=args.bpipe,
        profiles=_measured(args),
        state_bytes=STATE_BYTES if args.state_bytes is None else args.state_bytes,
        shard_optimizer=args.shard_optimizer,
    )
    return planners.plan(graph, topology, limits)


def _transformer(text: str) -> Transformer:
    if text in KNOWN:
        return KNOWN[text]
    try:
        shape = integers(text)
    except ValueError:
        shape = ()
    if not 3 <= len(shape) <= 5:
        raise PlanError(
            f"--transformer {text}: layers,hidden,heads[,sequence,vocabulary] or one of {', '.join(KNOWN)}."
        )
    return Transformer("transformer", *shape)
