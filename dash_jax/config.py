"""The whole configuration: one tree of frozen dataclasses.

A config file is YAML with the same sections; `section.key=value` on the command
line overrides it. Every key is typed and described here, and nowhere else:
`dash-jax config FILE` prints the resolved tree with these descriptions.

What a key may hold is checked by pydantic, what keys may say together by
`_check`; both before a model is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from typing import Any, Literal

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass

from dash_jax.config_yaml import read_tree, yaml_lines
from dash_jax.errors import UserError

Schedule = Literal["constant", "linear", "cosine"]

_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _key(default: Any, description: str, **bounds: Any) -> Any:
    if isinstance(default, list):
        return Field(default_factory=lambda: list(default), description=description, **bounds)
    return Field(default=default, description=description, **bounds)


@dataclass(frozen=True, config=_STRICT)
class Model:
    """The policy: a Hugging Face folder, or, without `path`, the built-in shape with random weights."""

    path: str | None = _key(None, "Hugging Face folder (config.json, safetensors, tokenizer)")
    hidden_size: int = _key(128, "built-in model: width", gt=0)
    layers: int = _key(4, "built-in model: depth", gt=0)
    heads: int = _key(4, "built-in model: query heads", gt=0)
    kv_heads: int = _key(2, "built-in model: key/value heads", gt=0)
    mlp_size: int = _key(512, "built-in model: MLP width", gt=0)
    max_positions: int = _key(1024, "built-in model: longest prompt plus completion", gt=0)
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "what matrix products take; their sums and everything else are float32"
    )
    remat: Literal["none", "dots", "full"] = _key(
        "full", "what a layer's backward pass recomputes: nothing, all but matrix products, everything"
    )


@dataclass(frozen=True, config=_STRICT)
class Tokenizer:
    path: str | None = _key(
        None, "Hugging Face folder or sentencepiece .model file; default: model.path, else single characters"
    )


@dataclass(frozen=True, config=_STRICT)
class Arithmetic:
    """Generated sums with worked steps (task.kind: arithmetic)."""

    levels: list[int] = _key([2], "difficulties, 1 (one digit) to 5; problems are drawn from them equally")
    train_size: int = _key(4096, "training problems", gt=0)
    test_size: int = _key(256, "held-out problems; they share none with the training problems", gt=0)
    few_shot: bool = _key(
        False,
        "ask for the bare answer behind four worked examples (pre-trained models) instead of worked steps",
    )


@dataclass(frozen=True, config=_STRICT)
class Math:
    """Problems read from JSON Lines files or a `datasets` data set (task.kind: math)."""

    train: list[str] = _key([], "JSON Lines files, or `datasets` names or folders; they are joined")
    test: list[str] = _key([], "the same for held-out problems")
    subset: str | None = _key(None, "configuration of a `datasets` data set, main for openai/gsm8k")
    train_split: str = _key("train", "split of a `datasets` data set to train on")
    test_split: str = _key("test", "split of a `datasets` data set to test on")
    question_field: str = _key("question", "field that holds the question")
    answer_field: str = _key("answer", "field that holds the gold answer")
    solution_field: str | None = _key(None, "field that holds a worked solution, for `dash-jax sft`")
    gold_rule: Literal["whole", "boxed", "hash", "last_number"] = _key(
        "whole", "how the gold is taken from answer_field: all of it, last \\boxed{}, after ####, last number"
    )
    answer_rule: Literal["boxed", "hash", "last_number", "first_line"] = _key(
        "boxed", "how the answer is taken from a completion"
    )
    template: str = _key("{question}", "prompt; {question} is replaced")
    few_shot: str = _key("", "text put before the prompt, worked examples for instance")
    chat: bool = _key(False, "send the prompt as a user message through the tokenizer's chat template")
    limit: int | None = _key(None, "use only the first so many problems of each split", gt=0)


@dataclass(frozen=True, config=_STRICT)
class Task:
    kind: Literal["arithmetic", "math"] = _key("arithmetic", "where the problems come from")
    arithmetic: Arithmetic = Field(default_factory=Arithmetic)
    math: Math = Field(default_factory=Math)


@dataclass(frozen=True, config=_STRICT)
class Engine:
    """What the rollout engine does between two segments of decoding. None of it changes what is sampled."""

    segment_tokens: int = _key(
        32, "tokens between two looks of the host at the samples; 0: no look, nothing grows or moves", ge=0
    )
    share_prefix: bool = _key(True, "the samples of a group attend to one copy of their prompt together")
    grow_cache: bool = _key(True, "the cache grows with the oldest sample, instead of being read in full")
    compact: bool = _key(True, "samples that go on move into fewer rows when others have ended")
    refill: bool = _key(True, "where not all prompts fit, waiting ones take the rows of finished samples")


@dataclass(frozen=True, config=_STRICT)
class Rollout:
    """Preemptive sampling: prompts × group_size completions in one go, whatever the gradient batch is."""

    prompts: int = _key(32, "prompts a training step", gt=0)
    group_size: int = _key(8, "completions of each prompt (G)", gt=0)
    max_prompt_tokens: int = _key(64, "longer prompts are dropped, counted and logged", gt=0)
    max_new_tokens: int = _key(64, "a completion is cut there", gt=0)
    stop: list[str] = _key([], "texts of one token that end a completion like the end-of-sequence token")
    temperature: float = _key(1.0, "divides the logits, in sampler, learner and reference alike", ge=1e-3)
    memory_gb: float = _key(2.0, "caches and logits of the samples under way fit this, on each device", gt=0)
    max_rows: int | None = _key(
        None, "samples under way at once on each device; default: as many as memory_gb allows", gt=0
    )
    engine: Engine = Field(default_factory=Engine)


@dataclass(frozen=True, config=_STRICT)
class Reward:
    """Grading, in processes of its own while the sampler goes on."""

    workers: int = _key(
        1, "grading processes; more of them where seconds_reward shows that a step waits", gt=0
    )
    seconds: float = _key(
        10.0, "time for one grade, then its process is killed and the completion counts as ungraded", gt=0
    )


@dataclass(frozen=True, config=_STRICT)
class Algorithm:
    advantage: Literal["group_mean", "group_mean_std"] = _key(
        "group_mean_std", "reward minus the mean of its group, divided by the group's unbiased std or not"
    )
    filter: bool = _key(True, "drop the completions with |advantage| <= filter_threshold before the learner")
    filter_threshold: float = _key(0.0, "see filter", ge=0)
    denominator: Literal["all", "kept"] = _key(
        "all", "what the loss divides by: all completions (the gradient of no filter) or the kept ones"
    )
    loss: Literal["policy_gradient", "clipped"] = _key(
        "policy_gradient", "-A log p, or the clipped surrogate against the sampler's log-probs"
    )
    clip_low: float = _key(0.2, "clipped: ratio not below 1 - clip_low", gt=0, lt=1)
    clip_high: float = _key(0.2, "clipped: ratio not above 1 + clip_high", gt=0)
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = _key(
        "token_mean", "mean over all tokens, mean of the means of sequences, or sum / (rows × max_new_tokens)"
    )
    mask_truncated: bool = _key(False, "take completions cut by the limit out of loss and denominator")
    kl_coefficient: float = _key(
        0.0, "weight of the KL penalty against the starting policy; 0 turns it off", ge=0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = _key("k3", "k2 has the unbiased gradient, k3 is the papers'")


@dataclass(frozen=True, config=_STRICT)
class Learner:
    optimizer_batch: int | None = _key(
        None, "completions an optimizer step; default: the whole rollout (DASH, on-policy)", gt=0
    )
    micro_batch: int = _key(32, "rows of max_new_tokens a backward pass; short completions share one", gt=0)
    share_prompt: bool = _key(True, "compute a prompt once for its kept completions, not once for each")
    shapes: int = _key(2, "shapes of micro-batches: each compiles, more of them pad less", gt=0)
    logprob_chunk: int = _key(512, "positions whose logits exist at a time", gt=0)


@dataclass(frozen=True, config=_STRICT)
class Optimizer:
    """AdamW on float32 masters."""

    learning_rate: float = _key(1e-5, "peak", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = _key(
        "constant", "decay to 0 at the last step, or none"
    )
    warmup_steps: int = _key(0, "optimizer steps from 0 to the peak", ge=0)
    beta1: float = _key(0.9, "", ge=0, lt=1)
    beta2: float = _key(0.999, "", ge=0, lt=1)
    epsilon: float = _key(1e-8, "", gt=0)
    weight_decay: float = _key(0.0, "on matrices only, not on norms and biases", ge=0)
    clip_norm: float = _key(1.0, "global gradient norm", gt=0)


@dataclass(frozen=True, config=_STRICT)
class Mesh:
    """Devices = data × fsdp × tensor."""

    data: int | None = _key(None, "copies of the model; default: all devices that the others leave", gt=0)
    fsdp: int = _key(1, "weights, moments and rows are split so many ways", gt=0)
    tensor: int = _key(1, "heads, MLP and vocabulary are split so many ways", gt=0)


@dataclass(frozen=True, config=_STRICT)
class Train:
    steps: int = _key(100, "rollouts", gt=0)
    eval_every: int = _key(0, "steps between held-out evaluations; 0: only by `dash-jax eval`", ge=0)
    save_every: int = _key(50, "steps between checkpoints; the last step is always saved", gt=0)
    keep_checkpoints: int = _key(2, "older ones are deleted", gt=0)
    log_samples: int = _key(2, "completions written to samples.jsonl a step", ge=0)


@dataclass(frozen=True, config=_STRICT)
class Sft:
    """Supervised warm start on the task's worked solutions; the loss counts completion tokens only."""

    steps: int = _key(100, "optimizer steps", gt=0)
    batch: int = _key(64, "examples an optimizer step", gt=0)
    learning_rate: float = _key(1e-3, "peak; what is not named here is taken from `optimizer`", gt=0)
    schedule: Schedule = _key("constant", "as optimizer.schedule")
    examples: int | None = _key(None, "use only the first so many training problems", gt=0)


