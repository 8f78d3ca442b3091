"""Greedy generation: the tokens of a loop without a cache, of transformers, and the same for every batch."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lazytrain import attention, generation
from lazytrain.base import Batch, Model, Params, Unit
from lazytrain.configuration import ModelConfig, load_config, load_stop_ids, parse_config
from lazytrain.errors import ConfigError, DataError
from lazytrain.generation import generate
from lazytrain.transformer import forward_logits, random_params, transformer_model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = [
    [5],
    [9, 3, 3],
    [1, 2, 3, 4, 5, 6, 7],
    [40, 30, 20],
    [8, 8],
    [6, 5, 4, 3, 2, 1, 0],
    [11, 12],
    [13, 14, 15, 16, 17],
]
NUM_NEW = 9


def make_model(family: str, **changes: Any) -> tuple[Model, ModelConfig, Callable[[Unit], Params]]:
    data = {
        "model_type": family,
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": None,
        **changes,
    }
    config = parse_config(data)
    model = transformer_model(config)
    params = dict(random_params(model, 2, torch.float32, std=0.3))
    return model, config, getter(params)


def getter(params: dict[str, Tensor]) -> Callable[[Unit], Params]:
    return lambda unit: {name: params[spec.full_name] for name, spec in unit.params.items()}


def run(model: Model, config: ModelConfig, get_params: Callable[[Unit], Params], **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {
        "prompts": PROMPTS,
        "max_new_tokens": NUM_NEW,
        "stop_ids": [],
        "pad_id": 0,
        "batch_size": 8,
        "device": "cpu",
        "dtype": torch.float32,
        **changes,
    }
    return generate(model, config, get_params, options.pop("prompts"), **options)


@torch.no_grad()
def without_cache(model: Model, get_params: Callable[[Unit], Params], prompt: list[int], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        logits_btv = forward_logits(model, get_params, {"tokens_bt": torch.tensor([tokens])})
        tokens.append(int(logits_btv[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_without_a_cache(family: str) -> None:
    model, config, get_params = make_model(family)
    expected = [without_cache(model, get_params, prompt, NUM_NEW) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 4, "the model says different things"
    assert run(model, config, get_params) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_and_single_prompts_give_equal_tokens(family: str, batch_size: int) -> None:
    model, config, get_params = make_model(family, tie_word_embeddings=True)
    together = run(model, config, get_params)
    assert run(model, config, get_params, batch_size=batch_size) == together


def test_equal_lengths_need_no_mask_and_give_equal_tokens() -> None:
    model, config, get_params = make_model("qwen2")
    prompts = [[1, 2, 3], [3, 2, 1], [7, 7, 7]]
    alone = [run(model, config, get_params, prompts=[prompt])[0] for prompt in prompts]
    assert run(model, config, get_params, prompts=prompts) == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_taken_by_their_lengths_give_equal_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, get_params = make_model(family)
    expected = run(model, config, get_params)
    seen: list[list[int]] = []

    def attend(q_nhk: Tensor, k_ngk: Tensor, v_ngk: Tensor, bounds_s: Tensor, max_length: int) -> Tensor:
        """Stand in for the GPU's kernel: each segment on its own."""
        seen.append(bounds_s.tolist())
        assert bounds_s.dtype == torch.int32
        parts = [slice(*bounds) for bounds in pairwise(bounds_s.tolist())]
        outputs = [
            F.scaled_dot_product_attention(
                *(x[part].transpose(0, 1) for x in (q_nhk, k_ngk, v_ngk)), is_causal=True, enable_gqa=True
            )
            for part in parts
            if part.start < part.stop
        ]
        return torch.cat([output.transpose(0, 1) for output in outputs])

    monkeypatch.setattr(generation, "takes_lengths", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "_attend_by_lengths", attend)
    assert run(model, config, get_params) == expected
    assert len(seen) == config.num_hidden_layers, "the prompts' own pass only"
    assert seen[0][-1] == len(PROMPTS) * 7


def test_the_padding_token_does_not_matter() -> None:
    model, config, get_params = make_model("qwen3")
    assert run(model, config, get_params, pad_id=0) == run(model, config, get_params, pad_id=52)


def test_a_text_ends_at_its_first_stop_token() -> None:
    model, config, get_params = make_model("llama")
    free = run(model, config, get_params)
    stop_ids = [free[0][3], free[2][5]]
    expected = []
    for tokens in free:
        ends = [position for position, token in enumerate(tokens) if token in stop_ids]
        expected.append(tokens[: ends[0] + 1] if ends else tokens)
    assert expected != free
    for batch_size in (1, 3, 8):
        assert run(model, config, get_params, stop_ids=stop_ids, batch_size=batch_size) == expected


