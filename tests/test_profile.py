"""The trace of a step, and the table of its costs."""

import io
import warnings

import jax
import pytest
from rich.console import Console

from dash_jax import profile as profiling
from dash_jax.cli import main
from dash_jax.profile import Profile, _costs, _covered, _Event, _meanings, _read, _shortened, _Span, table

_TINY = """
model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, mlp_size: 16, max_positions: 32}
task: {kind: arithmetic, arithmetic: {levels: [1], train_size: 16, test_size: 4}}
rollout: {prompts: 4, group_size: 2, max_prompt_tokens: 8, max_new_tokens: 8}
algorithm: {filter: false}
learner: {micro_batch: 8, shapes: 1}
train: {steps: 1}
"""


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_step_of_a_run_is_traced_and_the_run_stays_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.yaml").write_text(_TINY)
    run, results = tmp_path / "run", []
    assert main(["train", str(tmp_path / "tiny.yaml"), f"run={run}"]) == 0
    before = files(run)
    monkeypatch.setattr(profiling, "profile", lambda config, trace=profiling.profile: keep(trace(config)))

    def keep(result):
        results.append(result)
        return result

    capsys.readouterr()
    assert main(["profile", str(tmp_path / "tiny.yaml"), f"run={run}"]) == 0
    shown = capsys.readouterr().out
    (result,) = results
    for cost in result.costs[:10]:
        assert f"{cost.seconds:.3f}" in shown
    assert str(run / "profile") in "".join(shown.split())

    (trace,) = (run / "profile").glob("plugins/profile/*/*.xplane.pb")  # where TensorBoard looks
    after = files(run)
    assert after.keys() - before.keys() == {trace, *trace.parent.glob("*.json.gz")}
    assert all(after[path] == content for path, content in before.items())

    assert result.costs == sorted(result.costs, key=lambda cost: -cost.seconds)
    assert {"sampling: prefill", "sampling: decode", "learning"} <= {cost.phase for cost in result.costs}
    whats = [cost.what for cost in result.costs]
    for part in ("gate_up/dot_general", "backward down/", "recomputed ", "attention/", "draw/", "copy f32["):
        assert any(part in what for what in whats), part
    assert not any(what.startswith(("cond", "while", "call")) for what in whats)
    assert 0 < result.busy <= result.phases["seconds"]
    assert result.kept == 1.0

    threads, others = 0, set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for line in plane.lines:
                events = [(event.name, dict(event.stats)) for event in line.events]
                threads += any("hlo_op" in stats for _, stats in events)
                others |= {name for name, stats in events if "hlo_op" not in stats}
    assert sum(cost.seconds for cost in result.costs) <= result.busy * threads * 1.000001
    assert {"sampling", "reward", "learning"} <= others
    assert not [name for name in others if "compile" in name.lower()], "the warm-up has compiled everything"


def test_programs_of_one_name_are_told_apart(tmp_path):
    """By the id of the program, as the names of their operations are the same."""

    @jax.jit
    def square(x):
        return x @ x

    for size in (24, 40):
        square(jax.numpy.ones((size, size))).block_until_ready()
    with jax.profiler.trace(str(tmp_path)), jax.profiler.TraceAnnotation("reward"):
        square(jax.numpy.ones((24, 24))).block_until_ready()
        square(jax.numpy.ones((40, 40))).block_until_ready()
    events, phases = _read(tmp_path, containers=())
    found = {(cost.phase, cost.what) for cost in _costs(events, phases, _meanings())}
    for size in (24, 40):
        assert ("reward: square", f"dot_general f32[{size},{size}]") in found


_STATS = ("hlo_op", "hlo_module", "program_id")
_GPU = """
planes {{
  name: "/device:GPU:0"
  lines {{ name: "Stream #7(Compute)" {kernels} }}
  lines {{ name: "XLA Modules" events {{ metadata_id: 2 duration_ps: 9000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "gemm_fusion_kernel" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "MemcpyH2D" }} }}
  {names}
}}
"""


def test_device_streams_are_read(tmp_path):
    """A made-up trace: a kernel of an operation twice, and a copy that belongs to none."""
    stats = 'stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_decode" }'
    kernels = " ".join(
        f"events {{ metadata_id: 1 offset_ps: {at} duration_ps: 2000000 {stats} }}" for at in (0, 5_000_000)
    )
    kernels += " events { metadata_id: 2 offset_ps: 8000000 duration_ps: 1000000 }"
    names = " ".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in enumerate(_STATS, start=1)
    )
    text = _GPU.format(kernels=kernels, names=names)
    file = tmp_path / "plugins" / "profile" / "now" / "host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))

    events, phases = _read(tmp_path, containers=())
    costs = _costs(events, [*phases, _Span("sampling", -1.0, 7e-6)], {(0, "dot.1"): "qkv/dot f32[8,8]"})
    assert [(cost.phase, cost.what, cost.calls) for cost in costs] == [
        ("sampling: decode", "qkv/dot f32[8,8]", 2),
        ("other", "MemcpyH2D", 1),
    ]
    assert [cost.seconds for cost in costs] == pytest.approx([4e-6, 1e-6])


def test_the_table_shows_the_largest_costs():
    costs = [profiling.Cost("learning", f"op {i}", 2.0 - 0.1 * i, 10 * i) for i in range(12)]
    result = Profile(
        folder=None, phases={"seconds": 20.0, "seconds_learning": 20.0}, costs=costs, busy=15.0, kept=0.25
    )
    output = io.StringIO()
    Console(file=output, width=150).print(table(result))
    text = " ".join(output.getvalue().split())
    assert "20.00 s (learning 20.00); operations ran in 75% of it; 25% of the completions kept" in text
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
        ("jit(decode)/while/body/vmap(vmap(sample_keys))/vmap(vmap(jit(_uniform)))/add", "sample_keys/add"),
        ("jit(decode)/while/body/vmap(vmap())/add", "add"),
        ("jit(decode)/while/body", ""),
    ],
)
def test_names_of_operations(name, short):
    assert _shortened(name) == short


def test_time_in_which_something_runs():
    events = [_Event("", 0, "", *span) for span in ((5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7))]
    assert _covered(events) == pytest.approx(4.0)
