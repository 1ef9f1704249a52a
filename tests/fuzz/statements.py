"""The statements that a generated program is made of, each a function that writes one.

Every tensor of a program has the shape (n, 3), with n the batch of the step, or none; so any statement fits
behind any other.
"""

from __future__ import annotations

UNARY = [
    "{a}.tanh()",
    "{a} * {n}",
    "{a} + {n}",
    "torch.relu({a})",
    "{a}.sigmoid()",
    "{a}.softmax(1)",
    "{a}.clamp(-1, 1)",
    "{a}.clone()",
    "{a}.detach()",
    "{a} / (1 + {a}.abs())",
    "F.layer_norm({a}, (3,))",
    "{a}.flip(1)",
    "{a}.roll(1, 0)",
    "{a}.cumsum(1).tanh()",
    "{a}.t().contiguous().t()",
    "{a}.reshape(-1).view(-1, 3)",
    "{a}.masked_fill({a} > 0.5, 0.0)",
    "F.pad({a}[:, :2], (0, 1))",
    "{a}.double().float()",
    "{a} - {a}.mean(0, keepdim=True)",
    "{a}.expand_as({a})",
    "{a}[{a}[:, 0].argsort()]",
    "{a}.sort(0).values",
    "{a}[torch.arange(len({a}))]",
    "torch.stack(list({a}))",
    "torch.cat(({a}[1:], {a}[:1]))",
    "{a}.unbind(1)[0][:, None].expand(-1, 3)",
    "{a} * {a}.norm().item()",
    "torch.full_like({a}, {n})",
    "{a}.to(torch.bfloat16).to(torch.float32)",
    "{a}.cumprod(1).tanh()",
]
BINARY = [
    "{a} + {b}",
    "({a} * {b}).tanh()",
    "{a} - {b}",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.maximum({a}, {b})",
    "torch.lerp({a}, {b}, {n})",
    "torch.cat([{a}, {b}])[: len({a})]",
    "torch.stack([{a}, {b}]).mean(0)",
    "torch.addcmul({a}, {a}, {b}, value={n}).tanh()",
    "({a} @ {b}.t() @ {b}).tanh()",
    "torch.einsum('ij,ij->ij', {a}, {b}).tanh()",
    "({a} if random.random() < 0.5 else {b})",
    "({a}, {b})[k % 2]",
    "(({a}, {b})[k % 2].detach() * {a}).tanh()",
    "(({a} if k % 3 else {b}).detach() * ({b} if random.random() < 0.5 else {a})).tanh()",
]
OF_STATE = [
    "state.model({a})",
    "F.linear({a}, state.weight)",
    "({a} @ state.weight).tanh()",
    "{a} + ({a}.mean(0) @ state.weight).tanh()",
    "{a} + state.memory",
    "{a} * state.view.sum().tanh()",
    "{a} + state.bank[-1].mean()",
    "F.linear({a}, state.weight.t(), state.memory)",
    "copy.deepcopy(state.model)({a})",
]
RANDOM = [
    "F.dropout({a}, 0.5, training=state.model.training)",
    "{a} + torch.randn_like({a})",
    "{a} * torch.rand({a}.shape)",
    "{a} * torch.bernoulli({a}.detach().sigmoid())",
    "{a}[torch.randperm(len({a}))]",
    "{a} + torch.randn(len({a}), 3, generator=state.generator)",
    "{a} * random.choice([0.5, 1.0])",
    "{a} + float(np.random.rand())",
    "{a} * torch.randint(0, 2, ({a}.shape[0], 1))",
]
USER_CODE = [
    "Double.apply({a})",
    "Keeps.apply({a}, {n})[0]",
    "sum(Keeps.apply({a}, 0.5)[:2])",
    "Moody.apply({a}) + Double.apply({a})",
    "Writes.apply({a} * 1)",
    "Nested.apply({a})",
    "checkpoint(torch.tanh, {a}, use_reentrant=False)",
    "checkpoint(state.model, {a}, use_reentrant=False)",
    "checkpoint(lambda h: F.dropout(h.tanh() * h, 0.3).sin(), {a}, use_reentrant=False)",
    "checkpoint(lambda h: Keeps.apply(h, 0.5)[0].sigmoid(), {a}, use_reentrant=False)",
    "checkpoint(lambda h: h * (0.5 if random.random() < 0.2 else h.tanh()), {a}, use_reentrant=True)",
    "torch.func.vmap(torch.sin)({a})",
    "torch.compiler.disable(torch.cos)({a})",
]


