from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from onptq.errors import OnPTQError
from onptq.overrides import difference, flatten, parse_override
from onptq.recipe import PRESETS, BranchConfig, CalibrateConfig, Recipe, method_names
from onptq.registry import LOSS_TERMS, METHODS


def fields_without_description(model: Any = Recipe, prefix: str = "") -> list[str]:
    missing = []
    for name, field in model.model_fields.items():
        if hasattr(type(field.default), "model_fields"):
            assert type(field.default).__doc__
            missing += fields_without_description(type(field.default), f"{prefix}{name}.")
        elif not field.description:
            missing.append(prefix + name)
    return missing


def test_every_field_says_what_it_means() -> None:
    assert fields_without_description() == []


def test_default_preset_is_the_default_of_every_field() -> None:
    assert Recipe.preset("default") == Recipe()


def test_paper_preset_has_the_papers_numbers() -> None:
    recipe = Recipe.preset("paper")
    assert (recipe.data.prompts, recipe.follow.max_tokens, recipe.rounds, recipe.refresh) == (128, 64, 2, True)
    assert (recipe.branch.horizon, recipe.select.budget) == (4, 256)
    assert (recipe.risk.branch_weight, recipe.risk.divergence_weight, recipe.calibrate.gamma) == (1.0, 1.0, 0.2)
    assert (recipe.calibrate.normalize, recipe.data.holdout_share) == ("none", 0.0)


def test_the_presets_learn_by_the_response_kl_alone_and_pay_for_no_branch_but_risk_and_paper() -> None:
    for name in ("light", "default", "best", "zoo"):
        recipe = Recipe.preset(name)
        calibrate = recipe.calibrate
        assert (calibrate.hidden, calibrate.pair, calibrate.response, calibrate.response_over) == (0, 0, 10, "visited")
        assert not recipe.branches
    risk, paper = Recipe.preset("risk"), Recipe.preset("paper")
    assert (risk.branches, risk.calibrate.hidden, risk.calibrate.pair) == (True, 1, 0.02)
    assert (paper.branches, paper.calibrate.hidden, paper.calibrate.pair, paper.calibrate.response) == (True, 1, 1, 1)
    assert risk.with_overrides({"calibrate.hidden": 0, "calibrate.pair": 0}) == Recipe.preset("default")


def test_light_is_less_work_and_best_is_more_than_default() -> None:
    light, default, best = (Recipe.preset(name) for name in ("light", "default", "best"))
    assert light.data.prompts < default.data.prompts < best.data.prompts
    assert light.data.holdout < default.data.holdout < best.data.holdout
    assert light.follow.max_tokens < default.follow.max_tokens <= best.follow.max_tokens
    assert light.select.budget < default.select.budget <= best.select.budget
    assert light.calibrate.epochs < default.calibrate.epochs <= best.calibrate.epochs
    assert (default.calibrate.codes, best.calibrate.codes) == ("settled", "learned")
    assert light.rounds <= default.rounds <= best.rounds


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_file_opens_with_the_command_that_runs_it(name: str) -> None:
    import onptq.recipe

    text = (Path(onptq.recipe.__file__).parent / "presets" / f"{name}.yaml").read_text()
    assert text.startswith("# onptq quantize MODEL ")
    assert f"--preset {name} " in text.splitlines()[0]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("comments", [False, True])
def test_a_recipe_reads_back_from_its_yaml(name: str, comments: bool, tmp_path: Path) -> None:
    recipe = Recipe.preset(name, ["scheme=w4a16-g128", "seed=7"])
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(comments=comments))
    assert Recipe.from_yaml(path) == recipe


def test_the_record_of_a_run_is_a_recipe_file_too(tmp_path: Path) -> None:
    recipe = Recipe.preset("light", ["rounds=3"])
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"recipe": recipe.model_dump(), "model": {"sha256": "x"}}))
    assert Recipe.from_yaml(path) == recipe


def test_overrides_come_as_texts_as_dotted_names_or_nested() -> None:
    expected = Recipe(branch=BranchConfig(horizon=8), seed=3)
    for overrides in (
        ["branch.horizon=8", "seed=3"],
        {"branch.horizon": 8, "seed": 3},
        {"branch": {"horizon": 8}, "seed": 3},
    ):
        assert Recipe.preset("default", overrides) == expected
        assert Recipe().with_overrides(overrides) == expected


def test_the_last_override_wins_and_an_empty_section_changes_nothing() -> None:
    assert Recipe.preset("default", ["rounds=1", "rounds=5"]).rounds == 5
    assert Recipe.preset("paper", {"calibrate": {}}) == Recipe.preset("paper")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("branch.horizon=8", 8),
        ("select.per_prompt=null", None),
        ("compute.device=cuda:1", "cuda:1"),
        ("refresh=false", False),
        (" a . b = c=d ", "c=d"),
    ],
)
def test_an_override_value_is_yaml(text: str, value: object) -> None:
    assert parse_override(text)[1] == value


