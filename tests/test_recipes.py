"""Every recipe is a configuration that this version takes."""

from pathlib import Path

import pytest

from gru_ref import config as configuration
from gru_ref import plan

RECIPES = sorted((Path(__file__).parent.parent / "docs" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_a_valid_configuration_of_the_size_it_says(recipe):
    config = configuration.load(file=recipe).replace("model", vocab_size=100)
    count = sum(row.count for row in plan.parameters(config))
    assert f"{count:,} parameters" in (recipe.parent / "tinyshakespeare.md").read_text("utf-8")