def matrix(w):
    """A new matrix, or another value for one that the program already has."""
    forms = w.choose([UNARY, UNARY, BINARY, BINARY, OF_STATE, RANDOM] + [USER_CODE] * w.chance(w.user_code))
    value = w.choose(forms).format(a=w.matrix(), b=w.matrix(), n=w.number())
    if w.chance(40):
        w.emit(f"{w.matrix()} = {value}")
    else:
        w.define("matrices", "h", value)


def scalar(w):
    """A tensor without dimensions."""
    forms = [
        "{s}",
        "{a}.square().mean()",
        "({a} * {b}).sum().tanh()",
        "{a}.max()",
        "{a}[{a}[:, 0] > 0].sum()",
        "{a}[({b} > {n}).any(1)].square().sum()",
        "{a}.masked_select({b} > 0).tanh().sum()",
        "({a}[{a}[:, 0] > 0] @ state.weight).mean()",
    ]
    forms += [
        "{a}[k % 2].sum()",
        "{s} + {n}",
        "{a}[len(state.log) % 2, 1]",
        "torch.nonzero({a} > 0).float().mean()",
    ]
    value = w.choose(forms).format(a=w.matrix(), b=w.matrix(), s=w.scalar(), n=w.number())
    w.define("scalars", "s", value)


def fetch(w):
    """Python looks at a value."""
    forms = [
        "state.log.append({s}.item())",
        "state.log.append({a}.tolist())",
        "print('value', {s})",
        "print(f'{{float({s}):.4f}}')",
        "state.log.append({a}.detach().numpy().copy())",
        "state.log.append(int({a}.argmax()))",
        "state.log.append(tuple({a}.shape))",
        "state.log.append(repr({a}))",
        "state.log.append(torch.equal({a}, x))",
        "state.log.append({a}.detach().cpu().numpy().sum().item())",
        "state.log.append(({a} > 0).any().item())",
        "state.log.append(math.isfinite({s}))",
    ]
    w.emit(w.choose(forms).format(a=w.matrix(), s=w.scalar()))


def number(w):
    """A Python number that comes from a tensor or from Python."""
    value = w.choose(["{s}.item()", "round({s}.item(), 1)", "float({s} > 0)", "{n}"])
    value = value.format(s=w.scalar(), n=w.number())
    w.define("numbers", "f", value)