@pytest.mark.parametrize("text", ["rounds", "rounds=", "=3", "rounds={"])
def test_an_unreadable_override_is_shown(text: str) -> None:
    with pytest.raises(OnPTQError, match=r"override '.*'"):
        parse_override(text)


def test_a_float_may_be_written_with_an_exponent() -> None:
    assert Recipe.preset("default", ["calibrate.lr_step=1e-3"]).calibrate.lr_step == 1e-3


def test_the_scheme_is_normalised() -> None:
    assert Recipe(scheme="w4a16-G64").scheme == "W4A16-g64"


def test_static_means_gamma_zero_and_rtn_means_no_round() -> None:
    for preset in PRESETS:
        assert Recipe.preset(preset, ["method=static"]).calibrate.gamma == 0
        rtn = Recipe.preset(preset, ["method=rtn"])
        assert (rtn.rounds, rtn.init) == (0, "rtn")
    assert "gamma: 0.0" in Recipe(method="static").to_yaml()


def test_static_differs_from_onptq_in_gamma_alone() -> None:
    onptq, static = Recipe.preset("paper"), Recipe.preset("paper", ["method=static"])
    assert difference(onptq.model_dump(), static.model_dump()) == [
        "method: 'onptq' -> 'static'",
        "calibrate.gamma: 0.2 -> 0.0",
    ]


def test_leaving_a_method_leaves_what_it_implied() -> None:
    for method in method_names():
        assert Recipe(method=method).with_overrides(["method=onptq"]) == Recipe()


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=static", "calibrate.gamma=0.3"],
        ["method=rtn", "rounds=1"],
        ["method=rtn", "init=search"],
        ["method=gptq", "rounds=1"],
        ["method=uniform", "select.rule=risk"],
    ],
)
def test_a_field_that_contradicts_the_method_is_refused(overrides: list[str]) -> None:
    with pytest.raises(OnPTQError, match=overrides[1]):
        Recipe.preset("default", overrides)


def test_a_section_object_that_contradicts_the_method_is_refused_and_a_default_one_is_not() -> None:
    with pytest.raises(OnPTQError, match=r"gamma=0\.5"):
        Recipe(method="static", calibrate=CalibrateConfig(gamma=0.5))
    assert Recipe(method="static", calibrate=CalibrateConfig(epochs=1)).calibrate.gamma == 0


@pytest.mark.parametrize(
    ("override", "field", "hint"),
    [
        ("branch.horizn=8", "branch.horizn", "did you mean branch.horizon?"),
        ("brnch.horizon=8", "brnch.horizon", "did you mean branch.horizon?"),
        ("horizon=8", "horizon", "did you mean branch.horizon?"),
        ("zzz=8", "zzz", "valid fields: scheme, method"),
        ("branch.zzz=8", "branch.zzz", "valid fields of branch: horizon, eos_as_max"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(override: str, field: str, hint: str) -> None:
    with pytest.raises(OnPTQError) as caught:
        Recipe.preset("default", [override])
    assert f"unknown field {field!r}" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("branch.horizon=0", "branch.horizon = 0: input should be greater than or equal to 1"),
        ("branch.horizon=2.5", "branch.horizon = 2.5: input should be a valid integer"),
        ("rounds=true", "rounds = True: input should be a valid integer"),
        ("calibrate.gamma=true", "calibrate.gamma = True: input should be a valid number"),
        ("calibrate.gamma=-1", "calibrate.gamma = -1: input should be greater than or equal to 0"),
        ("risk.branch_weight=.nan", "risk.branch_weight = nan: input should be a finite number"),
        ("risk.divergence=tv", "risk.divergence = 'tv': input should be 'js' or 'kl'"),
        ("method=gtpq", "method = 'gtpq': unknown method (did you mean gptq?); expected one of onptq, static, uniform"),
        ("init=static", "init = 'static': unknown base method 'static'"),
        ("select.rule=best", "select.rule = 'best': unknown selection rule 'best'; expected one of risk, all"),
        ("calibrate.terms.mine=1", "unknown loss term 'mine'"),
        ("select.per_prompt=none", "select.per_prompt = 'none': input should be a valid integer or null"),
        ("compute.device=tpu", "compute.device = 'tpu': expected auto, cpu, cuda or cuda:N"),
        ("scheme=int4", "scheme = 'int4': unknown scheme 'int4': expected one of W4A16, W8A8, W4A8, W4A6"),
        ("branch=8", "branch = 8: expected a section with the fields horizon, eos_as_max"),
        ("data.holdout_share=0.9", "data.holdout_share = 0.9: input should be less than or equal to 0.5"),
    ],
)
def test_an_invalid_value_names_the_field_what_was_given_and_what_is_valid(override: str, expected: str) -> None:
    with pytest.raises(OnPTQError) as caught:
        Recipe.preset("default", [override])
    assert expected in str(caught.value)


def test_all_errors_of_a_recipe_are_shown_together() -> None:
    with pytest.raises(OnPTQError) as caught:
        Recipe.preset("default", ["branch.horizon=0", "risk.divergence=tv", "zzz=1"])
    for part in ("branch.horizon = 0", "risk.divergence = 'tv'", "unknown field 'zzz'"):
        assert part in str(caught.value)


def test_a_section_alone_explains_its_errors_too() -> None:
    with pytest.raises(OnPTQError, match="horizon = 0"):
        BranchConfig(horizon=0)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(
        OnPTQError, match=r"'papper' \(did you mean paper\?\); valid: light, default, best, risk, paper"
    ):
        Recipe.preset("papper")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_recipe_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(OnPTQError, match=r"recipe\.yaml"):
        Recipe.from_yaml(path)


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"nowhere\.yaml"):
        Recipe.from_yaml(tmp_path / "nowhere.yaml")


