"""The inductor executor: compiled blocks, equal within the reassociation of sums."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import zipfile
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coexec
from coexec import _private_inductor
from coexec._native import core
from coexec.executors import job
from tests.coexec.harness import eager_tape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(core is None, reason="compiled blocks need the native module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: Largest relative distance of a tensor after the steps of a test; sums of a few terms are reassociated.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "coexec-cache"))


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))


def step(state, tape, look=lambda loss: None):
    """A step of training, which looks at something in its end; its loss."""
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    with tape():
        loss = nn.functional.cross_entropy(state.model(x), y)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        look(loss)
    return loss.detach().item()


def train(tape, steps, look=False):
    state, seen = make(), []
    for _ in range(steps):
        seen.append(step(state, tape, (lambda loss: seen.append(loss.item())) if look else lambda loss: None))
    return state, seen


def assert_close(mine, eager):
    (state, seen), (reference, expected) = mine, eager
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=TOLERANCE, atol=1e-6)
    for a, b in zip(state.model.parameters(), reference.model.parameters(), strict=True):
        assert (a - b).norm() <= TOLERANCE * b.norm()


def test_a_linear_iteration_is_one_compiled_block_and_one_commit_block():
    eager = train(eager_tape, 12)
    random = torch.get_rng_state()

    mine = train(lambda: coexec.GradientTape(executor="inductor", check=True), 12)

    assert_close(mine, eager)
    assert torch.equal(torch.get_rng_state(), random), "dropout drew eager's random numbers"
    [report] = coexec.explain().programs
    assert report.phase == "co-execution", report.summary()
    assert report.steps["co-execution"] >= 8
    assert not [c for c in report.causes if c.id == "CX0201"], report.summary()
    block, commit = report.blocks
    assert block.executor == commit.executor == "inductor"
    assert block.deferred == 0
    assert commit.deferred == commit.operations
    assert block.operations + commit.operations > 50


def test_feeds_and_fetches_are_inside_of_the_block():
    eager = train(eager_tape, 8, look=True)
    mine = train(lambda: coexec.GradientTape(executor="inductor"), 8, look=True)

    assert_close(mine, eager)
    [report] = coexec.explain().programs
    assert len(report.blocks) == 2, report.summary()  # the iteration, and what it puts off to the commit
    assert report.fallbacks == 0


def test_a_dtype_that_pytorch_would_confuse_in_compiled_code_is_left_to_aten(monkeypatch):
    def run(tape):
        torch.manual_seed(0)
        weight, seen = torch.ones(16, requires_grad=True), []
        for _ in range(6):
            with tape():
                window = torch.kaiser_window(16, dtype=torch.float64)
                loss = (weight * window).sum()
                loss.backward()
            seen.append(loss.item())
        return seen, weight.grad

    monkeypatch.setattr(_private_inductor, "_CONFUSES_DTYPES", True)
    expected, grad = run(eager_tape)
    seen, found = run(lambda: coexec.GradientTape(executor="inductor"))

    assert seen == expected
    assert torch.equal(found, grad)
    assert "confuses the dtypes" in coexec.explain().programs[0].summary()


def test_a_parameter_that_is_fed_is_written():
    def run(tape):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for k in range(10):
            x = torch.randn(5, 4)
            with tape():
                loss = layers[k // 2 % 2](x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return layers

    eager = run(eager_tape)
    mine = run(lambda: coexec.GradientTape(executor="inductor", check=True))

    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 4, report.summary()
    assert all(block.executor == "inductor" for block in report.blocks), report.summary()
    for ours, theirs in zip(mine.parameters(), eager.parameters(), strict=True):
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


def test_parameters_are_written_in_place_at_the_commit():
    state = make()
    memory = [p.data_ptr() for p in state.model.parameters()]
    versions = []
    for _ in range(8):
        step(state, lambda: coexec.GradientTape(executor="inductor", check=True))
        versions.append([p._version for p in state.model.parameters()])

    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 4, report.summary()
    assert [p.data_ptr() for p in state.model.parameters()] == memory
    for before, after in itertools.pairwise(versions):
        assert all(a > b for b, a in zip(before, after, strict=True)), "autograd has to notice"


def run_flat(tape):
    """Writes through views of what is written, and reads of these after it, on all sides of the commit."""
    torch.manual_seed(0)
    flat = torch.randn(24)
    average, weight = torch.zeros(4, 6), torch.randn(4, 6, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    seen = []
    for k in range(10):
        x = torch.randn(5, 6)
        with tape():
            rows = flat.view(4, 6)[1:3]
            loss = (x @ (weight + flat.view(4, 6)).T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.mul_(0.5)
            flat.add_(weight.detach().reshape(-1), alpha=0.1)
            average.mul_(0.9).add_(rows.sum() + weight.detach(), alpha=0.1)
            after = rows * 2
        seen.append((loss.item(), after.clone(), flat.clone(), average.clone(), k))
    return seen, weight


def test_views_of_what_the_commit_writes_are_views_of_it():
    expected, weight = run_flat(eager_tape)
    seen, found = run_flat(lambda: coexec.GradientTape(executor="inductor", check=True))

    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 4, report.summary()
    torch.testing.assert_close(found, weight, rtol=TOLERANCE, atol=1e-6)
    torch.testing.assert_close(seen, expected, rtol=TOLERANCE, atol=1e-6)


def test_what_is_read_of_a_parameter_after_its_update_is_the_new_value():
    def run(tape):
        state, seen = make(), []
        state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
        for _ in range(8):
            step(state, tape, lambda loss: seen.append(state.model[0].weight.norm().item()))
        return state, seen

    assert_close(run(lambda: coexec.GradientTape(executor="inductor", check=True)), run(eager_tape))
    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 4, report.summary()
    assert all(block.executor == "inductor" for block in report.blocks), report.summary()


def train_on_sizes(tape, steps, look):
    """Ragged sequences: their number and their length vary, and Python looks at a value on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    state, seen = SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2)), []
    for step in range(steps):
        ids = torch.randint(9, (4 + step % 3, 5 + step * 3 % 7))
        other = torch.randn(3 + step * 5 % 4, 8)
        with tape() as _:
            logits = state.model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / ids.size(0)
            if look:
                seen.append(loss.item())
            loss = loss + state.model[2](other).square().mean() * other.size(0)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
        seen.append(loss.detach().item())
    return state, seen


