"""Generated training programs, as readable source.

A program has the form that `tests/coexec/harness.py` runs: `make()` returns its state, `step(state, k, tape)`
takes one step. What varies: the model, the optimizer and how it is used, the sizes of the batches, what
happens in the block, and what happens behind it.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.fuzz.statements import body
from tests.fuzz.writer import Writer

STEPS = 12
HEAD = '''
import copy, math, random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Keeps(torch.autograd.Function):
    """Saves its output, looks at a value in its backward, and says there what it was given."""

    @staticmethod
    def forward(ctx, x, scale):
        y = (x * scale).tanh()
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        total = y.sum()
        ctx.mark_non_differentiable(total)
        return y, total, "text"

    @staticmethod
    def backward(ctx, gradient, none, nothing):
        x, y = ctx.saved_tensors
        if gradient.sum() > 0.1:
            print("a gradient above 0.1")
            gradient = gradient.clamp(max=0.5)
        return gradient * (1 - y * y) * ctx.scale, None


class Moody(torch.autograd.Function):
    """Returns a view of its input, and does not always compute the same gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5 if random.random() < 0.3 else gradient


class Writes(torch.autograd.Function):
    """Writes to its input, and draws random numbers in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


class Nested(torch.autograd.Function):
    """Runs autograd in its backward, as checkpoints do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Double.apply(x).tanh()

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            Double.apply(again).tanh().backward(gradient)
        return again.grad


class Residual(nn.Module):
    """Skips layers at random."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                x = x + layer(x).tanh()
        return x


class Cell(nn.Module):
    """A recurrent cell over the rows of the batch, which keeps its state."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.register_buffer("hidden", torch.zeros(1, 3))

    def forward(self, x):
        hidden, outputs = self.hidden, []
        for row in x:
            hidden = self.cell(row[None], hidden)
            outputs.append(hidden)
        self.hidden = hidden.detach()
        return torch.cat(outputs)
