"""Passes: programs in, programs out, the order of computation unchanged.

bpipe               move saved activations from early to late stages
recompute           run forward passes again instead of keeping what they save
add_communication   sends, receives and waits; the last one
placement           which devices run which stage
"""

from pipeline.passes.balancing import bpipe
from pipeline.passes.communication import add_communication
from pipeline.passes.recomputation import recompute

__all__ = ["add_communication", "bpipe", "recompute"]
