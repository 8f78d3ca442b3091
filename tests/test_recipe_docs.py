"""docs/recipe.md and docs/troubleshooting.md name what there is, and nothing else."""

import re
from pathlib import Path

import pytest

from lazytrain.recipes.command import COMMANDS
from lazytrain.recipes.options import make_parser, parse_options

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECIPE, TROUBLE = (DOCS / f"{name}.md" for name in ("recipe", "troubleshooting"))
# Flags of the other commands and programs, of docker, and a mistyped one.
OTHERS = {"--to", "--json", "--size", "--help", "--explain", "--hardware", "--batch", "--seq"}
OTHERS |= {"--optimizers", "--forward", "--seeds"}
FOREIGN = {"--gpus", "--ulimit", "--bach-size"}


def known_flags() -> set[str]:
    return {flag for action in make_parser()._actions for flag in action.option_strings if flag.startswith("--")}


def named_flags(path: Path) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))


def test_every_flag_is_described() -> None:
    shown = {flag for flag in known_flags() if not flag.startswith("--no-")} - {"--help"}
    assert shown - named_flags(RECIPE) == set()


@pytest.mark.parametrize("path", [RECIPE, TROUBLE], ids=lambda path: path.stem)
def test_no_page_names_a_flag_that_there_is_not(path: Path) -> None:
    assert named_flags(path) - known_flags() - OTHERS - FOREIGN == set()


def test_every_command_is_described() -> None:
    assert set(re.findall(r"`lazytrain (\w+)`", RECIPE.read_text())) == set(COMMANDS)


def test_the_example_of_a_config_file_can_be_read(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    assert example is not None
    path = tmp_path / "run.toml"
    path.write_text(example[1])
    options = parse_options(["--config", str(path)])
    assert (options.batch_size, options.packing, options.gpu_memory) == (32, True, 24 * 2**30)


@pytest.mark.parametrize("path", [RECIPE, TROUBLE], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (DOCS / target).exists(), target


def test_quoted_messages_are_the_codes_own() -> None:
    sources = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for room in ("recipes", "lazytrain", "kernels", "solver")
        for path in sorted((ROOT / room).glob("*.py"))
    )
    for phrase in (
        "is not a directory. Give the directory of a model",
        "is in use by",
        "is no directory to write in",
        "exists and is not an export of LazyTrain",
        "the C++ optimizer operator is not available",
        "torch.compile failed, so blocks run eagerly",
        "no row is left of",
        "no column",
        "no end-of-sequence token",
        "step skipped",
        "steps in a row were skipped",
        "Skipping a broken checkpoint",
        "has no valid checkpoint",
        "can't start",
        "was saved with",
        "since a GPU of capability",
        "torch finds no GPU here",
        "the score before training is left out",
        "digest of the training rows",
        "digest of the model's config",
    ):
        assert phrase in sources, phrase
        assert phrase in TROUBLE.read_text(), phrase
