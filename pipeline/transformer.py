"""Transformer language models by formula: parameters, operations, memory, and the profile that follows.

In:  the shape of a model (`Transformer`).
Out: counts in closed form, and a `ProfiledGraph` of embedding, layers and head for a device of given speed.

Symbols as in the sources: L layers, h hidden size, a heads, s sequence length, V vocabulary, b samples in a
micro-batch, t tensor-parallel degree, p stages. Activations are 2 bytes a number (mixed precision).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import GraphError
from pipeline.graph import Cost, ProfiledGraph, chain_graph
from pipeline.plans import Recompute

ACTIVATION_BYTES = 2
"""Bytes of one number of an activation or of a weight that is computed with, in mixed precision."""

STATE_BYTES = 20
"""Bytes a parameter with Adam in mixed precision: weight and gradient in 2 and in 4 bytes, two moments in 4.

Source: BPipe, section 1.
"""

SHARDED_STATE_BYTES = 12
"""Of `STATE_BYTES`, what ZeRO stage 1 spreads over data-parallel replicas: 4-byte weight and two moments."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise GraphError(f"{self.name}: {name} is {getattr(self, name)}; it must be at least 1.")


GPT3_13B = Transformer("gpt3-13b", 40, 5120, 40)
GPT3_96B = Transformer("gpt3-96b", 80, 9984, 104)
GPT3_134B = Transformer("gpt3-134b", 84, 11520, 120)
"""The models that BPipe is measured on. Source: BPipe, Table 1."""


def layer_parameters(model: Transformer) -> int:
    """Parameters of one layer: four attention and eight feed-forward h x h blocks, biases, two norms."""
    return 12 * model.hidden**2 + 13 * model.hidden


def embedding_parameters(model: Transformer) -> int:
    """Parameters of the token and position embeddings."""
    return (model.vocabulary + model.sequence) * model.hidden


def parameters(model: Transformer) -> int:
    """All parameters, the head sharing the token embedding: 12 L h^2 (1 + 13/(12h) + (V+s)/(12Lh)).

    Source: PTD-P, section 4.5.1.
    """
    return model.layers * layer_parameters(model) + embedding_parameters(model)


def layer_forward_flops(model: Transformer, samples: int) -> float:
    """Floating-point operations of one layer's forward pass: 24 b s h^2 + 4 b s^2 h.

    Matrix products only: 24 b s h^2 in the projections and the feed-forward part, 4 b s^2 h in the attention.
    """
    s, h = model.sequence, model.hidden
    return 24.0 * samples * s * h * h + 4.0 * samples * s * s * h


def head_forward_flops(model: Transformer, samples: int) -> float:
    """Floating-point operations of the forward pass of the output projection: 2 b s h V."""
    return 2.0 * samples * model.sequence * model.hidden * model.vocabulary


def batch_flops(model: Transformer, samples: int, *, recompute: bool) -> float:
    """Floating-point operations of training on one batch; backward is twice forward.

    With recomputation of whole layers this is 96 B s L h^2 (1 + s/(6h) + V/(16Lh)).

    Source: PTD-P, section 4.5.1.
    """
    layers = model.layers * layer_forward_flops(model, samples) * (4 if recompute else 3)
    return layers + 3 * head_forward_flops(model, samples)


def layer_saved_bytes(
    model: Transformer, samples: int, *, tensor_parallel: int = 1, recompute: Recompute = "none"
) -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch, on one device.

    Nothing recomputed: s b h (34 + 5 a s / h) / t. Attention only: 34 s b h / t. Layer or stage: the layer's
    input, 2 s b h, which tensor parallelism does not divide.

    Source: BPipe, equations 4 to 6.
    """
    s, h, a = model.sequence, model.hidden, model.heads
    tokens = float(samples * s * h)
    if recompute == "none":
        return tokens * (34 + 5 * a * s / h) / tensor_parallel
    if recompute == "attention":
        return tokens * 34 / tensor_parallel
    return tokens * 2


def boundary_bytes(model: Transformer, samples: int) -> float:
    """Bytes between consecutive stages for one micro-batch: b s h numbers."""
    return float(ACTIVATION_BYTES * samples * model.sequence * model.hidden)


def stage_saved_bytes(
    model: Transformer,
    samples: int,
    stages: int,
    *,
    tensor_parallel: int = 1,
    recompute: Recompute = "none",
) -> float:
    """Bytes that one of `stages` equal stages saves for one micro-batch: what BPipe moves in one transfer."""
    per_layer = layer_saved_bytes(model, samples, tensor_parallel=tensor_parallel, recompute=recompute)
    return model.layers / stages * per_layer


def transfer_bandwidth(saved_bytes: float, forward_s: float, *, relaxed: bool = False) -> float:
    """Bytes per second at which a transfer of saved activations hides behind computation.

    One transfer has to fit in one forward pass. Relaxed, an eviction and the load after it have a backward
    and a forward pass together; backward taking twice as long, that is 2 transfers in 3 forward times.

    Source: BPipe, equations 7 to 12.
    """
    return saved_bytes / forward_s * (2 / 3 if relaxed else 1)


def transformer_profile(
    model: Transformer,
    *,
    flops_per_s: float,
    samples: int = 1,
    recompute: Recompute = "none",
) -> ProfiledGraph:
    """The profile of a model on one device that sustains the given operations per second.

    Args:
        model: The shape.
        flops_per_s: Operations per second that the device reaches (not its peak).
        samples: Samples in a micro-batch.
        recompute: What is computed again instead of kept; it changes `saved_bytes`, not the times.
    """
    if not flops_per_s > 0:
        raise GraphError(f"a device does {flops_per_s} operations per second; it must be positive.")
    layer_ms = layer_forward_flops(model, samples) / flops_per_s * 1e3
    head_ms = head_forward_flops(model, samples) / flops_per_s * 1e3
    boundary = boundary_bytes(model, samples)
    logits = 4.0 * samples * model.sequence * model.vocabulary
    embedding_bytes = float(ACTIVATION_BYTES * embedding_parameters(model))
    layer = Cost(
        layer_ms,
        2 * layer_ms,
        boundary,
        float(ACTIVATION_BYTES * layer_parameters(model)),
        layer_saved_bytes(model, samples, recompute=recompute),
    )
    costs = {"embedding": Cost(0.0, 0.0, boundary, embedding_bytes, 0.0)}
    costs |= {f"layer{i}": layer for i in range(model.layers)}
    head_bytes = float(ACTIVATION_BYTES * model.vocabulary * model.hidden)
    costs["head"] = Cost(head_ms, 2 * head_ms, logits, head_bytes, boundary + logits)
    return chain_graph(model.name, costs, samples=samples)
