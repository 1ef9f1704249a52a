import json

import pytest

from bench.cli import main


@pytest.mark.parametrize("program", ["digits", "charlm"])
def test_coexec_and_lazy_equal_eager_bit_for_bit_and_are_explained(program, tmp_path):
    out = tmp_path / "compare.json"
    modes = ["--modes", "coexec,lazy"]

    status = main(["compare", program, *modes, "--preset", "tiny", "--steps", "50", "--out", str(out)])

    results = json.loads(out.read_text())["results"]
    assert [result["error"] for result in results] == [None, None, None]
    assert [result["equal"] for result in results] == [True, True, True]
    for result in results[1:]:
        assert result["executor"] == "aten"
        assert 1 < result["traces"] <= 4
        assert result["coexec_share"] > 0.8
    assert status == 0


def test_the_demo_explains_and_draws(tmp_path, capsys):
    picture = tmp_path / "graph.svg"

    main(["demo", "--preset", "tiny", "--epochs", "2", "--picture", str(picture)])

    text = capsys.readouterr().out
    assert "co-execution equalled eager bit for bit" in text
    assert "digits.py" in text
    assert "<svg" in picture.read_text()


def test_overlap_measures_both_runners(tmp_path):
    out = tmp_path / "overlap.json"

    main(["overlap", "digits", "--preset", "tiny", "--rounds", "5", "--out", str(out)])

    [result] = json.loads(out.read_text())["results"]
    assert len(result["graph_alone_ms"]) == len(result["graph_beside_ms"]) == 5
    assert result["loop_ratio"]["median"] > 0
    assert result["graph_ratio"]["median"] > 0
