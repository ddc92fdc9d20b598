"""Every shipped recipe is studied on every hardware profile, on a machine that has none of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from catalogue import HARDWARE, RECIPES, planned

from optforge.errors import UserError
from optforge.plan.document import PlanFile
from optforge.plan.study import study
from optforge.report import plan_markdown, schema


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_studied_on_every_profile(recipe: str, hardware: str) -> None:
    plan = planned(recipe, hardware)
    assert not isinstance(plan, UserError), plan
    assert [step.name for step in plan.steps] == [step.name for step in plan.run.recipe.steps]
    assert all(step.receipt.touched for step in plan.steps)
    found = study(plan, kernels=False, xla=False)
    assert found.speed is not None and found.fit is not None
    assert found.speed.label == found.fit.label == "predicted"
    if plan.target.peak_flops:
        linked = plan.target.link_bytes_per_s is not None  # what devices send one another takes an unknown time otherwise
        known = [row.latency_ms for row in found.speed.rows if linked or row.devices == 1]
        assert all(latency is not None and latency > 0 for latency in known)
        assert (found.verdict.gain is None) == (len(known) < len(found.speed.rows)), "no gain is promised where a row is unknown"
    if plan.target.memory_bytes:
        assert found.fit.fits is True, "two layers fit everywhere"
    else:
        assert found.fit.fits is None and "memory_bytes" in found.verdict.fit
    for downgrade in plan.downgrades:
        assert plan.target.name in downgrade.reason
        assert bool(downgrade.alternatives) == downgrade.requested.startswith("quantize/")
    document = json.loads(json.dumps(PlanFile(plans=[found]).describe(), allow_nan=False))
    jsonschema.validate(document, schema.plan_schema())
    assert all(math.isfinite(figure) for figure in _figures(document))
    assert found.verdict.sentence in plan_markdown.render(PlanFile(plans=[found])).replace("\\", "")


def _figures(node: Any) -> Iterator[float]:
    if isinstance(node, float):
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _figures(child)
