"""The dynamic phase: co-execution without a graph of the whole iteration.

For programs whose iterations have no graph in common: paths, shapes or objects that change every time,
user code inside of the backward pass, sparse tensors and the like. Each torch call is looked up by
what decides it (function, attributes, numbers, state, metadata of its tensors):

- a call that was recorded before is sent to a queue whose thread runs its operations, and Python goes
  on with placeholders;
- any other call waits until the queue is empty, makes every placeholder the real tensor, and runs
  eagerly; the second time it is met it is recorded, if it can be.

Nothing is speculated: calls run in the program's order, with autograd, on the program's own tensors. So
there is nothing to validate, commit or undo, and at each wait the state is exactly eager's.

Modules: `recorder` (runs a call and records it), `trial` (a recording is used if it does what eager did,
down to the autograd graph), `table` (recorded calls, by what decides them), `runner` (the function mode).

Source: the division of work between the two runners is Terra's (section 3.1); deferring single calls
instead of graphs follows PyTorch's lazy tensors (Suhan et al., "LazyTensor", 2021), with placeholders
that need no shape inference because metadata is recorded.
"""