def test_a_recipe_cannot_be_changed_in_place() -> None:
    with pytest.raises(Exception, match="frozen"):
        Recipe().rounds = 3  # type: ignore[misc]


def test_difference_names_changed_added_and_removed_leaves() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": [1]}
    after = {"a": {"b": 1, "c": 3}, "e": None}
    assert difference(before, after) == ["a.c: 2 -> 3", "d: [1] -> (absent)", "e: (absent) -> None"]
    assert difference(before, before) == []
    assert flatten({"a": {"b": {"c": 1}}, "e": {}}) == {"a.b.c": 1, "e": {}}


def test_every_base_method_can_be_the_init_and_a_method_of_its_own() -> None:
    assert {Recipe(init=name).init for name in METHODS} == set(METHODS)
    for name in METHODS:
        alone = Recipe(method=name)
        assert (alone.init, alone.rounds) == (name, 0)
    names = method_names()
    assert {"onptq", "static", "uniform", *METHODS} <= set(names)
    assert len(names) == len(set(names))
    for name in names:
        assert Recipe.preset("paper", [f"method={name}"]).method == name


def test_uniform_selects_every_state_and_differs_from_onptq_in_that_alone() -> None:
    onptq, uniform = Recipe.preset("paper"), Recipe.preset("paper", ["method=uniform"])
    assert difference(onptq.model_dump(), uniform.model_dump()) == [
        "method: 'onptq' -> 'uniform'",
        "select.rule: 'risk' -> 'all'",
    ]
    with pytest.raises(OnPTQError, match=r"method=uniform means select\.rule=all"):
        Recipe.preset("default", ["method=uniform", "select.rule=random"])


def test_codes_are_free_settled_or_learned() -> None:
    for codes in ("free", "settled", "learned"):
        assert Recipe.preset("best", [f"calibrate.codes={codes}"]).calibrate.codes == codes
    with pytest.raises(OnPTQError, match=r"calibrate\.codes.*'free', 'settled' or 'learned'"):
        Recipe.preset("best", ["calibrate.codes=frozen"])
    with pytest.raises(OnPTQError, match=r"calibrate\.rounding"):
        Recipe.preset("best", ["calibrate.rounding=true"])


def test_the_response_is_taken_over_critical_or_visited_states() -> None:
    for states in ("critical", "visited"):
        assert Recipe.preset("best", [f"calibrate.response_over={states}"]).calibrate.response_over == states
    with pytest.raises(OnPTQError, match=r"calibrate\.response_over.*'critical' or 'visited'"):
        Recipe.preset("best", ["calibrate.response_over=all"])
    assert Recipe.preset("paper").calibrate.response_over == "critical", "Eq. 17 as it is written"


def test_a_registered_loss_term_has_a_weight_and_is_absent_from_recipes_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOSS_TERMS, "_registered", {"mine": lambda *_: None})
    assert Recipe.preset("default", ["calibrate.terms.mine=2"]).calibrate.terms == {"mine": 2.0}
    with pytest.raises(OnPTQError, match="the weight of mine should be 0 or more, got -1"):
        Recipe.preset("default", ["calibrate.terms.mine=-1"])
    assert "terms" not in Recipe().model_dump()["calibrate"]


def test_a_recipe_that_does_not_match_the_pair_weight_reads_as_before_there_was_a_choice() -> None:
    for preset in PRESETS:
        assert "pair_matched" not in Recipe.preset(preset).model_dump()["calibrate"]
    assert Recipe.preset("best", ["calibrate.pair_matched=true"]).model_dump()["calibrate"]["pair_matched"] is True


def test_a_largest_consequence_needs_a_divergence_that_has_one() -> None:
    for name in ("eos_as_max", "count_forced"):
        assert getattr(Recipe.preset("default", {f"branch.{name}": True}).branch, name)
        with pytest.raises(OnPTQError, match=rf"branch\.{name} needs .* expected risk\.divergence=js"):
            Recipe.preset("default", {f"branch.{name}": True, "risk.divergence": "kl"})
