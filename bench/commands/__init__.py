"""The commands of `python -m bench`, one a file.

Each module's docstring is the command's help. `add_arguments` declares its options and `run` carries it out
and returns the exit status.
"""
