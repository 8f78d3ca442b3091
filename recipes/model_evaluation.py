"""Exact match of a model directory on rows, as the recipe measures it, without training.

    lazytrain eval --model DIR --data FILE

The model need not fit on the device: units that don't are read from their mapped files each time they are needed.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from lazytrain.base import Model, Params, Unit
from lazytrain.configuration import load_config
from lazytrain.engine import Engine
from lazytrain.errors import LazyTrainError
from lazytrain.homes import owned_params
from lazytrain.planning import default_limits
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.chats import ChatTemplate, load_chat_template
from lazytrain.recipes.evaluation import evaluate
from lazytrain.recipes.failures import describe_error, make_directory
from lazytrain.recipes.metamathqa import choose_device
from lazytrain.recipes.options import Options, add_evaluation, make_parser, parse_whole
from lazytrain.recipes.preparation import Job, resolve_settings
from lazytrain.recipes.prompts import PROMPTS, Prompt, get_prompt, load_tokenizer, read_special_tokens
from lazytrain.recipes.rows import load_rows
from lazytrain.recipes.scoring import Score
from lazytrain.recipes.splits import sample_rows
from lazytrain.shards import ModelDir, check_params, open_model_dir
from lazytrain.signals import GracefulStop
from lazytrain.solver.sizes import parse_size
from lazytrain.trainer import TrainState
from lazytrain.transformer import transformer_model

# Of the device memory that may be filled; the rest is for caches of keys and values, and logits.
WEIGHTS_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """One tensor of a model's files, in the place of a unit's home: `read_params` finds it at its only place."""

    full_name: str
    shape: tuple[int, ...]
    numel: int
    offset: int = 0
    has_params: bool = True

    @property
    def layout(self) -> "FileTensor":
        """Return what knows the places."""
        return self

    @property
    def places(self) -> tuple["FileTensor"]:
        """Return the only place."""
        return (self,)


class FileEngine:
    """What evaluation asks of a trainer's engine, from a model's files: all weights, or one unit's on the device.

    Units stay on the device as long as they fit into `room_bytes`.
    """

    def __init__(
        self, model: Model, files: ModelDir, device: torch.device, dtype: torch.dtype, room_bytes: int
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.live_step = 0
        self.homes = self
        self.units = [
            FileTensor(full_name=spec.full_name, shape=spec.shape, numel=spec.numel)
            for unit in model.units
            for spec in owned_params(model, unit).values()
        ]
        self._files, self._room_bytes = files, room_bytes
        self._kept: dict[str, Params] = {}

    def finish_updates(self) -> None:
        """Do nothing: nothing is updated."""

    def weights_slab(self, home: FileTensor) -> torch.Tensor:
        """Return a tensor's elements in one row."""
        return self._files.read(home.full_name).flatten()

    def unit_params(self, unit: Unit) -> tuple[Params, bool]:
        """Return a unit's parameters on the device, and whether they will be read again the next time."""
        if unit.name in self._kept:
            return self._kept[unit.name], False
        params = {name: self._read(unit, name) for name in unit.params}
        need_bytes = sum(tensor.numel() * tensor.element_size() for tensor in params.values())
        if need_bytes > self._room_bytes:
            return params, True
        self._room_bytes -= need_bytes
        self._kept[unit.name] = params
        return params, False

    def _read(self, unit: Unit, name: str) -> torch.Tensor:
        spec = unit.params[name]
        if unit is self.model.head and name in self.model.tied:
            spec = self.model.embed.params[self.model.tied[name]]
        return self._files.read(spec.full_name).to(self.device, self.dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the exact match; return 0, 2 after an error, or 130 or 143 after a signal."""
    options, out = _parse(arguments)
    try:
        with GracefulStop() as stop:
            score = run(options, out, stop)
        if score is None:
            print("stopped" if stop.requested else "no problems to evaluate: --eval-limit is 0", file=sys.stderr)
            return stop.exit_code
        print(score.describe())
        for kind, counts in score.by_type.items():
            print(f"  {kind}: {counts.exact_match:.1%} of {counts.total:,}")
        return 0
    except (LazyTrainError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 2


def run(options: Options, out: Path, stop: GracefulStop) -> Score | None:
    """Answer the rows and judge the answers; write `samples.jsonl` and `score.json` to `out`. None after a signal."""
    with stop.at_once():
        make_directory(out, "--out")
        job = open_job(options)
        device, dtype = choose_device(options, lambda line: print(line, file=sys.stderr))
        limits = default_limits(device, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
        room_bytes = int(limits["device"] * WEIGHTS_SHARE)
        engine = FileEngine(job.model, job.model_dir, device, dtype, room_bytes)
        state = TrainState(step=0, num_updates=0, seed=0, engine=cast(Engine, engine))
    start_s = time.perf_counter()
    score = evaluate(state, job, options, f"of {options.model}", out / "samples.jsonl", stop)
    if score is None:
        return None
    numbers = {"model": str(options.model), "data": options.data, "seconds": time.perf_counter() - start_s}
    numbers |= {name: getattr(score, name) for name in ("exact_match", "correct", "wrong", "no_answer", "total")}
    (out / "score.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return score


def open_job(options: Options) -> Job:
    """Open model, tokenizer and rows; there is no training stream."""
    assert options.model is not None
    assert options.data is not None
    settings = resolve_settings(options)
    config = load_config(options.model)
    files, model = open_model_dir(options.model), transformer_model(config)
    for note in check_params(model, files):
        print(f"model: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(options.model)
    special = read_special_tokens(options.model, tokenizer)
    prompt: Prompt | ChatTemplate
    if settings.prompt == "chat":
        prompt = load_chat_template(options.model, tokenizer)
        special = replace(special, stop_ids=tuple(sorted({*special.stop_ids, *prompt.stop_ids})))
    else:
        prompt = get_prompt(settings.prompt)
    loaded = load_rows(
        options.data,
        split="test",
        query_field=options.query_field,
        response_field=options.response_field,
        messages_field=options.messages_field,
    )
    print(f"rows: {loaded.report.describe()} of {options.data}", file=sys.stderr)
    return Job(
        settings=settings,
        model_dir=files,
        config=config,
        model=model,
        tokenizer=tokenizer,
        special=special,
        prompt=prompt,
        stream=cast(BatchStream, None),
        held_out=sample_rows(loaded.rows, options.eval_limit, options.seed),
        num_steps=0,
    )


def _parse(arguments: Sequence[str] | None) -> tuple[Options, Path]:
    """Return the options as the recipe has them, so that its functions serve here too, and where to write."""
    parser = OneLineParser(
        prog="lazytrain eval",
        description="Exact match of a model directory on rows, measured as the recipe does after training.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, required=True, help="HF model directory")
    parser.add_argument("--data", required=True, help="rows: JSON, JSONL, parquet, a directory of them, or a hub name")
    parser.add_argument("--query-field", help="column of the problem (default: query, question or instruction)")
    parser.add_argument("--response-field", help="column of the solution (default: response, answer or output)")
    parser.add_argument("--messages-field", help="column of a chat's turns (default: messages or conversations)")
    parser.add_argument(
        "--seed", type=parse_whole, default=0, help="draws the rows of --eval-limit (default: %(default)s)"
    )
    parser.add_argument("--prompt", choices=(*PROMPTS, "chat"), help="prompt style (default: metamath)")
    parser.add_argument("--out", type=Path, default=Path("runs/eval"), help="where to write (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU that has it")
    parser.add_argument("--gpu-memory", type=parse_size, help="device memory to fill at most, for example 24GiB")
    add_evaluation(parser.add_argument_group("evaluation"), before=False)
    given = vars(parser.parse_args(arguments))
    defaults: dict[str, object] = vars(make_parser().parse_args([]))
    del defaults["config"]
    return Options(**{**defaults, **given}), given["out"]  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
