"""The command line as a user meets it: a whole small run, and refusals that leave nothing behind."""

import json
import pathlib

import jax
import pytest

from dash_jax.cli import main

_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
_TINY = """
model: {hidden_size: 16, layers: 2, heads: 2, kv_heads: 1, mlp_size: 32, max_positions: 64}
task: {arithmetic: {levels: [1], train_size: 40, test_size: 10}}
rollout: {prompts: 8, group_size: 4, max_prompt_tokens: 8, max_new_tokens: 12}
learner: {micro_batch: 32, shapes: 1}
algorithm: {filter: false}
train: {steps: 2, save_every: 1, eval_every: 2}
sft: {steps: 2, batch: 8}
eval: {samples: 3, pass_at: [1, 3, 4]}
"""


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.yaml").write_text(_TINY)
    return [str(tmp_path / "tiny.yaml"), f"run={tmp_path / 'run'}"]


def _refused(capsys, *arguments):
    """Exit code 2 and one line on standard error, which is returned."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dash-jax: ")
    return lines[0]


def test_sft_train_eval_export_report(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["sft", *tiny]) == 0
    assert f"model.path={run / 'sft' / 'model'}" in capsys.readouterr().out
    assert main(["sft", *tiny]) == 0, "a finished warm start does nothing more"

    warm = f"model.path={run / 'sft' / 'model'}"
    assert main(["eval", *tiny, warm, "--start", "--name", "before"]) == 0
    assert main(["train", *tiny, warm]) == 0
    assert main(["eval", *tiny, warm, "--name", "after"]) == 0
    after = json.loads((run / "after.json").read_text())
    assert after["model"] == f"{run} step 2"
    assert after["pass_at"].keys() == {"1", "3"}, "pass@4 of 3 samples does not exist"
    completions = [json.loads(line) for line in (run / "after.jsonl").read_text().splitlines()]
    assert len(completions) == 10 * (1 + 3)
    assert {"prompt", "completion", "answer", "correct", "finish"} <= completions[0].keys()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert "eval_accuracy" in lines[1]
    assert lines[0]["logprob_gap"] < 1e-4
    assert "kl" not in lines[0]

    assert (
        main(["report", str(run), "--before", str(run / "before.json"), "--after", str(run / "after.json")])
        == 0
    )
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert {"accuracy_before", "accuracy_after", "train_seconds", "seed"} <= json.loads(
        (run / "summary.json").read_text()
    ).keys()

    assert main(["export", *tiny, warm, "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert "exists and is not an empty folder" in _refused(
        capsys, "export", *tiny, warm, "--out", str(tmp_path / "out")
    )
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("7+5=").input_ids == [1, 27, 15, 25, 33]


@pytest.mark.parametrize("verb", ["train", "sft", "eval", "config"])
def test_a_bad_key_is_refused_before_anything_happens(verb, tiny, tmp_path, capsys):
    message = _refused(capsys, verb, *tiny, "rollout.group_sise=4")
    assert "did you mean rollout.group_size?" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=1"], "a group of one has no baseline"),
        (["learner.optimizer_batch=6"], "set a multiple of rollout.group_size=4"),
        (["rollout.max_prompt_tokens=60"], "is above the model's 64 positions"),
        (["rollout.max_prompt_tokens=3"], "none of 40 prompts is left"),
        (["rollout.prompts=41"], "a batch of 41 is above the 40 training problems"),
        (["task.arithmetic.train_size=4000"], "level 1 has 90 different problems"),
        (["model.path=nowhere"], "model.path=nowhere: no such file or folder"),
        (["tokenizer.path=nowhere"], "tokenizer.path=nowhere: no such file or folder"),
        (["rollout.stop=[ab]"], "rollout.stop: 'ab' is 2 tokens"),
        (["mesh.fsdp=3"], "set them so that the product is 8"),
        (["rollout.memory_gb=1e-6"], "rollout.memory_gb=1e-06: one prompt with 4 samples"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, words, tiny, tmp_path, capsys):
    assert words in _refused(capsys, "train", *tiny, *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question": "1+1=", "answer": "2"}\n{"question": "1+2="}\n', "data.jsonl:2"),
        (b'{"question": "1+1=", "answer": "2"}\n{"question": "", "answer": "2"}\n', "data.jsonl:2"),
        (b'{"question": "1+1=", "answer": "2"}\n{"question": "\xff", "answer": "2"}\n', "data.jsonl:2"),
        (b'{"question": "1+1=", "answer": "2"}\nno json\n', "data.jsonl:2"),
        (b"", "data.jsonl"),
    ],
)
def test_bad_data_is_reported_with_file_and_line(content, words, tiny, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    message = _refused(capsys, "train", *tiny, "task.kind=math", f"task.math.train=[{path}]")
    assert words in message
    assert not (tmp_path / "run").exists()


def test_missing_config_file_and_missing_arguments(capsys):
    assert "none.yaml: no such config file" in _refused(capsys, "train", "none.yaml")
    with pytest.raises(SystemExit) as exit_:
        main(["train"])
    assert exit_.value.code == 2


def test_settings_may_stand_behind_an_option(tiny, tmp_path, capsys):
    assert "rollout.promts" in _refused(capsys, "eval", tiny[0], "--start", "rollout.promts=3")
    with pytest.raises(SystemExit) as error:
        main(["eval", *tiny, "--start", "--nonsense"])
    assert error.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_what_would_be_wrong_or_lost_is_refused_first(tiny, tmp_path, capsys):
    assert "there is no checkpoint in it" in _refused(capsys, "export", *tiny, "--out", str(tmp_path / "out"))
    assert "--name ../x" in _refused(capsys, "eval", *tiny, "--name", "../x")
    assert "--small-prompts 0" in _refused(capsys, "bench", *tiny, "--small-prompts", "0")
    assert "--seeds x" in _refused(capsys, "bench", *tiny, "--seeds", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]
    assert "cannot be made" in _refused(capsys, "train", tiny[0], f"run={tiny[0]}")


def test_report_without_a_run(tmp_path, capsys):
    assert "metrics.jsonl" in _refused(capsys, "report", str(tmp_path))


@pytest.mark.skipif(not _DATA.exists(), reason="no shared data")
def test_gsm8k_and_math_500_are_read(tiny, tmp_path, capsys):
    for file, keys in {
        "gsm8k_test.jsonl": ["task.math.gold_rule=hash", "task.math.answer_rule=hash"],
        "math500.jsonl": ["task.math.question_field=problem"],
    }.items():
        data = ["task.kind=math", f"task.math.train=[{_DATA / file}]", f"task.math.test=[{_DATA / file}]"]
        run = [f"run={tmp_path / file}", "model.max_positions=1000", "rollout.max_prompt_tokens=800"]
        small = ["eval.problems=8", "eval.samples=1", "rollout.max_new_tokens=4"]
        unknown = _ascii_only(_DATA / file, tmp_path / f"ascii_{file}")
        data = [part.replace(str(_DATA / file), str(unknown)) for part in data]
        assert main(["eval", *tiny, *data, *keys, *run, *small]) == 0
        assert json.loads((tmp_path / file / "eval.json").read_text())["problems"] == 8


def _ascii_only(source, target):
    """The character tokenizer knows ASCII only; the first rows without anything else."""
    lines = [
        line
        for line in source.read_text().splitlines()
        if json.dumps(json.loads(line), ensure_ascii=False).isascii()
    ]
    target.write_text("\n".join(lines[:20]) + "\n")
    return target