'''
MODELS = [
    "nn.Linear(3, 3)",
    "nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))",
    "nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))",
    "nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 3), nn.LayerNorm(3))",
    "Residual()",
    "Cell()",
    "nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3, bias=False))",
    "nn.TransformerEncoderLayer(3, 1, 6, batch_first=True)",
]
# Gradients that are nothing but rounding must not become steps: compiled blocks round differently.
OPTIMIZERS = [
    "torch.optim.SGD({p}, lr=0.05)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True)",
    "torch.optim.Adam({p}, lr=0.01, eps=1e-3)",
    "torch.optim.AdamW({p}, lr=0.01, eps=1e-3, amsgrad=True, foreach=True)",
    "torch.optim.RMSprop({p}, lr=0.01, eps=1e-2, momentum=0.1)",
    "torch.optim.Adagrad({p}, lr=0.05, eps=1e-3)",
]
#: Where the input of a step with `n` rows lies in memory.
INPUTS = [
    "torch.randn(n, 3)",
    "torch.randn(n, 3)",
    "torch.randn(n, 8)[:, 1:4]",
    "torch.randn(n, 6)[:, ::2]",
    "torch.randn(3, 2 * n).t()[::2]",
    "torch.randn(n, 1).expand(-1, 3)",
]
SIZES = ["[4]", "[4, 4, 4, 3]", "[4, 3, 5, 4, 2]", "[4, 6, 5, 7, 3, 8, 5, 9]", "[12, 7, 9, 1, 10, 0, 8]"]


@dataclass(frozen=True)
class Generated:
    """The source of a program."""

    source: str

    def __repr__(self):
        return f"this program:\n{self.source}"

    def load(self):
        """Return its `make` and `step`; tracebacks show its lines."""
        name = f"<generated {hash(self.source):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        namespace = {"__name__": "generated"}
        exec(compile(self.source, name, "exec"), namespace)
        return namespace["make"], namespace["step"]


@st.composite
def programs(draw, user_code=30):
    """Programs; the simplest is linear regression with SGD."""
    w = Writer(draw, user_code)
    w.lines += HEAD.strip().splitlines()
    w.emit("")
    w.emit("")
    with w.block("def make():"):
        _make(w)
    w.emit("")
    w.emit("")
    with w.block("def step(state, k, tape):"):
        _step(w)
    return Generated("\n".join(w.lines) + "\n")


def _make(w):
    for line in (
        "random.seed(0)",
        "state = SimpleNamespace(count=0, rate=0.5, log=[], names={}, out=None, last=None, pair=None)",
        f"state.model = {w.choose(MODELS)}",
        "state.layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()]",
        "state.weight = nn.Parameter(torch.randn(3, 3))",
        "state.memory = torch.zeros(3)",
        "state.view = state.memory[1:]" if w.chance(30) else "state.view = torch.ones(2)",
        "state.bank = [torch.ones(4, 3), torch.ones(4, 3)]",
        "state.table = torch.zeros(4)",
        "state.array = np.zeros(3, dtype=np.float32)",
        "state.generator = torch.Generator().manual_seed(1)",
        "parameters = [*state.model.parameters(), state.weight, *state.layers[0].parameters()]",
        f"state.optimizer = {w.choose(OPTIMIZERS).format(p='parameters')}",
        "state.schedule = torch.optim.lr_scheduler.StepLR(state.optimizer, 3, gamma=0.5)",
        f"state.data = [{w.choose(INPUTS)} for n in {w.choose(SIZES)} * {STEPS}]",
        "state.arrays = [x.numpy() for x in state.data]" if w.chance(20) else "state.arrays = []",
        "return state",
    ):
        w.emit(line)


def _step(w):
    w.emit("x = state.data[k]")
    w.scopes[-1].matrices.append("x")
    for _ in range(w.count(1)):
        body(w, 1)
    in_function = w.chance(80)
    if in_function:
        defined = _block(w, "def block(x, t):")
        w.emit("with tape() as t: result = block(x, t)")
    else:
        defined = _block(w, "with tape() as t:")
    if in_function:
        w.emit("state.out = result")
    else:  # what the block has defined is used behind it: it has escaped
        for kind in ("matrices", "scalars", "numbers"):
            getattr(w.scopes[-1], kind).extend(getattr(defined, kind))
    for _ in range(w.count(2)):
        _behind(w)
    values = [*w.known("matrices"), *w.known("scalars"), *w.known("numbers")]
    w.emit(f"return {w.choose(['None', *values])}")


def _block(w, head):
    """Write what runs inside of the tape, and return the variables that it defines.

    In a function they die at its end, as far as it does not return or keep them.
    """
    with w.block(head):
        w.emit("h = state.model(x)")
        w.scopes[-1].matrices.append("h")
        body(w, 6)
        if not w.chance(10):
            _train(w)
        body(w, 2)
        if head.startswith("def"):
            detached = [f"{a}.detach()" for a in [*w.known("matrices"), *w.known("scalars")]]
            w.emit(f"return {w.choose(['None', *detached, *w.known('numbers'), 'h'])}")
        return w.scopes[-1]


def _train(w):
    """The loss, its backward pass, and what the optimizer makes of it."""
    loss = w.choose(
        [
            "({a} + h).square().mean()",
            "({a} * h).mean()",
            "(h - x).square().mean() + {s}",
            "F.mse_loss(h, {a})",
        ]
    )
    w.emit(f"loss = {loss.format(a=w.matrix(), s=w.scalar())}")
    w.scopes[-1].scalars.append("loss")
    if w.chance(10):  # what autograd has saved of it
        w.emit("if state.arrays and k % 4 == 2: state.arrays[k][...] = 0.5")
    way = w.choose(
        ["usual", "usual", "late zero", "gradient", "accumulate", "twice", "closure", "skip", "penalty"]
    )
    if way == "usual":
        when = w.choose(["", "", "if k % 3 != 2: ", "if k % 2: "])
        w.emit(f"{when}state.optimizer.zero_grad(set_to_none={w.choose([True, False])})")
        w.emit("loss.backward()")
        _with_gradients(w)
        w.emit("state.optimizer.step()")
        if w.chance(15):
            w.emit("if k % 2: state.optimizer.step()")
    elif way == "late zero":
        w.emit("loss.backward()")
        w.emit("state.optimizer.step()")
        w.emit("state.optimizer.zero_grad()")
    elif way == "gradient":
        w.emit("trained = [p for p in [*state.model.parameters(), state.weight] if p.requires_grad]")
        with w.block("for p, gradient in zip(trained, t.gradient(loss, trained)):"):
            w.emit("if gradient is None: continue")
            w.emit(f"with torch.no_grad(): p -= {w.choose(['0.1', 'state.rate * 0.1'])} * gradient")
    elif way == "accumulate":
        w.emit("(loss / 2).backward()")
        with w.block("if k % 2:"):
            w.emit("state.optimizer.step()")
            w.emit("state.optimizer.zero_grad()")
    elif way == "twice":
        w.emit("loss.backward(retain_graph=True)")
        w.emit("(loss * 0.5).backward()")
        w.emit("state.optimizer.step()")
        w.emit("state.optimizer.zero_grad()")
    elif way == "closure":
        with w.block("def closure():"):
            w.emit("state.optimizer.zero_grad()")
            w.emit("again = state.model(x).square().mean()")
            w.emit("again.backward()")
            w.emit("return again")
        w.emit("state.log.append(state.optimizer.step(closure).item())")
    elif way == "skip":
        w.emit("state.optimizer.zero_grad()")
        w.emit("loss.backward()")
        w.emit("norm = nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)")
        w.emit("if norm < 0.9: state.optimizer.step()")
    else:
        w.emit(
            "[slope] = torch.autograd.grad(h.sum(), [state.model.get_parameter(next(iter(dict("
            "state.model.named_parameters()))))], create_graph=True)"
        )
        w.emit("(loss + slope.square().sum()).backward()")
        w.emit("state.optimizer.step()")
        w.emit("state.optimizer.zero_grad()")
    if w.chance(30):
        w.emit("state.schedule.step()")


def _with_gradients(w):
    """What may happen between the backward pass and the optimizer's step."""
    if w.chance(40):
        w.emit("parameters = list(state.model.parameters())")
        w.emit(
            w.choose(
                [
                    "nn.utils.clip_grad_norm_(parameters, 1.0)",
                    "nn.utils.clip_grad_value_(parameters, 0.1)",
                    "state.log.append([p.grad is None for p in parameters])",
                    "state.log.append([p.grad.norm().item() for p in parameters if p.grad is not None])",
                    "for p in parameters: p.grad = None if p.grad is None else p.grad * 0.5",
                    "state.last = None if state.weight.grad is None else state.weight.grad.mean()",
                    "if k % 3 == 2: state.weight.grad = torch.ones_like(state.weight) * 0.5",
                    "for p in parameters: p.grad = torch.full_like(p, 0.1) if k % 4 == 3 else p.grad",
                    "if k % 3 == 2: state.optimizer.state.clear()",
                    "[s['step'].mul_(2) for s in state.optimizer.state.values() if 'step' in s and k == 4]",
                ]
            )
        )


def _behind(w):
    """A statement behind the block."""
    forms = [
        "state.log.append({s}.item())",
        "state.out = {a}.detach() * 2",
        "state.pair = ({a}.detach(), {a}.detach()[:1])",
        "state.model.train(k % 3 != 1)",
        "state.weight.data.mul_(0.99)",
        "state.optimizer.param_groups[0]['lr'] *= 0.9",
        "state.model.load_state_dict(copy.deepcopy(state.model.state_dict()))",
        "if k == 4: state.model = copy.deepcopy(state.model)",
        "if k == 5: state.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))",
        "for p in state.layers[0].parameters(): p.requires_grad_(k % 3 == 0)",
        "state.memory = state.memory.clone()",
        "if k == 3: state.weight = nn.Parameter(state.weight.detach() * 2)",
        "if k == 2: state.optimizer.add_param_group({{'params': list(state.layers[1].parameters())}})",
        "state.memory += {a}.detach().mean(0)",
        "state.array += {a}.detach().numpy().mean(0)",
        "torch.manual_seed(k)",
        "state.log.append({a}.detach().numpy().tolist())",
    ]
    w.emit(w.choose(forms).format(a=w.matrix(), s=w.scalar()))