def in_place(w):
    """A copy is written in place, whole or through a view."""
    value = w.choose(["{a}.clone()", "{a} * 1.5", "torch.zeros_like({a})"])
    name = w.define("matrices", "h", value.format(a=w.matrix()))
    forms = [
        "{h}.add_({b})",
        "{h} += {n}",
        "{h}[0] = {n}",
        "{h}[:, 1].mul_({n})",
        "{h}[1:].add_({b}[1:])",
        "{h}[{b}[:, 0] > 0] = {n}",
        "{h}[{b} > 0.3] *= {n}",
        "{h}[{b}[:, 1] > 0] = {b}[{b}[:, 1] > 0] * 2",
        "{h}[k % 2] = {b}[0]",
        "{h}.t()[0].add_(1)",
        "{h}.view(-1)[::2].zero_()",
        "{h}[{b} > 0] = 0.5",
        "{h}.masked_fill_({b} > 0, {n})",
        "{h}.copy_({b})",
        "{h}.index_add_(0, torch.tensor([0, 1]), {b}[:2])",
        "{h}.mul_({b}).clamp_(-1, 1)",
        "{h}.chunk(2)[0].fill_({n})",
        "torch.relu_({h})",
        "{h}[[0, 1]] = {b}[[1, 0]]",
        "{h}.uniform_()",
        "{h}.diagonal().add_({n})",
        "{h}[:, :2], {h}[:, 2:] = {b}[:, 1:], {b}[:, :1]",
        "{h}.data = {h} * {n}",
        "{h}.data = {b}.detach()",
        "{h}.data, {h} = {b}.detach().clone(), {h} + 1",
        "{h}.detach().data = {b}.detach()",
        "{h}.t_().mul_({n}).t_()",
    ]
    for _ in range(1 + w.chance(40)):
        w.emit(w.choose(forms).format(h=name, b=w.matrix(), n=w.number()))


def python_state(w):
    """An object of Python is changed."""
    forms = [
        "state.count += 1",
        "state.rate = {n}",
        "state.rate *= 0.9",
        "state.names[f'step {{k % 3}}'] = state.count",
        "state.last = {s}.detach()",
        "state.log.append(k)",
        "state.model.train(k % 3 != 2)",
        "state.out = {a}.detach()",
        "state.out = {a}",
        "state.pair = ({a}.detach(), x)",
        "del state.log[:1]",
    ]
    w.emit(w.choose(forms).format(a=w.matrix(), s=w.scalar(), n=w.number()))


def tensor_state(w):
    """A tensor that lives on is written or replaced."""
    forms = [
        "state.memory.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)",
        "state.memory = {a}.detach().mean(0)",
        "state.memory[k % 3] = {s}.detach()",
        "state.memory[1] = {s}.item()",
        "state.view.add_({n})",
        "state.bank.append({a}.detach()); del state.bank[:-2]",
        "state.bank[0] = {a}.detach().clone()",
        "state.weight.data.clamp_(-1, 1)",
        "state.memory = state.memory + 1",
        "state.memory.copy_(state.memory.flip(0))",
        "state.weight.grad = None",
        "state.weight.requires_grad_(k % 4 != 3)",
        "state.view = state.memory[:2]",
        "state.array[k % 3] += 1.0",
        "state.memory += torch.from_numpy(state.array)",
        "state.table[torch.tensor([k % 4, 0])] += {s}.item()",
        "state.weight.data = state.weight.data * 0.9",
        "torch.manual_seed(k)",
        "state.random = torch.get_rng_state()",
        "torch.set_rng_state(getattr(state, 'random', torch.get_rng_state()))",
    ]
    w.emit(w.choose(forms).format(a=w.matrix(), s=w.scalar(), n=w.number()))


def no_grad(w):
    """Something in a context of its own."""
    head = w.choose(
        [
            "with torch.no_grad():",
            "with torch.autocast('cpu', dtype=torch.bfloat16):",
            "with torch.enable_grad():",
            "with torch.random.fork_rng():",
            "with torch.random.fork_rng(), torch.random.fork_rng():",
        ]
    )
    with w.block(head):
        body(w, 2, nested=True)
        if head == "with torch.no_grad():" and w.chance(50):
            w.emit(f"state.weight.mul_(1 - 0.01 * {w.number()})")


def branch(w):
    """An if, perhaps with an else."""
    with w.block(f"if {w.condition()}:"):
        body(w, 2, nested=True)
    if w.chance(40):
        with w.block("else:"):
            body(w, 2, nested=True)


