"""The settings in force of a run: what was asked for, with the defaults that fit the model filled in."""

from typing import Any

from lazytrain.recipes.config_file import format_config
from lazytrain.recipes.options import Options, make_parser
from lazytrain.recipes.preparation import resolve_settings

RENAMED = {"steps": "num_steps", "warmup_steps": "num_warmup_steps"}


def effective_values(options: Options) -> dict[str, Any]:
    """Return setting -> value; None is left where the run itself decides, by model, data and machine."""
    settings = resolve_settings(options)
    values = vars(options).copy()
    for name, value in values.items():
        if value is None:
            values[name] = getattr(settings, RENAMED.get(name, name), None)
    # A step's rows are the flag's, times --accumulate where there is such a flag.
    values["batch_size"] = settings.batch_size // getattr(options, "accumulate", 1)
    if values["steps"] is not None:
        values["epochs"] = options.epochs  # steps decide
    return values


def effective_config(options: Options) -> str:
    """Return the settings in force as TOML for --config: the same run again, whatever defaults become later."""
    return format_config(make_parser(), effective_values(options))
