"""The data structures of coexec and the passes between them.

`trace.Trace` -> `merge` -> `graph.TraceGraph` -> `live` -> `symbolic.lower` -> `program.Program`.
Everything here is frozen; `verify` states the rules. Start at `graph.TraceGraph`.
"""
