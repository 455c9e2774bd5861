"""Tasks: what problems are made or read, how they are graded, and how bad data is reported."""

import json
import math
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_jax import config
from dash_jax.errors import UserError
from dash_jax.problems import Finish, Problem
from dash_jax.tasks import load_task
from dash_jax.tasks.arithmetic import _columns
from dash_jax.tokenization import CharacterTokenizer

_DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
_needs_data = pytest.mark.skipif(not _DATA.exists(), reason="no shared data")


def _arithmetic(seed=0, **keys):
    return load_task(config.from_dict({"task": {"arithmetic": keys}}).task, seed)


def _math(**keys):
    return load_task(config.from_dict({"task": {"kind": "math", "math": keys}}).task, seed=0)


def _value(text):
    """The value of a sum of products, by code of the tests' own."""
    terms = re.findall(r"[+-]?\d+(?:\*\d+)?", text)
    return sum(math.prod(map(int, term.split("*"))) for term in terms)


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_problems_of_a_level_are_right_small_and_characters_only(level):
    task = _arithmetic(levels=[level], train_size=60, test_size=20)
    for problem in task.train() + task.test():
        assert re.fullmatch(r"[0-9]+([-+*][0-9]+)+=", problem.prompt)
        assert problem.answer == str(_value(problem.prompt))
        assert int(problem.answer) >= 0
        assert len(problem.prompt) <= 16
        assert len(problem.solution) <= 45
        assert problem.solution.endswith("#" + problem.answer)
        assert CharacterTokenizer().encode(problem.prompt + problem.solution)
        assert task.grade(problem, problem.solution, Finish.EOS) == (1.0, True, problem.answer)


def test_few_shot_sums_ask_for_the_bare_answer():
    task = _arithmetic(levels=[1], train_size=60, test_size=30, few_shot=True)
    problem = task.train()[0]
    *_, line = problem.prompt.split("\n")
    assert re.fullmatch(r"\d [-+] \d =", line)
    assert problem.prompt.count("\n") == 4
    assert problem.solution == f" {problem.answer}\n"
    assert task.grade(problem, problem.solution, Finish.EOS).correct
    assert task.grade(problem, problem.solution + "1 + 1 = 2", Finish.LENGTH).correct
    assert not task.grade(problem, problem.solution.rstrip(), Finish.LENGTH).correct
    assert not task.grade(problem, f" {problem.answer}1\n", Finish.EOS).correct
    assert not {p.prompt for p in task.train()} & {p.prompt for p in task.test()}


@pytest.mark.parametrize(
    ("a", "operator", "b", "steps"),
    [
        (47, "+", 85, "7+5=12;4+8+1=13;"),
        (85, "-", 47, "5-7=18;8-4-1=03;"),
        (100, "-", 1, "0-1=19;0-0-1=19;1-0-1=00;"),
        (7, "*", 86, "7*6=42;7*8+4=60;"),
        (86, "*", 7, "6*7=42;8*7+4=60;"),
        (132, "-", 21, "2-1=01;3-2-0=01;1-0-0=01;"),
        (9, "+", 95, "9+5=14;0+9+1=10;"),
    ],
)
def test_worked_columns_by_hand(a, operator, b, steps):
    assert _columns(a, b, operator) == steps


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-*"))
def test_worked_columns_hold_the_answer(a, b, operator):
    if operator == "*":
        a %= 10
    if operator == "-" and a < b:
        a, b = b, a
    steps = _columns(a, b, operator)
    columns = re.findall(r"([^;]+)=(\d)(\d);", steps)
    assert "".join(f"{left}={carry}{digit};" for left, carry, digit in columns) == steps
    written = columns[-1][1] + "".join(digit for _, _, digit in reversed(columns))
    assert int(written) == _value(f"{a}{operator}{b}")
    for left, carry, digit in columns:
        sign = -1 if operator == "-" else 1  # a borrow counts against the digit
        assert _value(left) == 10 * sign * int(carry) + int(digit)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31 - 1),
    levels=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3, unique=True),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 30)),
)
def test_splits_share_nothing_not_even_with_operands_exchanged(seed, levels, sizes):
    keys = {"levels": levels, "train_size": sizes[0], "test_size": sizes[1]}
    task = _arithmetic(seed, **keys)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == sizes
    assert (_arithmetic(seed, **keys).train(), _arithmetic(seed, **keys).test()) == (train, test)
    keys["train_size"] = 1
    assert _arithmetic(seed, **keys).test() == test  # held-out problems stay what they are
    ids = [problem.id for problem in train + test]
    contents = [_unordered(problem.prompt) for problem in train + test]
    assert len(set(ids)) == len(set(contents)) == sum(sizes)


