"""Code of the user that autograd calls, as a part of a traced or co-executed iteration.

A backward pass is one torch call, and the PythonRunner does not look into it. Where it calls the user (the
`backward` of a custom `torch.autograd.Function`, a hook, the function of a checkpoint), that code has to run
in every iteration, and its torch calls have to be matched. So a backward pass is taken apart there:
`Tensor.backward` returns a `CalledBack`, the user's code is called with its gradients, and `go_on` continues
with what that returned, until the pass is over.

In the co-execution phase there is nothing more to it: gradients are placeholders, and no autograd runs. In
the tracing phase, and when an iteration falls back, the real engine runs on a thread of its own, and stops
where it calls the user; the user's code runs on the thread of the program.

Modules: `iteration` (what an iteration knows of its callbacks, and drives them), `call` (a custom function),
`context` (its `ctx`), `node` (its node in the real autograd graph), `handle` (what Python sees of that),
`hook` (on a tensor of the block), `leaf_hook`, `checkpoint`, `passes` (backward passes of the real engine),
`stepped` (one of them, which stops).

Source: that a skeleton has to run whatever user code a recorded call ran is Terra's rule (section 3.1).
Custom gradients are not mentioned there: TensorFlow has them in the graph.
"""
