"""From a row to tokens: one function builds the prompt for training and for evaluation.

    sample = [BOS] prompt | separator response EOS            trained: everything behind the |

Prompt and response are encoded apart and then joined, so that the prompt's tokens in training are those of evaluation
(encoded together, the last token of one could merge with the first of the other).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from lazytrain.errors import ConfigError, ModelFileError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text around a query; `separator` opens the response (skipped where the tokenizer puts a space itself)."""

    name: str
    template: str
    separator: str


PROMPTS = {
    prompt.name: prompt
    for prompt in (
        Prompt(
            name="metamath",
            template=(
                "Below is an instruction that describes a task. Write a response that appropriately completes the "
                "request.\n\n### Instruction:\n{query}\n\n### Response: Let's think step by step."
            ),
            separator=" ",
        ),
        Prompt(name="plain", template="{query}\n", separator=""),
    )
}


class Example(NamedTuple):
    """One encoded sample; the first `prompt_tokens` tokens (BOS among them) are not trained."""

    tokens: list[int]
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a model directory.

    Attributes:
        eos_id: appended to every response, and trained.
        pad_id: fills rows; that of EOS where the directory names none, which is fine: padding is masked by position.
        stop_ids: generation ends at any of these; EOS is one of them.
        add_bos: whether the tokenizer itself would begin a text with BOS.
    """

    bos_id: int | None
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]
    add_bos: bool


def get_prompt(name: str) -> Prompt:
    """Return the prompt of this name.

    Raises:
        ConfigError: there is none; the text lists those that there are.
    """
    if name not in PROMPTS:
        raise ConfigError(f"--prompt {name}: unknown; known are {', '.join(PROMPTS)}, chat")
    return PROMPTS[name]


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load tokenizer.json of a model directory, without its padding and truncation.

    Raises:
        ModelFileError: it is missing or can't be read.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            f"{path}: missing; save it with transformers' AutoTokenizer(use_fast=True).save_pretrained"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        size = path.stat().st_size
        raise ModelFileError(f"{path}: not a tokenizer ({size:,} bytes): {error}; fetch the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_special_tokens(model_dir: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Read BOS, EOS, padding and stops of a model directory.

    The first that names a token decides: tokenizer_config.json, special_tokens_map.json (both by text),
    generation_config.json, config.json (both by id). Every EOS of the last two is a stop as well.

    Raises:
        ConfigError: no file names an EOS token of the tokenizer's vocabulary.
        ModelFileError: one of the files can't be read.
    """
    by_text = [read_json(model_dir / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    by_id = [read_json(model_dir / name) for name in ("generation_config.json", "config.json")]
    bos_ids, eos_ids, pad_ids = (
        [i for config in by_text for i in _find_text(config.get(f"{kind}_token"), tokenizer)]
        + [i for config in by_id for i in _check_ids(config.get(f"{kind}_token_id"), tokenizer)]
        for kind in ("bos", "eos", "pad")
    )
    if not eos_ids:
        raise ConfigError(
            f"{model_dir}: no end-of-sequence token: neither eos_token in tokenizer_config.json or "
            "special_tokens_map.json nor eos_token_id in generation_config.json or config.json names a token of the "
            "vocabulary; add one, or the model could never learn where to stop"
        )
    bos_id = bos_ids[0] if bos_ids else None
    add_bos = by_text[0].get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = tokenizer.encode("").ids[:1] == [bos_id]
    stops = {eos_ids[0], *(i for config in by_id for i in _check_ids(config.get("eos_token_id"), tokenizer))}
    return SpecialTokens(
        bos_id=bos_id,
        eos_id=eos_ids[0],
        pad_id=pad_ids[0] if pad_ids else eos_ids[0],
        stop_ids=tuple(sorted(stops)),
        add_bos=add_bos and bos_id is not None,
    )


def build_prompt(prompt: Prompt, query: str) -> str:
    """Return the text that a model is given for a query, in training and in evaluation."""
    return prompt.template.replace("{query}", query)


def encode_prompts(
    tokenizer: Tokenizer, special: SpecialTokens, prompt: Prompt, queries: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of each query's prompt, with one BOS where the tokenizer uses one, and never two."""
    bos = None if special.bos_id is None else tokenizer.id_to_token(special.bos_id)
    texts = [build_prompt(prompt, strip_prefix(query.strip(), bos)) for query in queries]
    first = [special.bos_id] if special.add_bos and special.bos_id is not None else []
    return [first + encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def encode_examples(
    tokenizer: Tokenizer,
    special: SpecialTokens,
    prompt: Prompt,
    queries: Sequence[str],
    responses: Sequence[str],
) -> list[Example]:
    """Return queries with their responses as samples: prompt, response, exactly one EOS at the end."""
    separator = "" if _puts_space(tokenizer) else prompt.separator
    bos, eos = (None if i is None else tokenizer.id_to_token(i) for i in (special.bos_id, special.eos_id))
    texts = [separator + _strip_suffix(strip_prefix(response.strip(), bos), eos) for response in responses]
    prompts = encode_prompts(tokenizer, special, prompt, queries)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [
        Example(tokens + encoding.ids + [special.eos_id], len(tokens)) for tokens, encoding in zip(prompts, encodings)
    ]


def decode_response(tokenizer: Tokenizer, special: SpecialTokens, tokens: Sequence[int]) -> str:
    """Return the text of generated tokens up to the first stop, without special tokens and spaces around it."""
    end = next((index for index, token in enumerate(tokens) if token in special.stop_ids), len(tokens))
    return tokenizer.decode(list(tokens[:end]), skip_special_tokens=True).strip()


def _puts_space(tokenizer: Tokenizer) -> bool:
    tokens = tokenizer.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(("▁", "Ġ"))


def strip_prefix(text: str, token: str | None) -> str:
    """Return a text without the special tokens, such as BOS, that it begins with."""
    while token and text.startswith(token):
        text = text[len(token) :].lstrip()
    return text


def _strip_suffix(text: str, token: str | None) -> str:
    while token and text.endswith(token):
        text = text[: -len(token)].rstrip()
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of a model directory holds, an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: can't be read as JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: a JSON {type(value).__name__}, not an object; fetch the file again")
    return value


def _find_text(value: Any, tokenizer: Tokenizer) -> list[int]:
    text = value.get("content") if isinstance(value, dict) else value
    token = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return [] if token is None else [token]


def _check_ids(value: Any, tokenizer: Tokenizer) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and tokenizer.id_to_token(i) is not None]
