"""YAML and a command line in, a checked `Run` out. The only place that knows Hydra and OmegaConf.

    paths     where option files lie, and what can be chosen
    schema    plain data against the types of a dataclass
    origins   where each value came from
    steps     a recipe's steps, their defaults filled in
    build     a composed mapping to a `Run`, every problem at once
    store     recipes and saved runs as options of Hydra's
    saved     a resolved run as one file, and back
    flags     which words of a command line are flags
    argv      its overrides, rewritten for Hydra
    compose   Hydra composes, `build` checks

Recipes are read by `optforge.recipe`, which knows neither. Reading a configuration loads no torch.
"""

from optforge.config.argv import choices, parse
from optforge.config.build import hardware
from optforge.config.compose import CONFIG_NAME, CONFIG_PATH, compose, compose_all, jobs_of, recipe, run_from_cfg, searches
from optforge.config.flags import Arguments
from optforge.config.paths import Option, conf_dir, options, recipes_dir
from optforge.config.saved import run_from_yaml, to_yaml
from optforge.config.steps import step

__all__ = [
    "CONFIG_NAME",
    "CONFIG_PATH",
    "Arguments",
    "Option",
    "choices",
    "compose",
    "compose_all",
    "conf_dir",
    "hardware",
    "jobs_of",
    "options",
    "parse",
    "recipe",
    "recipes_dir",
    "run_from_cfg",
    "run_from_yaml",
    "searches",
    "step",
    "to_yaml",
]