@dataclass(frozen=True, config=_STRICT)
class Eval:
    problems: int | None = _key(None, "use only the first so many held-out problems", gt=0)
    samples: int = _key(1, "sampled completions of each problem", ge=0)
    temperature: float = _key(1.0, "of the sampled completions", ge=1e-3)
    top_p: float = _key(1.0, "of the sampled completions", gt=0, le=1)
    top_k: int = _key(0, "of the sampled completions; 0 is off", ge=0)
    greedy: bool = _key(True, "also one completion of highest probability at each position")
    pass_at: list[int] = _key([1], "k of pass@k; those above `samples` are left out")


@dataclass(frozen=True, config=_STRICT)
class Config:
    run: str = _key("runs/default", "run directory: config, metrics, samples, checkpoints")
    seed: int = _key(0, "everything random follows from it", ge=0, lt=2**31)
    model: Model = Field(default_factory=Model)
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    task: Task = Field(default_factory=Task)
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward = Field(default_factory=Reward)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    learner: Learner = Field(default_factory=Learner)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    mesh: Mesh = Field(default_factory=Mesh)
    train: Train = Field(default_factory=Train)
    sft: Sft = Field(default_factory=Sft)
    eval: Eval = Field(default_factory=Eval)

    @property
    def sampling_batch(self) -> int:
        return self.rollout.prompts * self.rollout.group_size

    @property
    def optimizer_batch(self) -> int:
        return self.learner.optimizer_batch or self.sampling_batch

    @property
    def updates_per_step(self) -> int:
        return self.sampling_batch // self.optimizer_batch