@pytest.mark.parametrize("look", [False, True])
def test_one_library_is_compiled_for_all_sizes(look):
    eager = train_on_sizes(eager_tape, 24, look)

    mine = train_on_sizes(lambda: coexec.GradientTape(executor="inductor", check=True), 24, look)

    assert_close(mine, eager)
    [report] = coexec.explain().programs
    assert report.phase == "co-execution", report.summary()
    assert report.traces <= 6, report.summary()
    assert not [c for c in report.causes if c.id == "CX0201"], report.summary()
    assert {b.executor for b in report.blocks} == {"inductor"}


def test_code_that_would_hold_for_some_sizes_only_is_left_to_aten(monkeypatch, tmp_path):
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    monkeypatch.setattr(_private_inductor, "_assumptions", lambda examples: ["s0 = 7"])
    eager = train_on_sizes(eager_tape, 16, False)

    mine = train_on_sizes(lambda: coexec.GradientTape(executor="inductor", check=True), 16, False)

    assert_close(mine, eager)
    [report] = coexec.explain().programs
    assert "s0 = 7" in report.summary()


def test_a_block_that_gives_another_shape_than_python_was_told_is_a_fallback(monkeypatch):
    from coexec.executors import inductor
    from coexec.tracegraph.sizes import Size

    linked = inductor._linked

    def wrongly(part):
        instruction = linked(part)
        wrong = tuple(
            s and tuple(Size(((1, (d,)),), 1) if isinstance(d, Size) else d for d in s)
            for s in instruction.shapes
        )
        return dataclasses.replace(instruction, shapes=wrong)

    monkeypatch.setattr(inductor, "_linked", lambda part: wrongly(part) if hasattr(part, "module") else part)
    kept = []

    def train_and_keep(tape):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        for step in range(10):
            x = torch.randn(4 + step * 3 % 5, 3)
            with tape() as _, torch.no_grad():
                out = model(x)
            kept.append(out.clone())
        return kept[-10:]

    eager = train_and_keep(eager_tape)
    mine = train_and_keep(lambda: coexec.GradientTape(executor="inductor", check=True))

    for a, b in zip(mine, eager, strict=True):
        torch.testing.assert_close(a, b)
    assert "a compiled block gave shape" in coexec.explain().summary()