def _unordered(prompt):
    if "*" in prompt:
        return "*", *sorted(prompt[:-1].split("*"))
    first, *rest = re.findall(r"[+-]?\d+", prompt)
    return tuple(sorted(["+" + first, *rest]))


def test_level_5_repeats_no_sum():
    problems = _arithmetic(levels=[5], train_size=3000, test_size=10).train()
    assert len({_unordered(problem.prompt) for problem in problems}) == 3000
    for problem in problems:
        terms = [int(term) for term in re.findall(r"[+-]?\d+", problem.prompt)]
        assert min(terms[0], terms[0] + terms[1], sum(terms)) >= 0
        _, first, second = ("+" if term > 0 else "-" for term in terms)
        steps = _columns(terms[0], abs(terms[1]), first) + _columns(
            terms[0] + terms[1], abs(terms[2]), second
        )
        assert problem.solution == f"{steps}#{sum(terms)}"
    assert {re.sub(r"\d", "", problem.prompt) for problem in problems} == {"++=", "+-=", "-+=", "--="}


def test_seeds_and_levels_differ():
    keys = {"levels": [2, 3], "train_size": 10, "test_size": 4}
    first, second = _arithmetic(1, **keys).train(), _arithmetic(2, **keys).train()
    assert [problem.prompt for problem in first] != [problem.prompt for problem in second]
    assert [problem.id // 1_000_000 for problem in first] == [2, 3] * 5


def test_small_levels_give_what_they_have_and_no_more():
    task = _arithmetic(levels=[1], train_size=70, test_size=20)
    assert len({problem.id for problem in task.train() + task.test()}) == 90
    with pytest.raises(
        UserError, match=r"level 1 has 90 different problems.* need 91 .* to 90, or set other"
    ):
        _arithmetic(levels=[1], train_size=71, test_size=20)
    with pytest.raises(UserError, match=r"level 4 has 720 different problems.* to 1440, or set other"):
        _arithmetic(levels=[2, 4], train_size=4096, test_size=256)
    assert len(_arithmetic(levels=[2, 4], train_size=1430, test_size=10).train()) == 1430


@pytest.mark.parametrize("levels", [[], [0], [6], [2, 2]])
def test_levels_are_checked(levels):
    with pytest.raises(UserError, match=r"task.arithmetic.levels="):
        _arithmetic(levels=levels)


@pytest.mark.parametrize(
    ("text", "extracted"),
    [("#13", "13"), ("1+1=02;#13", "13"), ("#12#13", "13"), ("#13#12", "12"), ("13", None), ("#", ""),
     ("#13 or 12", "13 or 12"), ("#13.0", "13.0"), ("#-13", "-13"), ("#26/2", "26/2")],
)  # fmt: skip
def test_arithmetic_grades(text, extracted):
    task = _arithmetic(levels=[2], train_size=10, test_size=10)
    problem = Problem(id=0, task="arithmetic", prompt="6+7=", answer="13")
    right = extracted == "13"
    assert task.grade(problem, text, Finish.EOS) == (float(right), right, extracted)
    assert task.grade(problem, text, Finish.LENGTH) == (0.0, False, extracted)  # case 26


def _write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_rows_become_problems(tmp_path):
    first = _write(tmp_path / "a.jsonl", {"q": "1+1? {x}", "a": "two\n#### 2", "n": 1})
    second = _write(tmp_path / "b.jsonl", {"q": "Größe?", "a": "#### 1,000"}, {"q": "x", "a": "#### 3"})
    text = pathlib.Path(second).read_text(encoding="utf-8")
    pathlib.Path(second).write_text(
        "\ufeff" + text.replace("\n", "\n\n"), encoding="utf-8"
    )  # BOM, blank lines
    task = _math(
        train=[first, second], question_field="q", answer_field="a", solution_field="a", gold_rule="hash",
        template="Q: {question}\nA:", few_shot="Q: 0\nA: 0\n\n", limit=2,
    )  # fmt: skip
    problems = task.train()
    assert [problem.id for problem in problems] == [0, 1]
    assert problems[0].prompt == "Q: 0\nA: 0\n\nQ: 1+1? {x}\nA:"
    assert problems[0].solution == "two\n#### 2"
    assert [problem.answer for problem in problems] == ["2", "1,000"]
    assert [problem.source for problem in problems] == [f"{first}:1", f"{second}:1"]


def test_numbers_may_be_written_without_quotes(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"question": "?", "answer": 18.90}\n{"question": "?", "answer": 10000000000000000000001}\n'
    )
    problems = _math(test=[str(tmp_path / "a.jsonl")]).test()
    assert [problem.answer for problem in problems] == ["18.90", "10000000000000000000001"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"answer": "1"}', "no field 'question'; set task.math.question_field to one of 'answer'"),
        (b'{"question": "1"}', "no field 'answer'; set task.math.answer_field to one of 'question'"),
        (b'{"question": " ", "answer": "1"}', "field 'question' is empty"),
        (b'{"question": "1", "answer": ""}', "field 'answer' is empty"),
        (b'{"question": "1", "answer": "$."}', "no gold answer in field 'answer'"),
        (b'{"question": "1", "answer": null}', "field 'answer' is None; a text or a number is needed"),
        (b'{"question": "1", "answer": true}', "field 'answer' is True"),
        (b'{"question": ["1"], "answer": "1"}', "field 'question' is ['1']"),
        (b'{"question": "\\ud800", "answer": "1"}', "half of a surrogate pair"),
        (b'{"question": "\xff", "answer": "1"}', "not UTF-8"),
        (b'{"question": "1", ', "not JSON"),
        (b"[1, 2]", "holds ['1', '2']; every line must be an object"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "1", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=re.escape(message)) as error:
        _math(train=[str(path)]).train()
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_gold_rules_that_find_nothing_are_named(tmp_path):
    path = _write(tmp_path / "a.jsonl", {"question": "?", "answer": "18"})
    for rule in ("boxed", "hash"):
        with pytest.raises(UserError, match=rf":1: no gold answer .*'18' by task.math.gold_rule={rule}"):
            _math(train=[path], gold_rule=rule).train()
    assert _math(train=[path], gold_rule="last_number").train()[0].answer == "18"


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match=r"task.math.train=\[\]: name one or more"):
        _math().train()
    with pytest.raises(UserError, match=r"no\.jsonl: no such file"):
        _math(test=[str(tmp_path / "no.jsonl")]).test()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"folder\.jsonl: cannot be read \(Is a directory\)"):
        _math(test=[str(tmp_path / "folder.jsonl")]).test()
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match=r"no rows"):
        _math(test=[str(path)]).test()


