"""Train the same model with the same batches under several optimizers, and compare what comes out.

    python -m lazytrain.recipes.compare_optimizers finetune --model DIR --data FILE --eval-data FILE [--seeds 0 1 2]
    python -m lazytrain.recipes.compare_optimizers scratch [--steps 2000]
    python -m lazytrain.recipes.compare_optimizers compare OUT/finetune.json...

`finetune`: a trained model on math problems (without --model the embedded ones, whose weights are random): final
training loss, held-out loss, exact match. `scratch`: a model of 34M parameters from random weights, beta2 = 0.999, on
40,000 generated problems (about three epochs), loss over all tokens.

    torch           torch.optim.AdamW, fused: fp32 master and states, bf16 weights for the computation
    8bit, 8bit-24   Adam8bit on bf16 parameters: 8-bit states, master of 32 or 24 bits
    bitsandbytes, torchao       their 8-bit AdamW on fp32 masters, where they can be imported

Plain PyTorch on one device: loss by autograd through the model's blocks (with --forward transformers: that library's
model), mean over the step's target tokens, the norm clipped to 1. `finetune` takes the recipe's rows in the recipe's
order, so that `finetune --optimizers torch --forward transformers` is the main recipe by other code: `losses` in
OUT/finetune.json beside the recipe's metrics.jsonl. `--tiny` is a smoke test.

`compare` puts together what several such programs wrote, each in an --out of its own: one GPU has room for all runs at
once, and one run of a small model is bound by launches.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lazytrain.base import Model
from lazytrain.configuration import parse_config
from lazytrain.errors import ConfigError, DataError, LazyTrainError
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.default_model import END_TOKEN, PAD_TOKEN, make_tokenizer
from lazytrain.recipes.encoding import Encoded, encode_rows
from lazytrain.recipes.failures import make_directory
from lazytrain.recipes.options import parse_options
from lazytrain.recipes.plain_training import KINDS, Outcome, Task, train
from lazytrain.recipes.preparation import prepare
from lazytrain.recipes.prompts import SpecialTokens, get_prompt
from lazytrain.recipes.rows import Row
from lazytrain.recipes.sample import make_sample
from lazytrain.transformer import random_params, transformer_model

SCRATCH_SHARE = 0.005  # how far a loss from scratch may be from torch's
SCRATCH = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SCRATCH_TOKENS, SCRATCH_BATCH, SCRATCH_HELD_OUT = 128, 64, 240
SCRATCH_ROWS = 40_000  # more, or more held-out ones, and the generator runs out of fresh problems


def finetune_task(options: argparse.Namespace, seed: int) -> Task:
    """Prepare a fine-tuning run as the main recipe does."""
    arguments = ["--out", str(options.out), "--seed", str(seed), "--batch-size", str(options.batch_size)]
    for name in ("model", "data", "eval_data", "steps", "epochs", "lr", "max_tokens"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    if options.packing:
        arguments.append("--packing")
    job = prepare(parse_options(arguments), print)
    max_tokens = job.settings.max_tokens
    encoded = encode_rows(job.held_out, job.tokenizer, job.special, job.prompt, max_tokens=max_tokens)
    return Task(
        config=job.config,
        weights=lambda: ((name, job.model_dir.read(name)) for name in names_of(job.model)),
        stream=job.stream,
        held_out=BatchStream(encoded, batch_size=options.batch_size),
        num_steps=job.num_steps,
        lr=job.settings.lr,
        weight_decay=job.settings.weight_decay,
        num_warmup_steps=job.num_warmup_steps,
        job=job,
        reference=job.model_dir.path if options.forward == "transformers" else None,
        dtype=getattr(torch, options.dtype),
    )


def names_of(model: Model) -> list[str]:
    """Return full names in forward order, tied ones once."""
    return list(dict.fromkeys(spec.full_name for unit in model.units for spec in unit.params.values()))


def scratch_task(options: argparse.Namespace, seed: int) -> Task:
    """Make a model with random weights and generated problems; every token is a target."""
    batch_size, held_out = (8, 32) if options.tiny else (SCRATCH_BATCH, SCRATCH_HELD_OUT)
    made = make_sample(seed, num_train=min(SCRATCH_ROWS, options.steps * batch_size), num_held_out=held_out)
    train_rows, held_out_rows = ([Row(**r) for r in rows] for rows in made)  # type: ignore[arg-type]
    tokenizer = make_tokenizer((text for row in train_rows for text in (row.query, row.response)), 1024)
    end, pad = (int(tokenizer.token_to_id(token) or 0) for token in (END_TOKEN, PAD_TOKEN))
    special = SpecialTokens(bos_id=None, eos_id=end, pad_id=pad, stop_ids=(end,), add_bos=False)
    streams = []
    for rows in (train_rows, held_out_rows):
        encoded = encode_rows(rows, tokenizer, special, get_prompt("plain"), max_tokens=SCRATCH_TOKENS)
        streams.append(BatchStream(with_all_targets(encoded), batch_size=batch_size, seed=seed))
    shape = TINY if options.tiny else SCRATCH
    config = parse_config(
        {
            "model_type": "llama",
            "vocab_size": -(-tokenizer.get_vocab_size() // 128) * 128,
            "max_position_embeddings": SCRATCH_TOKENS,
            "tie_word_embeddings": True,
            **shape,
        }
    )
    return Task(
        config=config,
        weights=lambda: random_params(transformer_model(config), seed, torch.float32),
        stream=streams[0],
        held_out=streams[1],
        num_steps=options.steps,
        lr=options.lr or 1e-3,
        weight_decay=0.1,
        num_warmup_steps=max(1, options.steps // 20),
        dtype=getattr(torch, options.dtype),
    )


def with_all_targets(encoded: Encoded) -> Encoded:
    return replace(encoded, prompt_lengths=np.zeros_like(encoded.prompt_lengths))


def describe(outcome: Outcome) -> str:
    exact = "" if outcome.exact_match is None else f"  exact match {outcome.exact_match:6.2%}"
    return (
        f"{outcome.kind:13s} seed {outcome.seed}  train loss {outcome.train_loss:.5f}  held-out loss "
        f"{outcome.held_out_loss:.5f}{exact}  step {outcome.step_ms:.1f} ms, optimizer {outcome.optimizer_ms:.1f} ms, "
        f"states {outcome.state_bytes / 2**20:.0f} MiB"
    )


def compare(command: str, outcomes: list[Outcome]) -> None:
    """Print each optimizer's numbers beside torch's: inside the spread of its seeds, or the relative difference."""
    for kind in dict.fromkeys(o.kind for o in outcomes if o.kind != "torch"):
        for what in ("train_loss", "held_out_loss", "exact_match"):
            known = [(o.kind, o.seed, getattr(o, what)) for o in outcomes if getattr(o, what) is not None]
            theirs = {seed: value for name, seed, value in known if name == "torch"}
            pairs = [(value, theirs[seed]) for name, seed, value in known if name == kind and seed in theirs]
            if not pairs:
                continue
            ours, truth = (statistics.mean(side) for side in zip(*pairs))
            low, high = min(theirs.values()), max(theirs.values())
            line = f"{kind:13s} {what:14s} mean {ours:.5f}, torch {truth:.5f} (seeds {low:.5f} to {high:.5f})"
            if command == "scratch":
                worst = max(abs(a / b - 1) for a, b in pairs)
                verdict = "within" if worst <= SCRATCH_SHARE else "OVER"
                print(f"{line}: at most {worst:.3%} apart, {verdict} {SCRATCH_SHARE:.1%}")
            else:
                print(f"{line}: {'inside' if low <= ours <= high else 'OUTSIDE'} the spread of torch's seeds")


def read_outcomes(paths: list[Path]) -> tuple[str, list[Outcome]]:
    """Return the command that wrote the files, and all their outcomes, in order of kind and seed.

    Raises:
        ConfigError: none given, of different commands, or no such file.
        DataError: a file that this program did not write, or the same run twice.
    """
    commands = sorted({path.stem for path in paths})
    if len(commands) != 1 or commands[0] not in ("finetune", "scratch"):
        raise ConfigError(f"compare takes finetune.json files or scratch.json files, got {', '.join(map(str, paths))}")
    found: dict[tuple[int, int], Outcome] = {}
    for path in paths:
        try:
            rows = [Outcome(**row) for row in json.loads(path.read_text())]
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is not what this program writes: {error}") from error
        for row in rows:
            if row.kind not in KINDS:
                raise DataError(f"{path}: {row.kind!r} is no optimizer. Known are {', '.join(KINDS)}.")
            key = KINDS.index(row.kind), row.seed
            if key in found:
                raise DataError(f"{path}: {row.kind}, seed {row.seed} is in another file, too; name one of the two")
            found[key] = row
    return commands[0], [found[key] for key in sorted(found)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("finetune", "scratch", "compare"))
    parser.add_argument("files", nargs="*", type=Path, help="compare: what the others wrote")
    parser.add_argument("--optimizers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2 (finetune), 0 (scratch)")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--eval-data")
    parser.add_argument("--steps", type=int, help="default: one epoch (finetune), 2000 (scratch)")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, help="finetune: longest row (default: the recipe's)")
    parser.add_argument("--packing", action="store_true", help="finetune: several samples a row, as the recipe packs")
    parser.add_argument("--forward", choices=("blocks", "transformers"), default="blocks", help="finetune: whose model")
    parser.add_argument("--lr", type=float, help="default: 2e-5 for a model, 1e-3 from scratch")
    parser.add_argument("--eval-limit", type=int, help="problems to answer; 0: none; default: all held-out ones")
    parser.add_argument("--eval-batch-size", type=int, help="problems answered at a time; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_optimizers"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what the model computes in"
    )
    parser.add_argument("--tiny", action="store_true", help="few steps of a small model")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or ([0, 1, 2] if options.command == "finetune" else [0])
    if options.tiny:
        options.steps, options.eval_limit = options.steps or 6, 4
    elif options.command == "scratch":
        options.steps = options.steps or 2000
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run all optimizers and seeds, or compare what was run; return the exit code."""
    options = parse(arguments)
    outcomes: list[Outcome] = []
    try:
        if options.command == "compare":
            options.command, outcomes = read_outcomes(options.files)
            for outcome in outcomes:
                print(describe(outcome))
            compare(options.command, outcomes)
            return 0
        make_directory(options.out, "--out")
        for seed in options.seeds:
            task = (finetune_task if options.command == "finetune" else scratch_task)(options, seed)
            for kind in options.optimizers:
                device, rows_at_once, before = torch.device(options.device), options.eval_batch_size, outcomes
                try:
                    for outcome in train(kind, task, seed, device, options.eval_limit, rows_at_once):
                        print(describe(outcome), flush=True)
                        outcomes = [*before, outcome]
                        rows = [o._asdict() for o in outcomes]
                        (options.out / f"{options.command}.json").write_text(json.dumps(rows, indent=1))
                except ImportError as error:
                    print(f"{kind:13s} left out: {error}", flush=True)
    except LazyTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compare(options.command, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