def train_convolutions(tape):
    """Losses, what Python saw of an activation and its strides, parameters, and the strides of gradients."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
    )
    head = nn.Sequential(nn.PixelShuffle(2), nn.Flatten(), nn.Linear(2 * 24 * 24, 4))
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen, strides = [], []
    for _ in range(10):
        x, y = torch.randn(4, 3, 12, 12), torch.randint(0, 4, (4,))
        with tape():
            optimizer.zero_grad()
            features = body(x)
            loss = nn.functional.cross_entropy(head(features), y)
            loss.backward()
            optimizer.step()
            seen += [loss.item(), *features.detach().flatten()[:50].tolist()]
        strides += [features.stride(), *(p.grad.stride() for p in model.parameters())]
        seen += features.detach().flatten().tolist()
    return SimpleNamespace(model=model), seen, strides


def test_convolutions_in_another_memory_format_show_nothing_of_it():
    *eager, expected = train_convolutions(eager_tape)

    *mine, strides = train_convolutions(lambda: coexec.GradientTape(executor="inductor", check=True))

    [report] = coexec.explain().programs
    assert {b.executor for b in report.blocks} == {"inductor"}
    assert strides == expected
    assert_close(mine, eager)


@pytest.mark.parametrize("option", ["freezing", "epilogue_fusion"])
def test_blocks_are_compiled_anew_for_other_options_of_the_compiler(option):
    from torch._inductor import config

    made = job.make_job(torch.fx.GraphModule({}, torch.fx.Graph()), ())
    with config.patch({option: not getattr(config, option)}):
        other = job.make_job(torch.fx.GraphModule({}, torch.fx.Graph()), ())
    again = job.make_job(torch.fx.GraphModule({}, torch.fx.Graph()), ())

    assert made.path == again.path != other.path


def test_a_compilation_is_none_of_the_options():
    before = _private_inductor.compiler_settings()

    train(lambda: coexec.GradientTape(executor="inductor"), 8)
    nn.Sequential(nn.Linear(2, 2)).compile(mode="max-autotune")

    assert _private_inductor.compiler_settings() == before


def test_kernels_leave_a_processor_to_python(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for processors, threads in {1: 1, 2: 1, 4: 3, 8: 7, 9: 8, 64: 8}.items():
        monkeypatch.setattr(job, "processors", lambda n=processors: n)
        assert job.kernel_threads() == threads


def kernels_in(path):
    """What the compiled blocks of a folder call, in order: Python (a feed or a fetch) and products."""
    for package in path.glob("*.pt2"):
        with zipfile.ZipFile(package) as files:
            [name] = [n for n in files.namelist() if n.endswith("wrapper.cpp")]
            body = files.read(name).decode().split("::run_impl(")[-1]
        calls = re.findall(r"(proxy_executor_call_function|aoti_torch_cpu_mm_out)\(", body)
        yield ["python" if call.startswith("proxy") else "mm" for call in calls]


def test_what_python_waits_for_is_computed_before_what_comes_later(monkeypatch, tmp_path):
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))

    def run(tape):
        torch.manual_seed(0)
        w, seen = torch.randn(40, 40, requires_grad=True), []
        for _ in range(8):
            x, y = torch.randn(40, 40), torch.randn(40)
            with tape():
                h = torch.mm(x, w)
                seen.append(bool((x.sum() == 0).item()))  # a number, and nothing that is computed later
                loss = (torch.mm(torch.mm(h.tanh(), w).tanh(), w).sum(1) - y).square().mean()
                loss.backward()
                w.data.sub_(w.grad * 1e-3)
                w.grad = None
                seen.append(loss.item())
        return SimpleNamespace(model=SimpleNamespace(parameters=lambda: [w])), seen

    assert_close(run(lambda: coexec.GradientTape(executor="inductor")), run(eager_tape))
    [block] = [calls for calls in kernels_in(tmp_path) if "mm" in calls]
    # x is fed; the number is fetched; y is fed; the loss is fetched before the backward pass
    assert block[:4] == ["python", "mm", "python", "mm"], block
    assert block[4:7] == ["mm", "python", "python"], block
    assert set(block[7:]) == {"mm"}, "the backward pass is in the block"


def test_other_threads_keep_their_kernel_threads():
    threads = torch.get_num_threads()
    train(lambda: coexec.GradientTape(executor="inductor"), 8)

    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()

    [report] = coexec.explain().programs
    assert report.phase == "co-execution"
    assert [torch.get_num_threads(), *found] == [threads, threads]


OPTIMIZERS = {
    "Adam foreach": (lambda p: torch.optim.Adam(p, lr=0.01, foreach=True), "inductor"),
    "SGD foreach": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True), "inductor"),
    "Adam fused": (lambda p: torch.optim.Adam(p, lr=0.01, fused=True), "aten"),
    "SGD fused": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True), "aten"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_lists_of_tensors_with_rates_that_change(name):
    make_optimizer, at_the_commit = OPTIMIZERS[name]

    def run(tape):
        state, seen = make(), []
        state.optimizer = make_optimizer(state.model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(state.optimizer, 0.9)
        for _ in range(9):
            seen.append(step(state, tape))
            schedule.step()
        return state, seen

    assert_close(run(lambda: coexec.GradientTape(executor="inductor", check=True)), run(eager_tape))

    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 4, report.summary()
    executors = [block.executor for block in report.blocks]
    assert executors[0] == "inductor"
    assert executors[-1] == at_the_commit, report.summary()


def test_a_compiler_that_fails_in_any_way_leaves_the_program_to_aten(monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the compiler\nwith a second line")

    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor, "aot_compile", fail)
    mine = train(lambda: coexec.GradientTape(executor="inductor"), 6)

    assert_close(mine, train(eager_tape, 6))
    [report] = coexec.explain().programs
    assert report.phase == "co-execution"
    assert {block.executor for block in report.blocks} == {"aten"}
    assert "TorchInductor fails: in the compiler" in report.summary()
