"""The two runners of the co-execution phase, and what passes between them.

`python_runner.PythonRunner` runs the program as a skeleton; a `graph_runner.GraphRunner` executes the
`Program`; `fallback` makes an iteration eager when the two part. Start at `python_runner`.
"""
