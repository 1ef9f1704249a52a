"""How a placement is found.

candidates   which subgraphs each backend could run: from its patterns and rules
op_level     the placement of least predicted cost (Collage, Algorithm 1)
merging      adjacent parts of one graph-level backend, measured as one
graph_level  evolutionary search over what graph-level backends take over, measured end to end
"""
