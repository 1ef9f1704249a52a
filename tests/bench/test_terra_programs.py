"""The ten programs of Terra's evaluation: their traits, and that co-execution equals eager bit for bit."""

import contextlib
import importlib
import json
from dataclasses import replace

import pytest
import torch

from bench import programs
from bench.cli import main
from bench.data.boxes import box_iou, nms
from bench.modes import start_run
from bench.program import missing_packages
from bench.programs import PROGRAMS, fasterrcnn, sdpoint, yolov3
from bench.programs.musictransformer import RelativeAttention

TERRA = [
    "resnet50",
    "dcgan",
    "dropblock",
    "sdpoint",
    "musictransformer",
    "bert_cls",
    "bert_qa",
    "gpt2",
    "fasterrcnn",
    "yolov3",
]


def needs(name):
    """Skips where a package of the program is not installed."""
    if missing := missing_packages(PROGRAMS[name]):
        pytest.skip(f"needs {', '.join(missing)}")


def started(name):
    needs(name)
    return start_run(PROGRAMS[name], "eager", preset="tiny")


def test_the_suite_holds_the_ten_programs():
    assert [module.PROGRAM.name for module in programs.TERRA] == TERRA
    assert set(TERRA) < set(PROGRAMS)


@pytest.mark.parametrize("name", TERRA)
@pytest.mark.parametrize(
    ("preset", "steps"), [("tiny", 12), pytest.param("small", 50, marks=pytest.mark.slow)]
)
def test_co_execution_equals_eager_bit_for_bit(name, preset, steps, tmp_path):
    needs(name)
    out = tmp_path / "compare.json"

    main(["compare", name, "--modes", "coexec", "--preset", preset, "--steps", str(steps), "--out", str(out)])

    eager, ours = json.loads(out.read_text())["results"]
    assert ours["error"] is None
    assert ours["equal"] is True, ours["first_difference"]
    assert len(ours["step_ms"]) == len(eager["step_ms"]) == steps


def test_dropblock_keeps_less_with_every_step():
    run = started("dropblock")
    kept = []

    for _ in range(3):
        run.training.step(run.tape)
        kept.append(run.training.model.dropblock.keep_prob)

    assert 1 > kept[0] > kept[1] > kept[2]


def test_dropblock_drops_squares_and_keeps_the_mean():
    block = PROGRAMS["dropblock"].make(0, "tiny").model.dropblock
    block.keep_prob = 0.7
    ones = torch.ones(64, 8, 9, 9)

    dropped = block(ones)

    assert dropped.mean() == pytest.approx(1, abs=1e-5)
    zeros = (dropped == 0).float()
    assert 0.15 < zeros.mean() < 0.4
    # Every zero lies in a square of zeros.
    middles = -torch.nn.functional.max_pool2d(-zeros, 3, 1)
    squares = torch.nn.functional.max_pool2d(torch.nn.functional.pad(middles, [2] * 4), 3, 1)
    assert torch.equal(squares, zeros)


def test_sdpoint_changes_point_and_ratio_and_with_them_the_shapes():
    model = started("sdpoint").training.model
    shapes = set()
    for model.point in (None, 0):
        for model.ratio in sdpoint.RATIOS:
            hook = model.blocks[1].register_forward_hook(lambda _, __, out: shapes.add(out.shape))
            model(torch.zeros(2, 3, 16, 16))
            hook.remove()

    assert len(shapes) == 3


def test_relative_attention_adds_the_logit_of_the_distance():
    torch.manual_seed(0)
    T = 5
    by_distance = torch.randn(1, 1, T, T)

    skewed = RelativeAttention._skew(by_distance)

    for i in range(T):
        for j in range(i + 1):
            # The last column is distance 0.
            assert skewed[0, 0, i, j] == by_distance[0, 0, i, T - 1 - (i - j)]


def test_the_trainer_keeps_the_loss_of_its_latest_step():
    run = started("musictransformer")

    loss = run.training.step(run.tape)

    assert run.training.loss_value is loss


