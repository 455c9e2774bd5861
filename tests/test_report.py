"""The report says what the files say, and draws whatever a run has written so far."""

import json
import math

import numpy as np
import pytest

from dash_jax.errors import UserError
from dash_jax.report import _smooth, evaluation_table, learning_curve, summary

_BEFORE = {
    "problems": 256, "samples": 4, "accuracy_greedy": 0.25, "accuracy_sampled": 0.2,
    "interval_greedy": [0.2, 0.3], "interval_sampled": [0.15, 0.25], "pass_at": {"1": 0.2, "4": 0.4},
    "mean_length": 41.23, "truncated": 0.125, "seed": 3, "model": "start",
}  # fmt: skip
_AFTER = _BEFORE | {"accuracy_greedy": 0.75, "accuracy_sampled": 0.7, "mean_length": 12.0, "truncated": 0.0}


def _line(step, **changes):
    generator = np.random.default_rng(step)
    sampling, learning = generator.normal((1.2, 0.9), 0.05) * (15 if step == 0 else 1)
    accuracy = float(np.clip(0.8 - 0.7 * math.exp(-step / 40) + generator.normal(0, 0.04), 0, 1))
    return {
        "step": step, "reward": accuracy + 0.1, "accuracy": accuracy,
        "kept_share": 4 * accuracy * (1 - accuracy), "truncated": 0.3 * math.exp(-step / 20),
        "length": 20 + 20 * math.exp(-step / 30) + generator.normal(),
        "seconds_sampling": sampling, "seconds_reward": 0.1, "seconds_learning": learning,
        "seconds_other": 0.2, "seconds": sampling + learning + 0.3, **changes,
    }  # fmt: skip


def _write(run, lines):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def _evaluations(run, before=_BEFORE, after=_AFTER):
    paths = run / "before.json", run / "after.json"
    for path, evaluation in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(evaluation))
    return paths


def test_summary_by_hand(tmp_path, capsys):
    run = _write(tmp_path, [{"step": 0, "seconds": 60.25}, {"step": 1, "seconds": 2.5}])
    result = summary(run, *_evaluations(run))
    assert result == {
        "accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_kind": "greedy", "train_seconds": 62.75,
        "train_steps": 2, "seed": 3, "before": _BEFORE, "after": _AFTER,
    }  # fmt: skip
    assert json.loads((run / "summary.json").read_text()) == result
    shown = capsys.readouterr().out
    assert "25.0% (20.0% to 30.0%)" in shown
    assert "2 training steps in 1 min 3 s, seed 3" in shown


def test_summary_falls_back_to_sampled_accuracy_of_both(tmp_path):
    run = _write(tmp_path, [_line(0)])
    without = _BEFORE | {"accuracy_greedy": None, "interval_greedy": None}
    result = summary(run, *_evaluations(run, before=without))
    assert (result["accuracy_kind"], result["accuracy_before"], result["accuracy_after"]) == (
        "sampled",
        0.2,
        0.7,
    )
    # An accuracy of 0 is an accuracy.
    result = summary(run, *_evaluations(run, before=_BEFORE | {"accuracy_greedy": 0.0}))
    assert (result["accuracy_kind"], result["accuracy_before"]) == ("greedy", 0.0)


def test_evaluations_that_cannot_be_compared_are_refused(tmp_path):
    run = _write(tmp_path, [_line(0)])
    with pytest.raises(UserError, match=r"before.json has 256 problems, .*after.json has 8; evaluate both"):
        summary(run, *_evaluations(run, after=_AFTER | {"problems": 8}))
    nothing = {"accuracy_greedy": None, "interval_greedy": None}
    only_greedy = {"accuracy_sampled": None, "interval_sampled": None}
    with pytest.raises(UserError, match="share neither greedy nor sampled accuracy"):
        summary(run, *_evaluations(run, before=_BEFORE | nothing, after=_AFTER | only_greedy))
    with pytest.raises(UserError, match="no such evaluation"):
        summary(run, run / "none.json", run / "after.json")
    (run / "text.json").write_text("text")
    with pytest.raises(UserError, match=r"text.json: is no JSON .*give a file that"):
        summary(run, run / "text.json", run / "after.json")


def test_the_table_has_a_column_an_evaluation():
    table = evaluation_table({"a": _BEFORE, "b": _AFTER | {"accuracy_greedy": None, "pass_at": {}}})
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [column.header for column in table.columns] == ["", "a", "b"]
    assert rows == [
        ("problems", "256", "256"),
        ("accuracy, greedy", "25.0% (20.0% to 30.0%)", "-"),
        ("accuracy, sampled", "20.0% (15.0% to 25.0%)", "70.0% (15.0% to 25.0%)"),
        ("pass@4", "40.0%", "-"),
        ("mean length", "41.2 tokens", "12.0 tokens"),
        ("truncated", "12.5%", "0.0%"),
    ]


@pytest.mark.parametrize(
    "lines",
    [
        [_line(step, **({"eval_accuracy": 0.5} if step % 20 == 19 else {})) for step in range(120)],
        [_line(0)],
        [_line(0, reward=None, accuracy=None), _line(1, reward=None), _line(2)],
        [{"step": step, "loss": 1.0, "seconds": 1.0, "seconds_learning": 0.9} for step in range(5)],  # sft
    ],
    ids=["long", "one step", "nulls", "sft"],
)
def test_any_run_can_be_drawn(tmp_path, lines):
    path = learning_curve(_write(tmp_path / "run", lines), before=0.1, after=0.8)
    assert path == tmp_path / "run" / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics.jsonl: no training step was logged"):
        learning_curve(tmp_path)


def test_smoothing_by_hand():
    assert _smooth(np.array([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]  # too short to smooth
    smooth = _smooth(np.array([0.0, 3.0, np.nan, 6.0, *[6.0] * 25, 0.0]))  # over three steps
    assert smooth[:5].tolist() == [0.0, 1.5, 4.5, 6.0, 6.0]
    assert smooth[-2:].tolist() == [4.0, 3.0]
    assert np.isnan(_smooth(np.full(30, np.nan))).all()
