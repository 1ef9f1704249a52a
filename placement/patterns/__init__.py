"""What a backend can run, as patterns and rules, and where that occurs in a graph.

    language    the pattern language: is_op, wildcard, constant, optional, outputs, dominates
    matcher     where a pattern occurs in an OpGraph
    rules       PatternRule: which operations, and which may be fused
    generator   every fused subgraph that a rule allows in an OpGraph

Start at `language.Pattern`.
"""