def load(path: str | pathlib.Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file (None: all defaults), applies `section.key=value` overrides and checks the result.

    Raises UserError with one line that names the file, the key and the mend.
    """
    where = str(path) if path is not None else "defaults"
    return from_dict(read_tree(path, overrides), where)


def from_dict(tree: dict[str, Any], where: str = "config") -> Config:
    try:
        # Strict pydantic takes sections from JSON only, never from a dict.
        config = pydantic.TypeAdapter(Config).validate_json(json.dumps(tree, default=str))
    except pydantic.ValidationError as error:
        raise UserError(f"{where}: {_explain(error.errors())}") from None
    _check(config, where)
    return config


def to_yaml(config: Config) -> str:
    """The resolved config with each key's description as a comment."""
    return "".join(yaml_lines(config))


def _check(config: Config, where: str) -> None:
    """What no single key can know: settings that contradict each other."""
    rollout, learner, algorithm, task = config.rollout, config.learner, config.algorithm, config.task

    def refuse(message: str) -> None:
        raise UserError(f"{where}: {message}")

    if rollout.group_size == 1:
        refuse(
            f"rollout.group_size=1 with algorithm.advantage={algorithm.advantage}: "
            "a group of one has no baseline; set rollout.group_size to 2 or more"
        )
    if config.optimizer_batch % rollout.group_size:
        refuse(
            f"learner.optimizer_batch={config.optimizer_batch} splits a group: "
            f"set a multiple of rollout.group_size={rollout.group_size}"
        )
    if config.sampling_batch % config.optimizer_batch:
        refuse(
            f"learner.optimizer_batch={config.optimizer_batch} does not divide the rollout of "
            f"rollout.prompts × rollout.group_size = {config.sampling_batch} completions; set a divisor of it"
        )
    if config.updates_per_step > 1 and algorithm.loss == "policy_gradient":
        refuse(
            f"algorithm.loss=policy_gradient with {config.updates_per_step} optimizer steps a rollout: "
            "all but the first are off-policy; set algorithm.loss=clipped or remove learner.optimizer_batch"
        )
    if learner.share_prompt and learner.micro_batch % rollout.group_size:
        refuse(
            f"learner.micro_batch={learner.micro_batch} with learner.share_prompt: "
            f"set a multiple of rollout.group_size={rollout.group_size}, or share_prompt=false"
        )
    if algorithm.denominator == "kept" and not algorithm.filter:
        refuse("algorithm.denominator=kept needs algorithm.filter=true: without a filter everything is kept")
    for k in config.eval.pass_at:
        if k < 1:
            refuse(f"eval.pass_at holds {k}: k of pass@k is 1 or more")
    if not config.eval.samples and not config.eval.greedy:
        refuse("eval.samples=0 with eval.greedy=false leaves nothing to evaluate; set one of them")
    if task.kind == "arithmetic":
        levels = task.arithmetic.levels
        if not levels or any(not 1 <= level <= 5 for level in levels) or len(set(levels)) < len(levels):
            refuse(f"task.arithmetic.levels={levels}: give one or more of 1 to 5, each once")
    if task.kind == "math" and "{question}" not in task.math.template:
        refuse(
            f"task.math.template={task.math.template!r} has no {{question}}: put it where the question goes"
        )
    if config.model.path is None:
        check_positions(config, config.model.max_positions, "model.max_positions", where)
        if config.model.heads % config.model.kv_heads:
            refuse(
                f"model.kv_heads={config.model.kv_heads} does not divide model.heads={config.model.heads}; "
                "set one of its divisors"
            )
        if config.model.hidden_size % (2 * config.model.heads):
            refuse(
                f"model.hidden_size={config.model.hidden_size} is not a multiple of 2 × model.heads="
                f"{2 * config.model.heads}: every head needs an even size"
            )


def check_positions(config: Config, positions: int, name: str, where: str = "config") -> None:
    """Refuses limits above the model's positions. `name` says where `positions` stands."""
    rollout = config.rollout
    if rollout.max_prompt_tokens + rollout.max_new_tokens > positions:
        raise UserError(
            f"{where}: rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_new_tokens="
            f"{rollout.max_new_tokens} is above the model's {positions} positions ({name}); lower one of them"
        )


def _explain(errors: list[Any]) -> str:
    """The first of pydantic's errors as one line: key, value, mend."""
    error = errors[0]
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        names = _keys_at(path[:-1])
        close = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)
        where = ".".join(path[:-1]) or "the top level"
        mend = (
            f"did you mean {'.'.join([*path[:-1], close[0]])}?"
            if close
            else f"{where} has {', '.join(names)}"
        )
        return f"{key}: unknown key; {mend}{more}"
    value = error.get("input")
    shown = "a section" if isinstance(value, dict) else repr(value)
    reason = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}={shown}: {reason}{more}"


def _keys_at(path: list[str]) -> list[str]:
    node: Any = Config()
    for part in path:
        node = getattr(node, part)
    return [field.name for field in dataclasses.fields(node)]