def test_bert_cls_measures_the_accuracy_of_every_batch():
    run = started("bert_cls")

    for _ in range(3):
        run.training.step(run.tape)

    assert len(run.training.accuracies) == 3
    assert all(0 <= accuracy <= 1 for accuracy in run.training.accuracies)


def test_answers_of_bert_qa_are_parameter_lists():
    needs("bert_qa")
    from bench.programs.bert_qa import _read_questions

    for question in _read_questions(24)[:200]:
        name, *answer = question.context[question.start - 1 : question.end + 1]
        assert name == question.name
        assert (answer[0], answer[-1]) == ("(", ")")


def test_batches_of_gpt2_have_many_lengths():
    run = started("gpt2")
    lengths = set()
    run.training.model.register_forward_pre_hook(
        lambda _, __, inputs: lengths.add(inputs["input_ids"].shape[1]), with_kwargs=True
    )

    for _ in range(20):
        run.training.step(run.tape)

    assert len(lengths) > 4


def test_dcgan_draws_digits_that_come_nearer_to_real_ones():
    run = started("dcgan")
    with run.active():
        before = run.training.evaluate()
        for _ in range(150):
            run.training.step(run.tape)

        assert run.training.evaluate() < 0.7 * before


def test_nms_keeps_the_best_of_boxes_that_overlap():
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30], [0, 0, 10, 9]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.3])

    kept = nms(boxes.numpy(), scores.numpy(), 0.6)

    assert kept == [1, 2]
    assert box_iou(boxes[0], boxes[1]) == pytest.approx(0.81)


@pytest.mark.parametrize("image_size", [32, 64])
def test_encoded_boxes_are_decoded_again(image_size):
    config = fasterrcnn.Config(width=8, image_size=image_size, batch_size=1, scenes=1)
    anchors = fasterrcnn.RPN(config).anchors
    boxes = torch.tensor([[3.0, 4, 20, 17]]).expand(len(anchors), 4)

    decoded = fasterrcnn.decode(fasterrcnn.encode(boxes, anchors), anchors, image_size)

    near = box_iou(anchors, boxes) > 0.2  # farther ones are cut off
    assert near.any()
    torch.testing.assert_close(decoded[near], boxes[near])


def test_regions_are_aligned_with_their_boxes():
    H = W = 8
    columns = (torch.arange(W) + 0.5) * fasterrcnn.STRIDE
    features = columns.expand(1, H, W)  # each cell holds the x of its middle

    [[regions]] = fasterrcnn.roi_align(features, torch.tensor([[8.0, 8, 40, 40]]))

    torch.testing.assert_close(regions[0], torch.tensor([12.0, 20, 28, 36]))


def test_targets_of_yolov3_hold_each_object_once_and_decode_to_its_box():
    scenes = PROGRAMS["yolov3"].make(0, "tiny").scenes
    for scene in scenes[:20]:
        targets = yolov3.make_targets(scene, 32)
        found = []
        for level, target in enumerate(targets):
            raw = target[None, ..., :4].clone()
            raw[..., :2] = raw[..., :2].logit(eps=1e-6)
            found += [*yolov3.decode(raw, level, 32)[0][target[..., 4] == 1]]
        cells = {tuple(box.round().int().tolist()) for box in found}
        # Two objects in one cell of one anchor are one target.
        assert cells <= {tuple(box.round().int().tolist()) for box in scene.boxes}
        assert found


def test_a_program_that_lacks_a_package_is_refused_with_its_name(monkeypatch, capsys):
    monkeypatch.setattr("bench.program.find_spec", lambda name: None)

    with pytest.raises(SystemExit):
        main(["train", "gpt2"])

    assert "gpt2 needs transformers: pip install transformers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", TERRA)
def test_the_full_preset_is_right_but_for_its_batch_size(name, monkeypatch):
    """What a GPU trains takes a step here with a batch that a CPU can take."""
    needs(name)
    module = importlib.import_module(f"bench.programs.{name}")
    monkeypatch.setitem(module.CONFIGS, "full", replace(module.CONFIGS["full"], batch_size=2))
    training = module.make(0, "full")

    loss = training.step(contextlib.nullcontext)

    assert torch.isfinite(loss)
