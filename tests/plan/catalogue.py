"""Plans of every recipe on every profile, each made once for all tests that look at them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from optforge import config
from optforge.errors import UserError
from optforge.plan import compatibility
from optforge.plan.make import Plan, make

RECIPES, HARDWARE = compatibility.recipes(), compatibility.hardware()
composed = cache(compatibility.composed)


@cache
def planned(recipe: str, hardware: str) -> Plan | UserError:
    """The plan on the small model that the recipe is for, or why there is none."""
    try:
        return make(replace(composed(recipe), hardware=config.hardware(hardware)), executes=False)
    except UserError as error:
        return error
