"""How fast each program is in each mode: what `python -m bench speed` does, and what its tables say.

Modules: `contenders` (a program in a mode), `worker` (runs one in a process of its own), `observed` (its
memory, compilations and phases), `rounds` (lets those of one program take turns), `summary` (tables and
means of the results). Start at `contenders.Contender`.
"""
