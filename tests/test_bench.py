"""The arms of the benchmark and what is read off their runs."""

import json

import pytest

from dash_jax import bench
from dash_jax import config as configuration
from dash_jax.errors import UserError


def config_of(**train):
    return configuration.from_dict({
        "rollout": {"prompts": 16, "group_size": 4, "max_new_tokens": 8},
        "learner": {"micro_batch": 8},
        "train": {"steps": 10, "eval_every": 5} | train,
    })  # fmt: skip


def test_arms_differ_in_what_they_say_and_in_nothing_else():
    config = config_of()
    arms = bench.arms(config, small_prompts=2)
    assert list(arms) == ["grpo_paper", "grpo_matched", "dash_nofilter", "dash"]
    assert [arm.algorithm.filter for arm in arms.values()] == [False, False, False, True]
    # The same completions in all, measured at the same numbers of them.
    for arm in arms.values():
        assert arm.train.steps * arm.rollout.prompts == 160
        assert arm.train.eval_every * arm.rollout.prompts == 80
        assert (arm.model, arm.task, arm.eval, arm.sft) == (
            config.model,
            config.task,
            config.eval,
            config.sft,
        )
    assert arms["grpo_paper"].optimizer_batch == 8
    assert arms["grpo_paper"].optimizer.learning_rate == pytest.approx(config.optimizer.learning_rate / 3)
    for name in ("grpo_matched", "dash_nofilter", "dash"):
        assert arms[name].optimizer_batch == 64
        assert arms[name].optimizer == config.optimizer
    assert arms["grpo_matched"].rollout.max_rows == 8
    assert arms["dash"].rollout == arms["dash_nofilter"].rollout == config.rollout


def test_settings_that_cannot_be_compared_are_refused():
    with pytest.raises(UserError, match=r"--small-prompts 3 does not divide rollout\.prompts=16"):
        bench.arms(config_of(), small_prompts=3)
    for train in ({"eval_every": 0}, {"eval_every": 4}):
        with pytest.raises(UserError, match=r"train\.eval_every=. must divide train\.steps=10"):
            bench.arms(config_of(**train), small_prompts=2)
    with pytest.raises(UserError, match="there is no 'ppo'; take of grpo_paper, grpo_matched"):
        bench.bench(config_of(), names=["ppo"], seeds=[0], target=0.5, small_prompts=2)


def line(sampling, learning, accuracy=None):
    return {
        "seconds_sampling": sampling, "seconds_learning": learning, "seconds_other": 0.5,
        "seconds_evaluation": 100.0, "kept_share": 0.5, "padding_share": 0.1, "flops": 1e9,
    } | ({"eval_accuracy": accuracy} if accuracy is not None else {})  # fmt: skip


def test_compilation_and_evaluation_do_not_count():
    lines = [line(20, 10), line(1, 2, 0.4), line(1, 2), line(1, 2, 0.7), line(1, 2), line(1, 2, 0.9)]
    result = bench.measured(lines, 0.7, 123.0)
    assert result["seconds_compile"] == pytest.approx(27)
    assert result["seconds_total"] == pytest.approx(6 * 3.5)
    assert result["seconds_to_target"] == pytest.approx(4 * 3.5)
    assert [point for pair in result["curve"] for point in pair] == pytest.approx([7, 0.4, 14, 0.7, 21, 0.9])
    assert result["seconds_by_phase"] == {"sampling": 25, "reward": 0, "learning": 20, "other": 3}
    assert (result["kept_share"], result["updates"], result["final_accuracy"]) == (0.5, 6, 0.9)
    assert result["flops"] == 6e9
    assert bench.measured(lines, 0.95, 123.0)["seconds_to_target"] is None


def test_table_and_page_of_several_seeds():
    runs = [
        {
            "arm": arm,
            "seed": seed,
            **bench.measured([line(9, 9), line(slow * 1.5, slow * 2, 0.5 + 0.1 * seed)], 0.6, 200.0),
        }
        for arm, slow in (("grpo_paper", 2.0), ("dash", 1.0))
        for seed in (0, 1)
    ]
    document = {"target": 0.6, "seeds": [0, 1], "runs": runs}
    page = bench._page(json.loads(json.dumps(document)))
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "(1 of 2)" in page  # seeds that reached the target
    rows = {
        line.split("│")[1].strip(): line.split("│")[3].strip() for line in page.splitlines() if "│" in line
    }
    assert rows == {"grpo_paper": "1.3", "dash": "1.0"}  # (26 - 5.5) / (22.5 - 7.25) seconds
    assert "55.0% ± 63.5" in page  # Student's 12.71 × 0.0707 / sqrt(2)
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_bench_end_to_end(tmp_path):
    config = configuration.from_dict({
        "run": str(tmp_path / "bench"),
        "model": {
            "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp_size": 16, "max_positions": 32,
        },
        "task": {"kind": "arithmetic", "arithmetic": {"levels": [1], "train_size": 16, "test_size": 4}},
        "rollout": {"prompts": 4, "group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
        "learner": {"micro_batch": 8, "shapes": 1},
        "train": {"steps": 2, "eval_every": 1},
        "eval": {"samples": 1, "greedy": False},
    })  # fmt: skip
    page = bench.bench(config, names=["grpo_matched", "dash"], seeds=[0], target=0.5, small_prompts=2)
    document = json.loads(page.with_suffix(".json").read_text())
    assert [run["arm"] for run in document["runs"]] == ["grpo_matched", "dash"]
    for run in document["runs"]:
        assert run["updates"] == 2
        assert len(run["curve"]) == 2
        assert run["peak_rss_mb"] > 100
        assert run["flops"] > 0
    stamp = (tmp_path / "bench" / "dash-0" / "metrics.jsonl").stat().st_mtime_ns
    bench.bench(config, names=["dash"], seeds=[0], target=0.5, small_prompts=2)
    assert (tmp_path / "bench" / "dash-0" / "metrics.jsonl").stat().st_mtime_ns == stamp  # done already
