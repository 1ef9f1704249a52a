"""The tracing phase: one iteration of a program, run eagerly, becomes a `Trace`.

Start at `recorder.Recorder`.
"""
