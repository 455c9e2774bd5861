"""The trace of a step, and the table of its costs."""

import io

import pytest
from rich.console import Console

from dash_jax import config as configuration
from dash_jax import profile as profiling
from dash_jax.profile import Profile, _covered, _Event, _shortened, profile, table


def config_of(run, **train):
    return configuration.from_dict({
        "run": str(run),
        "model": {
            "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_size": 16, "max_positions": 32,
        },
        "task": {"kind": "arithmetic", "arithmetic": {"levels": [1], "train_size": 16, "test_size": 4}},
        "rollout": {"prompts": 4, "group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
        "algorithm": {"filter": False},
        "learner": {"micro_batch": 8, "shapes": 1},
    })  # fmt: skip


def test_a_step_is_traced_and_nothing_else_is_written(tmp_path):
    result = profile(config_of(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["profile"]
    (trace,) = result.folder.glob("plugins/profile/*/*.xplane.pb")  # where TensorBoard looks
    assert trace.stat().st_size > 1000

    assert result.costs == sorted(result.costs, key=lambda cost: -cost.seconds)
    programs = {cost.program for cost in result.costs}
    assert {"sampling: prefill", "sampling: decode", "learning"} <= programs
    whats = " ".join(cost.what for cost in result.costs)
    for part in ("gate_up/dot_general", "backward down/", "recomputed ", "attention/", "draw/"):
        assert part in whats, part
    assert 0 < result.busy <= result.phases["seconds"]


def test_the_table_shows_the_largest_costs():
    costs = [profiling.Cost("learning", f"op {i}", 2.0 - 0.1 * i, 10 * i) for i in range(12)]
    result = Profile(folder=None, phases={"seconds": 20.0, "seconds_learning": 20.0}, costs=costs, busy=15.0)
    output = io.StringIO()
    Console(file=output, width=150).print(table(result))
    text = " ".join(output.getvalue().split())
    assert "20.00 s (learning 20.00); operations ran in 75% of it" in text
    assert "op 9" in text
    assert "op 10" not in text
    assert "11.5%" in text  # 2.0 of 17.4


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "jit(update)/while/body/eval_jaxpr/cond/branch_1_fun/transpose(jvp(Decoder))/while/body/"
            "eval_jaxpr/checkpoint/layers/layers._linear/gate_up/dot_general",
            "backward gate_up/dot_general",
        ),
        (
            "jit(update)/transpose(jvp(Decoder))/checkpoint/rematted_computation/layers/attention/exp",
            "recomputed attention/exp",
        ),
        ("jit(decode)/while/body/Block/Block._linear/qkv/dot_general", "qkv/dot_general"),
        ("jit(decode)/while/body/draw/reduce_sum", "draw/reduce_sum"),
    ],
)
def test_names_of_operations(name, short):
    assert _shortened(name) == short


def test_time_in_which_something_runs():
    events = [_Event("", "", *span) for span in ((5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7))]
    assert _covered(events) == pytest.approx(4.0)
