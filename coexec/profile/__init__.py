"""When the two runners compute and when they wait for each other, as a timeline.

In:  the iterations that run while a `Profile` is entered (`GradientTape.profile`).
Out: a `Timeline`, written as a Chrome trace (which Perfetto reads) and as a picture.

Modules: `timeline` (the data), `profile` (records it), `trace_events` and `picture` (write it). Start at
`timeline.Timeline`. Nothing is installed before a profile is entered, so profiling costs nothing when it
is off.
"""