@pytest.mark.parametrize("between_looks", [1, 4, 100])
def test_rare_looks_change_no_token(between_looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, get_params = make_model("llama")
    stop_ids = [tokens[4] for tokens in run(model, config, get_params)[:4]]
    expected = run(model, config, get_params, stop_ids=stop_ids)
    monkeypatch.setitem(generation.TOKENS_BETWEEN_LOOKS, "cpu", between_looks)
    assert run(model, config, get_params, stop_ids=stop_ids) == expected


def test_finished_rows_leave_the_batch_and_the_loop_ends() -> None:
    model, config, get_params = make_model("llama")
    num_rows: list[int] = []

    def watched_embed(params: Params, batch: Batch) -> Tensor:
        num_rows.append(len(batch["tokens_bt"]))
        return model.embed.fn(params, batch)

    watched = dataclasses.replace(model, embed=dataclasses.replace(model.embed, fn=watched_embed))
    stop_ids = sorted({tokens[5] for tokens in run(model, config, get_params)[:3]})
    texts = run(watched, config, get_params, max_new_tokens=40, stop_ids=stop_ids)
    assert num_rows == [sum(len(tokens) > step for tokens in texts) for step in range(max(map(len, texts)))]
    assert num_rows[-1] < 8
    num_rows.clear()
    assert run(watched, config, get_params, stop_ids=list(range(53))) == [tokens[:1] for tokens in texts]
    assert num_rows == [8], "all texts ended with their first token"


def test_every_unit_is_asked_for_once_a_token_in_forward_order() -> None:
    model, config, get_params = make_model("qwen3")
    asked: list[str] = []

    def watched(unit: Unit) -> Params:
        asked.append(unit.name)
        return get_params(unit)

    run(model, config, watched, max_new_tokens=3)
    assert asked == [unit.name for unit in model.units] * 3


def test_progress_is_told_before_each_token_and_may_end_it() -> None:
    model, config, get_params = make_model("llama")
    numbers: list[int] = []
    run(model, config, get_params, batch_size=5, progress=numbers.append)
    assert numbers == [*range(1, NUM_NEW + 1)] * 2

    asked: list[str] = []

    def stop(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    def watched(unit: Unit) -> Params:
        asked.append(unit.name)
        return get_params(unit)

    with pytest.raises(KeyboardInterrupt):
        run(model, config, watched, progress=stop)
    assert asked == [unit.name for unit in model.units] * 2


def test_nothing_to_do_gives_empty_texts() -> None:
    model, config, get_params = make_model("llama")
    assert run(model, config, get_params, prompts=[]) == []
    assert run(model, config, get_params, max_new_tokens=0) == [[]] * len(PROMPTS)


def test_bad_prompts_are_refused() -> None:
    model, config, get_params = make_model("llama")
    with pytest.raises(DataError, match="prompt 1 of 2 has no token"):
        run(model, config, get_params, prompts=[[1], []])
    with pytest.raises(DataError, match="token id 53 has no row"):
        run(model, config, get_params, prompts=[[1, 53]])


def test_a_window_limits_prompt_and_new_tokens_together() -> None:
    model, config, get_params = make_model("mistral", sliding_window=16)
    assert run(model, config, get_params) == [without_cache(model, get_params, prompt, NUM_NEW) for prompt in PROMPTS]
    with pytest.raises(ConfigError, match=r"17 tokens.*sliding_window of 16"):
        run(model, config, get_params, max_new_tokens=10)


def test_bf16_runs_and_continues_in_bf16() -> None:
    model, config, _ = make_model("qwen2")
    get_params = getter(dict(random_params(model, 2, torch.bfloat16, std=0.3)))
    texts = run(model, config, get_params, dtype=torch.bfloat16)
    assert [len(tokens) for tokens in texts] == [NUM_NEW] * 8


def test_attention_has_no_kernel_that_is_planned_for_each_length() -> None:
    model, config, get_params = make_model("llama")
    enabled = set()

    def look(unit: Unit) -> Params:
        enabled.add(torch.backends.cuda.cudnn_sdp_enabled())
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        return get_params(unit)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    run(model, config, look)
    assert enabled == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before, "training goes on with what it was profiled with"


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_gives_the_tokens_of_the_cpu(family: str) -> None:
    model, config, get_params = make_model(family)

    def on_gpu(unit: Unit) -> Params:
        return {name: param.cuda() for name, param in get_params(unit).items()}

    stop_ids = [tokens[4] for tokens in run(model, config, get_params)[:2]]
    expected = run(model, config, get_params, stop_ids=stop_ids)
    for batch_size in (1, 8):
        assert run(model, config, on_gpu, stop_ids=stop_ids, batch_size=batch_size, device="cuda") == expected


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_takes_prompts_by_their_lengths_in_16_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, _ = make_model(family)
    params = {name: value.cuda() for name, value in random_params(model, 2, torch.float16, std=0.3)}
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "max_new_tokens": 2}
    alone = run(model, config, getter(params), batch_size=1, **options)  # no padding: causal attention
    calls = []
    kernel = attention._attend_by_lengths
    monkeypatch.setattr(attention, "_attend_by_lengths", lambda *args: calls.append(1) or kernel(*args))
    assert run(model, config, getter(params), batch_size=8, **options) == alone
    assert len(calls) == config.num_hidden_layers


@pytest.mark.data
def test_stories260k_tells_the_story_of_transformers(shared_dir: Path) -> None:
    model_dir = shared_dir / "data" / "models" / "stories260K"
    config = load_config(model_dir)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in ("Once upon a time", "Lily and Tom", "One day, a big dog")]
    texts = run(
        transformer_model(config),
        config,
        getter(load_file(model_dir / "model.safetensors")),
        prompts=prompts,
        max_new_tokens=60,
        stop_ids=load_stop_ids(model_dir, config),
    )
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, text in zip(prompts, texts):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[0, len(prompt) :]
        assert text == expected.tolist()
    assert "there was a little" in tokenizer.decode(texts[0])
