"""Tokenizers: one BOS, every EOS, ids in range, and clear words where a file or a text is wrong."""

import dataclasses
import json
import logging
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_jax import config
from dash_jax.errors import UserError
from dash_jax.problems import Problem
from dash_jax.tokenization import (
    CharacterTokenizer,
    Dropped,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    encode_problems,
    load_tokenizer,
)

_SHARED = pathlib.Path(__file__).parents[2] / "shared" / "tokenizers"
_needs_shared = pytest.mark.skipif(not _SHARED.exists(), reason="no shared tokenizers")
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_HELLO = [{"role": "user", "content": "ab ba"}]


def _make_folder(
    folder: pathlib.Path, *, adds_bos: bool = True, template: str | None = _TEMPLATE
) -> pathlib.Path:
    """A byte-level BPE with one merge, "ab", and the specials <s>, </s>, <end>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<end>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<end>"]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _make_folder(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HuggingFaceTokenizer(folder)


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory):
    import sentencepiece

    path = tmp_path_factory.mktemp("pieces") / "tiny.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["what is 12 + 9 ?", "it is 21 .", "0 1 2 3 4 5 6 7 8 9"] * 20),
            model_writer=file, vocab_size=60, hard_vocab_limit=False, byte_fallback=False, minloglevel=2,
        )  # fmt: skip
    return path


def test_raw_text_gets_one_bos_case_50(tokenizer):
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a").count(0) == 1
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")  # written out already


@pytest.mark.parametrize("template", [_TEMPLATE, _TEMPLATE.removeprefix("{{ bos_token }}")])
def test_chat_gets_one_bos_whether_the_template_writes_it_or_not_case_50(tmp_path, template):
    tokenizer = HuggingFaceTokenizer(_make_folder(tmp_path, template=template))
    ids = tokenizer.encode_chat(_HELLO)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert ids == tokenizer.encode("[user]ab ba</s>[assistant]")  # the chat and the raw path agree


def test_no_bos_where_the_tokenizer_adds_none_case_50(tmp_path):
    tokenizer = HuggingFaceTokenizer(_make_folder(tmp_path, adds_bos=False))
    assert 0 not in tokenizer.encode("a")
    assert tokenizer.encode_chat(_HELLO).count(0) == 1  # the template's own


def test_completions_have_no_bos_and_one_eos(tokenizer):
    ids = tokenizer.encode_completion("ab")
    assert len(ids) == 2
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "ab"


def test_decoding_and_encoding_again_changes_ids_case_34(tokenizer):
    a, b = tokenizer.encode("a")[1], tokenizer.encode("b")[1]
    assert tokenizer.decode([a, b]) == "ab"
    assert tokenizer.encode("ab")[1:] != [a, b]  # why sampled ids are never encoded again


def test_decode_skips_specials_keeps_blanks_and_survives_unknown_ids(tokenizer):
    ids = tokenizer.encode("a , b .")
    assert tokenizer.decode([*ids, 1, 2]) == "a , b ."
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "a , b ."
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("generation", "eos_ids"),
    [(None, (1,)), ({}, (1,)), ({"eos_token_id": 2}, (1, 2)), ({"eos_token_id": [2, 1]}, (1, 2)),
     ({"eos_token_id": None}, (1,)), ({"eos_token_id": 0}, (1, 0))],
)  # fmt: skip
def test_every_eos_of_the_checkpoint_counts(tmp_path, generation, eos_ids):
    folder = _make_folder(tmp_path)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.eos_ids == eos_ids
    assert tokenizer.pad_id == 1  # falls back to EOS


def test_bad_generation_configs_are_named(tmp_path):
    folder = _make_folder(tmp_path)
    path = folder / "generation_config.json"
    for text, message in (
        ("{", "cannot be read"),
        ('{"eos_token_id": 999999}', "eos_token_id=999999 is no id"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            HuggingFaceTokenizer(folder)


@pytest.mark.parametrize(
    "files",
    [{}, {"tokenizer.json": "{nope", "tokenizer_config.json": "{}"}, {"tokenizer.json": "{}"},
     {"tokenizer.json": '{"model": {"type": "X"}, "added_tokens": []}'}, {"tokenizer_config.json": "\xff"}],
)  # fmt: skip
def test_unusable_folders_give_one_line(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="no usable tokenizer") as error:
        load_tokenizer(config.from_dict({"model": {"path": str(tmp_path)}}))
    assert str(error.value).startswith(f"model.path: {tmp_path}")
    assert "\n" not in str(error.value)


def test_missing_and_refusing_templates_are_explained(tmp_path):
    plain = HuggingFaceTokenizer(_make_folder(tmp_path / "plain", template=None))
    with pytest.raises(UserError, match=r"no chat template; set task.math.chat=false"):
        plain.encode_chat(_HELLO)
    strict = HuggingFaceTokenizer(
        _make_folder(tmp_path / "strict", template="{{ raise_exception('no user turns') }}")
    )
    with pytest.raises(UserError, match=r"refuses the messages \(no user turns\)"):
        strict.encode_chat(_HELLO)
    with pytest.raises(UserError, match="chat template"):
        CharacterTokenizer().encode_chat(_HELLO)


def test_sentencepiece(piece_file):
    tokenizer = SentencePieceTokenizer(piece_file)
    ids = tokenizer.encode("12 + 9")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.pad_id == 2
    assert tokenizer.encode_completion("21")[-1] == 2
    assert tokenizer.decode([*ids, 2, tokenizer.vocab_size, -1]) == "12 + 9"
    with pytest.raises(UserError, match="chat template"):
        tokenizer.encode_chat(_HELLO)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_characters_come_back(text):
    tokenizer = CharacterTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert len(ids) == len(text) + 1
    assert all(3 <= token < tokenizer.vocab_size for token in ids[1:])
    assert tokenizer.encode_completion(text) == [*ids[1:], 2]


@pytest.mark.parametrize("character", ["é", "\t", "\x00", "😀"])
def test_unknown_characters_are_named(character):
    with pytest.raises(UserError, match=rf"U\+{ord(character):04X}\) at place 1 of .*set tokenizer.path"):
        CharacterTokenizer().encode("a" + character)


def test_load_tokenizer_chooses_by_path(folder, piece_file):
    def load(**tree):
        return load_tokenizer(config.from_dict(tree))

    assert isinstance(load(), CharacterTokenizer)
    assert isinstance(load(model={"path": str(folder)}), HuggingFaceTokenizer)
    both = load(model={"path": str(folder)}, tokenizer={"path": str(piece_file)})
    assert isinstance(both, SentencePieceTokenizer)


def test_missing_paths_name_their_key(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    for key in ("model", "tokenizer"):
        with pytest.raises(UserError, match=rf"^{key}.path={nowhere}: no such file or folder"):
            load_tokenizer(config.from_dict({key: {"path": nowhere}}))
    junk = tmp_path / "junk.model"
    junk.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"^tokenizer.path: .*not a sentencepiece model"):
        load_tokenizer(config.from_dict({"tokenizer": {"path": str(junk)}}))


def _problems(*prompts):
    return [
        Problem(id=i, task="test", prompt=p, answer="", source=f"f:{i + 1}") for i, p in enumerate(prompts)
    ]


def test_prompts_are_measured_in_final_ids_case_51(caplog):
    problems = _problems(*("a" * length for length in (6, 7, 8, 20)))  # BOS makes one more
    with caplog.at_level(logging.WARNING):
        kept, dropped = encode_problems(problems, CharacterTokenizer(), chat=False, max_prompt_tokens=8)
    assert [problem.id for problem in kept] == [0, 1]
    assert [len(problem.prompt_ids) for problem in kept] == [7, 8]
    assert dropped == Dropped(number=2, longest=21)
    assert "2 of 4 prompts are above rollout.max_prompt_tokens=8" in caplog.text
    assert [dataclasses.replace(problem, prompt_ids=()) for problem in kept] == problems[:2]


def test_the_chat_template_counts_against_the_limit_case_51(tokenizer):
    length = len(tokenizer.encode_chat([{"role": "user", "content": "ab"}]))
    kept, dropped = encode_problems(_problems("ab"), tokenizer, chat=True, max_prompt_tokens=length)
    assert dropped == Dropped(0, 0)
    assert kept[0].prompt_ids == tuple(tokenizer.encode_chat([{"role": "user", "content": "ab"}]))
    with pytest.raises(UserError, match="none of 1 prompts is left"):
        encode_problems(_problems("ab"), tokenizer, chat=True, max_prompt_tokens=length - 1)


def test_nothing_left_names_counts_and_limit_case_51():
    with pytest.raises(UserError, match=r"max_prompt_tokens=2: none of 2 .* has 4 tokens, the longest 5"):
        encode_problems(_problems("abc", "abcd"), CharacterTokenizer(), chat=False, max_prompt_tokens=2)
    with pytest.raises(UserError, match="none of 0 prompts"):
        encode_problems([], CharacterTokenizer(), chat=False, max_prompt_tokens=2)


def test_empty_and_unreadable_prompts_name_their_source_case_51():
    with pytest.raises(UserError, match=r"^f:2: the prompt is empty"):
        encode_problems(_problems("a", " \n"), CharacterTokenizer(), chat=False, max_prompt_tokens=9)
    with pytest.raises(UserError, match=r"^f:2: character 'é'"):
        encode_problems(_problems("a", "é"), CharacterTokenizer(), chat=False, max_prompt_tokens=9)


@_needs_shared
def test_qwen3():
    tokenizer = HuggingFaceTokenizer(_SHARED / "qwen3-hf")
    assert tokenizer.vocab_size == 151_669
    assert tokenizer.eos_ids == (151_645,)
    assert tokenizer.encode("a b") == [64, 293]
    chat = tokenizer.encode_chat(_HELLO)
    assert chat[0] == 151_644
    assert tokenizer.decode(chat) == "user\nab ba\nassistant\n"
    assert tokenizer.decode(tokenizer.encode("<think>é 😀 .</think>")) == "<think>é 😀 .</think>"


@_needs_shared
def test_llama2c_sentencepiece():
    tokenizer = SentencePieceTokenizer(_SHARED / "tok512.model")
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.pad_id) == (512, (2,), 2)
    assert tokenizer.encode("47+85=") == [1, 410, 484, 491, 496, 487, 480, 64]
    assert tokenizer.decode(tokenizer.encode("hi there é 😀")) == "hi there é 😀"
