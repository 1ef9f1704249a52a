"""The program suite and its command line: `python -m bench --help`.

Start at `program.Program`.
"""
