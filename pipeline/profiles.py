"""Profiles as files: JSON in, `ProfiledGraph` out, and back.

The format is one object of models; each has `nodes` (`id`, `desc`, `fwd_ms`, `bwd_ms`, `act_bytes`,
`param_bytes`, optionally `saved_bytes`) and `edges` (pairs of ids), optionally `samples`. Times are
milliseconds for one micro-batch, sizes are bytes. Other keys are summaries for people and are not read. A
profile that does not say how much a node saves for its backward pass is taken to save what it puts out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import GraphError
from pipeline.graph import Cost, ModelGraph, Node, ProfiledGraph


def read_profiles(path: str | Path) -> dict[str, ProfiledGraph]:
    """Every model of a profile file, by name.

    Raises:
        GraphError: The file is missing, is no JSON, or does not hold profiles.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise GraphError(f"cannot read the profile {path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise GraphError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise GraphError(f"{path} holds a {type(content).__name__}; a profile is an object of models.")
    if "nodes" in content:  # one model without the outer object
        content = {Path(path).stem: content}
    return {name: profile_from_json(name, model) for name, model in content.items()}


def read_profile(path: str | Path, model: str | None = None) -> ProfiledGraph:
    """One model of a profile file.

    Args:
        path: The file.
        model: Its name; not needed when the file holds one model.

    Raises:
        GraphError: As `read_profiles`, or the model is not in the file.
    """
    profiles = read_profiles(path)
    if model is None and len(profiles) == 1:
        return next(iter(profiles.values()))
    if model is None or model not in profiles:
        wanted = "no model was named" if model is None else f"{model!r} is not in it"
        raise GraphError(f"{path}: {wanted}. It holds {', '.join(sorted(profiles)) or 'nothing'}.")
    return profiles[model]


def profile_from_json(name: str, content: Any) -> ProfiledGraph:
    """One model from its JSON value."""
    try:
        nodes = tuple(Node(n["id"], n.get("desc", "")) for n in content["nodes"])
        costs = tuple(
            Cost(
                float(n["fwd_ms"]),
                float(n["bwd_ms"]),
                float(n["act_bytes"]),
                float(n["param_bytes"]),
                float(n.get("saved_bytes", n["act_bytes"])),
            )
            for n in content["nodes"]
        )
        edges = tuple((str(a), str(b)) for a, b in content["edges"])
        samples = int(content.get("samples", 1))
    except KeyError as error:
        raise GraphError(f"the profile of {name} lacks the key {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise GraphError(f"the profile of {name} is malformed: {error}.") from error
    return ProfiledGraph(ModelGraph(name, nodes, edges), costs, samples)


def profile_to_json(graph: ProfiledGraph) -> dict[str, Any]:
    """The JSON value that `profile_from_json` reads back."""
    return {
        "samples": graph.samples,
        "nodes": [
            {
                "id": node.id,
                "desc": node.description,
                "fwd_ms": cost.forward_ms,
                "bwd_ms": cost.backward_ms,
                "act_bytes": cost.output_bytes,
                "param_bytes": cost.parameter_bytes,
                "saved_bytes": cost.saved_bytes,
            }
            for node, cost in zip(graph.model.nodes, graph.costs, strict=True)
        ],
        "edges": [list(edge) for edge in graph.model.edges],
    }