def loop(w):
    """A loop with a count that may vary, and perhaps a way out of it."""
    w.counter += 1
    index = f"i{w.counter}"
    heads = [
        f"for {index} in range(2):",
        f"for {index} in range(k % 3):",
        f"for {index}, row in enumerate(x):",
        f"for {index} in range(len(x)):",
        f"for {index} in random.sample(range(4), 2):",
        f"for {index}, layer in enumerate(state.layers):",
        f"for {index} in (j for j in range(3) if j != k % 3):",
    ]
    head = w.choose(heads)
    w.loops += 1
    with w.block(head):
        a = w.matrix()
        if "row" in head:
            w.emit(f"{a} = {a} + row")
        if "layer" in head:
            if w.chance(50):
                w.emit("if random.random() < 0.3: continue")
            w.emit(f"{a} = layer({a})")
        body(w, 2, nested=True)
        if w.chance(30):
            w.emit(f"if {w.condition()}: {w.choose(['break', 'continue'])}")
        if w.chance(30):
            w.emit(f"{a} = {a} * {index}")
    w.loops -= 1


def while_loop(w):
    """A loop that a tensor's value ends."""
    w.counter += 1
    tries, a = f"n{w.counter}", w.matrix()
    w.emit(f"{tries} = 0")
    w.loops += 1
    with w.block(f"while {a}.abs().max() > 0.5 and {tries} < 4:"):
        w.emit(f"{a} = {a} * 0.7")
        w.emit(f"{tries} += 1")
        body(w, 1, nested=True)
    w.loops -= 1


def exception(w):
    """An exception that leaves the block, or is caught in it."""
    if w.chance(50):
        w.emit(f"if {w.condition()}: raise ValueError(f'step {{k}}')")
        return
    with w.block("try:"):
        body(w, 1, nested=True)
        wrong = ["x @ x", "x.view(7, 7)", "state.nothing", "torch.cat([x, x[:, :1]])", "x + 'text'"]
        w.emit(w.choose(["if k % 3 == 1: ", ""]) + w.choose(wrong))
    with w.block("except (RuntimeError, AttributeError, TypeError) as error:"):
        w.emit("state.log.append(type(error).__name__)")
    if w.chance(40):
        with w.block("finally:"):
            body(w, 1, nested=True)


def early(w):
    """Some steps end here."""
    value = w.choose(["None", "k", f"{w.scalar()}.item()", f"{w.matrix()}.detach()"])
    w.emit(f"if {w.condition()}: return {value}")


def hook(w):
    """A hook on a tensor, for this step or some more."""
    a = w.matrix()
    forms = [
        "if {a}.requires_grad: {a}.register_hook(lambda g: g * {n})",
        "if {a}.requires_grad and {c}: {a}.register_hook(lambda g: state.log.append(g.norm().item()))",
        "if {a}.requires_grad: state.hook = {a}.register_hook(lambda g: g.clamp(-0.1, 0.1))",
        "if {c} and hasattr(state, 'hook'): state.hook.remove()",
        "if k == 3: state.weight.register_hook(lambda g: g * 0.5)",
        "if k == 5: state.model.register_full_backward_hook(lambda m, i, o: state.log.append(len(o)))",
        "if k == 4: state.weight.register_post_accumulate_grad_hook(lambda p: print(p.grad.sum() > 0))",
    ]
    w.emit(w.choose(forms).format(a=a, n=w.number(), c=w.condition()))


STATEMENTS = [
    *[matrix] * 6,
    *[scalar] * 2,
    *[fetch] * 2,
    number,
    hook,
    *[in_place] * 3,
    *[python_state] * 2,
    *[tensor_state] * 3,
    no_grad,
    *[branch] * 2,
    *[loop] * 2,
    while_loop,
    exception,
    early,
]
SIMPLE = [
    statement
    for statement in STATEMENTS
    if statement not in (no_grad, branch, loop, while_loop, exception, early)
]


def body(w, most, *, nested=False):
    """Up to so many statements; blocks hold other blocks only near the surface."""
    for _ in range(w.count(most)):
        w.choose(SIMPLE if nested and w.depth > 4 else STATEMENTS)(w)