@pytest.mark.parametrize(
    ("rule", "text", "reward"),
    [
        ("boxed", r"so \boxed{18.0}.", 1.0),
        ("boxed", "18", 0.0),
        ("hash", "9*2\n#### $18", 1.0),
        ("last_number", "I have 3, then 18.", 1.0),
        ("first_line", "18\n7+6=13", 1.0),
        ("first_line", "19\n18", 0.0),
    ],
)
def test_math_grades(tmp_path, rule, text, reward):
    task = _math(train=[_write(tmp_path / "a.jsonl", {"question": "?", "answer": "18"})], answer_rule=rule)
    problem = task.train()[0]
    assert task.grade(problem, text, Finish.EOS).reward == reward
    # Case 26: cut by the limit, no reward; but under first_line a line that ended is an answer.
    assert task.grade(problem, text, Finish.LENGTH).reward == (reward if rule == "first_line" else 0.0)
    assert task.grade(problem, "18", Finish.LENGTH).reward == 0.0


def test_data_sets_on_disk_and_unreachable_ones(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"question": "1+1", "answer": 2}, {"question": "", "answer": 2}])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "set"))
    name = str(tmp_path / "set")
    assert _math(train=[name], limit=1).train()[0].answer == "2"
    with pytest.raises(UserError, match=re.escape(f"{name}[train]:1: field 'question' is empty")):
        _math(train=[name]).train()
    with pytest.raises(UserError, match=r"cannot load split 'test'"):
        _math(test=[name]).test()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"openai/gsm8k: .*cannot load split 'train'.*go online") as error:
        _math(train=["openai/gsm8k"], subset="main").train()
    assert "\n" not in str(error.value)


@_needs_data
def test_gsm8k():
    keys = {"gold_rule": "hash", "answer_rule": "hash", "solution_field": "answer"}
    parts = [str(_DATA / f"gsm8k_train-0{part}of02.jsonl") for part in (1, 2)]
    task = _math(train=parts, test=[str(_DATA / "gsm8k_test.jsonl")], **keys)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (7473, 1319)
    finals = [
        json.loads(line)["final"] for line in (_DATA / "gsm8k_test.jsonl").read_text("utf-8").splitlines()
    ]
    assert [problem.answer.replace(",", "") for problem in test] == finals
    assert all(task.grade(problem, problem.solution, Finish.EOS).correct for problem in train)
    assert not any(task.grade(problem, problem.solution, Finish.LENGTH).correct for problem in train)
    assert train[6517].source.endswith("02of02.jsonl:1")


@_needs_data
def test_math500():
    task = _math(test=[str(_DATA / "math500.jsonl")], question_field="problem", solution_field="solution")
    problems = task.test()
    assert len(problems) == 500
    right = sum(task.grade(problem, problem.solution, Finish.EOS).correct for problem in problems)
    assert right >= 495
