"""Texts to token ids and back: Hugging Face folders, sentencepiece files, single characters.

Prompts are encoded once, before training; what is sampled stays ids, and is
decoded only for graders and logs. Nothing decoded is ever encoded again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dash_jax.config import Config
from dash_jax.errors import UserError
from dash_jax.problems import Problem

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

Message = dict[str, str]  # {"role": "user", "content": "What is 12+9?"}


class Tokenizer(Protocol):
    """What the rest of the package knows about a tokenizer."""

    vocab_size: int  # ids are below it; a model may have more rows
    eos_ids: tuple[int, ...]  # each ends a completion; the first is the one that training texts end with
    pad_id: int  # may be a real token, an end-of-sequence one for instance: masks come from lengths

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with one BOS in front exactly when the tokenizer itself puts one there."""

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation in the chat template, ready for the assistant's turn; BOS as in `encode`.

        Raises UserError when the tokenizer has no template or the template refuses the messages.
        """

    def encode_completion(self, text: str) -> list[int]:
        """Ids of what a model shall say, for supervised training: no BOS, one EOS at the end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens. Ids that the tokenizer does not know give nothing."""

    def save(self, folder: pathlib.Path) -> None:
        """Writes its files into a model folder, so that `load_tokenizer` and transformers find them there."""


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder. Raises UserError when the folder has none that works."""

    def __init__(self, folder: str | pathlib.Path):
        from transformers import AutoTokenizer  # takes seconds, and other tokenizers do without

        self._folder = pathlib.Path(folder)
        if not self._folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; give one with tokenizer.json and tokenizer_config.json"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # noqa: BLE001 - `tokenizers` raises bare Exception on a malformed file
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: no usable tokenizer ({type(error).__name__}: {reason})") from None
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.eos_ids = self._find_eos_ids()
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        bos_id = self._tokenizer.bos_token_id
        self._bos = [bos_id] if bos_id is not None and self._tokenizer.encode("")[:1] == [bos_id] else []

    def encode(self, text: str) -> list[int]:
        return self._with_bos(self._encode_plain(text))

    def encode_chat(self, messages: list[Message]) -> list[int]:
        import jinja2

        if not self._tokenizer.chat_template:
            raise UserError(f"{self._folder}: the tokenizer has no chat template; set task.math.chat=false")
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, ValueError) as error:
            raise UserError(f"{self._folder}: the chat template refuses the messages ({error})") from None
        return self._with_bos(self._encode_plain(text))

    def encode_completion(self, text: str) -> list[int]:
        return [*self._encode_plain(text), self.eos_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def save(self, folder: pathlib.Path) -> None:
        for name in _TOKENIZER_FILES:
            if (self._folder / name).exists():
                shutil.copy(self._folder / name, folder / name)

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _with_bos(self, ids: list[int]) -> list[int]:
        """One BOS where raw text gets one, though many templates write it out already."""
        return ids if not self._bos or ids[:1] == self._bos else self._bos + ids

    def _find_eos_ids(self) -> tuple[int, ...]:
        own = self._tokenizer.eos_token_id
        path = self._folder / "generation_config.json"
        more: Any = None
        if path.exists():
            try:
                more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                raise UserError(f"{path}: cannot be read ({error}); it must hold a JSON object") from None
        more = more if isinstance(more, list) else [more]
        ids = tuple(dict.fromkeys(token for token in [own, *more] if token is not None))
        if not ids:
            raise UserError(
                f"{self._folder}: no end-of-sequence token; set eos_token in tokenizer_config.json"
            )
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise UserError(f"{path}: eos_token_id={token} is no id of the tokenizer's {self.vocab_size}")
        return ids


class SentencePieceTokenizer:
    """A sentencepiece `.model` file.

    Such a file does not say whether texts begin with BOS; as in Llama they do
    when it has a BOS piece. Raises UserError when the file cannot be used.
    """

    def __init__(self, path: str | pathlib.Path):
        import sentencepiece

        self._path = path
        if not pathlib.Path(path).is_file():
            raise UserError(f"{path}: no such file; give a sentencepiece .model file")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise UserError(f"{path}: not a sentencepiece model ({error}); give a .model file") from None
        if self._model.eos_id() < 0:
            raise UserError(f"{path}: has no end-of-sequence piece; train the model with one (eos_id)")
        self.vocab_size: int = self._model.vocab_size()
        self.eos_ids: tuple[int, ...] = (self._model.eos_id(),)
        self.pad_id = self.eos_ids[0] if self._model.pad_id() < 0 else self._model.pad_id()
        self._bos = [] if self._model.bos_id() < 0 else [self._model.bos_id()]

    def encode(self, text: str) -> list[int]:
        return self._bos + self._model.encode(text)

    def encode_chat(self, messages: list[Message]) -> list[int]:
        raise UserError(f"{self._path}: a sentencepiece file has no chat template; set task.math.chat=false")

    def encode_completion(self, text: str) -> list[int]:
        return [*self._model.encode(text), *self.eos_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([token for token in ids if 0 <= token < self.vocab_size])

    def save(self, folder: pathlib.Path) -> None:
        shutil.copy(self._path, folder / "tokenizer.model")


class CharacterTokenizer:
    """One token a character: line feed and printable ASCII. Ids 0, 1, 2 are padding, BOS and EOS.

    >>> CharacterTokenizer().encode("1+")
    [1, 21, 15]
    """

    def __init__(self) -> None:
        self._characters = "\n" + "".join(map(chr, range(32, 127)))
        self._ids = {character: 3 + index for index, character in enumerate(self._characters)}
        self.vocab_size = 3 + len(self._characters)
        self.pad_id = 0
        self._bos = [1]
        self.eos_ids: tuple[int, ...] = (2,)

    def encode(self, text: str) -> list[int]:
        return self._bos + self._encode_plain(text)

    def encode_chat(self, messages: list[Message]) -> list[int]:
        raise UserError(
            "the character tokenizer has no chat template; set task.math.chat=false or tokenizer.path"
        )

    def encode_completion(self, text: str) -> list[int]:
        return [*self._encode_plain(text), *self.eos_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters[token - 3] for token in ids if 3 <= token < self.vocab_size)

    def save(self, folder: pathlib.Path) -> None:
        """As a Hugging Face tokenizer that gives the same ids."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

        specials = ["<pad>", "<bos>", "<eos>"]
        words = models.WordLevel({name: i for i, name in enumerate(specials)} | self._ids, unk_token="<pad>")
        tokenizer = Tokenizer(words)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(specials)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", self._bos[0])]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>",
            "eos_token": "<eos>", "clean_up_tokenization_spaces": False,
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _encode_plain(self, text: str) -> list[int]:
        for place, character in enumerate(text):
            if character not in self._ids:
                raise UserError(
                    f"character {character!r} (U+{ord(character):04X}) at place {place} of {text[:40]!r} is "
                    "unknown to the character tokenizer (printable ASCII and line feed); set tokenizer.path"
                )
        return [self._ids[character] for character in text]


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that a config names: tokenizer.path, else that of model.path, else single characters.

    Raises UserError with the key when there is nothing usable at the path.
    """
    for key, name in (("tokenizer.path", config.tokenizer.path), ("model.path", config.model.path)):
        if name is None:
            continue
        path = pathlib.Path(name)
        if not path.exists():
            raise UserError(
                f"{key}={name}: no such file or folder; give a Hugging Face folder" + _OR_FILE[key]
            )
        try:
            if key == "tokenizer.path" and path.is_file():
                return SentencePieceTokenizer(path)
            return HuggingFaceTokenizer(path)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
    return CharacterTokenizer()


_OR_FILE = {"tokenizer.path": " or a sentencepiece .model file", "model.path": ""}


class Dropped(NamedTuple):
    """Prompts above the limit. Example: `Dropped(number=3, longest=211)`, 0 and 0 when there are none."""

    number: int
    longest: int  # tokens of the longest one


def encode_problems(
    problems: Sequence[Problem], tokenizer: Tokenizer, *, chat: bool, max_prompt_tokens: int
) -> tuple[list[Problem], Dropped]:
    """Fills `prompt_ids`, by the chat template when `chat`; drops, counts and logs what is above the limit.

    The limit is held against the very ids that the model will see. Raises
    UserError, with the problem's source, for an empty prompt or one that cannot
    be encoded, and when nothing is left.
    """
    kept, dropped = [], []
    for problem in problems:
        if not problem.prompt.strip():
            raise UserError(
                f"{problem.source or f'problem {problem.id}'}: the prompt is empty; mend or remove it"
            )
        try:
            if chat:
                ids = tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
            else:
                ids = tokenizer.encode(problem.prompt)
        except UserError as error:
            raise UserError(f"{problem.source or f'problem {problem.id}'}: {error}") from None
        if len(ids) > max_prompt_tokens:
            dropped.append(len(ids))
        else:
            kept.append(dataclasses.replace(problem, prompt_ids=tuple(ids)))
    shortest, longest = min(dropped, default=0), max(dropped, default=0)
    if not kept:
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: none of {len(problems)} prompts is left; "
            f"the shortest has {shortest} tokens, the longest {longest}; raise the limit"
        )
    if dropped:
        _log.warning(
            "%d of %d prompts are above rollout.max_prompt_tokens=%d and were dropped; the longest has %d",
            len(dropped), len(problems), max_prompt_tokens, longest,
        )  # fmt: skip
    return kept, Dropped(len(dropped), longest)
