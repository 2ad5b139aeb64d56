"""`onptq inspect --fix`: the copy loads in transformers and answers about an image as the undamaged checkpoint does."""

from __future__ import annotations

import io
import json
import resource
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from checkpoint_models import Checkpoints, copied, defects, edited, exact_names, rewrite, run, set_ignore
from test_inspect_defects import break_index, leave_out, lose_index, misplace, shard_names, store_twice
from torch import Tensor

from onptq.check.fix import fix_folder, ignore_patterns
from onptq.check.inspected import Linear, open_inspected
from onptq.check.static import inspect_folder
from onptq.checkpoint.folder import INDEX
from onptq.models import FAMILIES

STORED = (
    torch.bfloat16
)  # transformers 5.17 unpacks renamed tensors in the dtype they are stored in, whatever is asked for
# What a checkpoint with a defect does instead of answering, by transformers' choice of exceptions.
BROKEN = (RuntimeError, ValueError, KeyError, OSError, TypeError, AttributeError)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("inspect"))


def answer(folder: Path, family: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits as anybody gets them: from_pretrained, with no knowledge of what the folder holds."""
    import transformers

    quiet = redirect_stderr(io.StringIO())
    with warnings.catch_warnings(), quiet, torch.inference_mode():
        warnings.simplefilter("ignore")
        model = getattr(transformers, FAMILIES[family].model_class).from_pretrained(
            folder, dtype=STORED, local_files_only=True
        )
        placed = {name: value.to(STORED) if value.is_floating_point() else value for name, value in inputs.items()}
        logits: Tensor = model(**placed, use_cache=False).logits
    return logits


def is_wrong(folder: Path, family: str, inputs: Mapping[str, Tensor], right: Tensor) -> bool:
    try:
        got = answer(folder, family, inputs)
    except BROKEN:
        return True
    return not torch.equal(got, right)


@pytest.mark.parametrize(
    ("family", "scheme"), [("qwen2.5-vl", "W8A8"), ("qwen2.5-omni", "W4A16"), ("qwen2.5-vl", "W4A8")]
)
def test_an_ignore_list_of_names_on_disk_is_fixed(
    checkpoints: Checkpoints, family: str, scheme: str, tmp_path: Path
) -> None:
    sound, inputs = checkpoints.exported(family, scheme), checkpoints.inputs(family)
    right = answer(sound, family, inputs)
    assert torch.isfinite(right).all()
    folder = copied(sound, tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    assert is_wrong(folder, family, inputs, right), "with an image the defect shows"

    fixed = fix_folder(folder, tmp_path / "out")
    assert [defect.name for defect in fixed.before.defects] == ["ignored-under-other-names"]
    assert fixed.after.defects == ()
    assert torch.equal(answer(tmp_path / "out", family, inputs), right)


def test_the_defect_hides_from_a_text_only_test(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    sound, image = checkpoints.exported("qwen2.5-vl", "W8A8"), checkpoints.inputs("qwen2.5-vl")
    text = {"input_ids": torch.arange(300, 308)[None]}
    assert not is_wrong(folder, "qwen2.5-vl", text, answer(sound, "qwen2.5-vl", text))
    assert is_wrong(folder, "qwen2.5-vl", image, answer(sound, "qwen2.5-vl", image))


@pytest.mark.parametrize(
    "ignore", [["lm_head", "re:model\\.visual\\..*"], ["re:.*lm_head", "re:.*visual.*", "re:.*mlp.*"]]
)
def test_other_wrong_ignore_lists_are_fixed(checkpoints: Checkpoints, ignore: list[str], tmp_path: Path) -> None:
    sound, inputs = checkpoints.exported("qwen2.5-vl", "W4A16"), checkpoints.inputs("qwen2.5-vl")
    folder = copied(sound, tmp_path / "it")
    set_ignore(folder, ignore)
    assert defects(folder) != []
    fixed = fix_folder(folder, tmp_path / "out")
    assert fixed.after.defects == ()
    assert torch.equal(answer(tmp_path / "out", "qwen2.5-vl", inputs), answer(sound, "qwen2.5-vl", inputs))


def test_a_single_dense_linear_among_quantized_ones_keeps_being_ignored(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    sound, inputs, name = (
        checkpoints.exported("qwen2.5-vl", "W8A8"),
        checkpoints.inputs("qwen2.5-vl"),
        "model.layers.1.mlp.up_proj",
    )
    folder = copied(sound, tmp_path / "it")

    def make_dense(tensors: dict[str, Tensor]) -> None:
        scale = tensors.pop(f"{name}.weight_scale")
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(scale.dtype) * scale

    rewrite(folder, make_dense)
    set_ignore(folder, exact_names(folder))
    assert name in exact_names(folder)
    fixed = fix_folder(folder, tmp_path / "out")
    assert fixed.after.defects == ()
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == [r"re:.*visual\..*", r"re:(.*\.)?layers\.1\.mlp\.up_proj$", "re:.*lm_head"]
    assert torch.isfinite(answer(tmp_path / "out", "qwen2.5-vl", inputs)).all()


def test_targets_under_their_names_on_disk_are_fixed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    sound, inputs = checkpoints.exported("qwen2.5-vl", "W8A8"), checkpoints.inputs("qwen2.5-vl")
    right = answer(sound, "qwen2.5-vl", inputs)
    folder = copied(sound, tmp_path / "it")
    with edited(folder / "config.json") as config:
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:model\\.layers\\..*_proj"]
    assert defects(folder) == ["quantized-but-ignored"]
    assert is_wrong(folder, "qwen2.5-vl", inputs, right)
    fixed = fix_folder(folder, tmp_path / "out")
    assert fixed.after.defects == ()
    assert torch.equal(answer(tmp_path / "out", "qwen2.5-vl", inputs), right)


def test_patterns_cover_all_names_of_dense_modules_and_none_of_quantized_ones(checkpoints: Checkpoints) -> None:
    import re

    for family in ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni", "llama"):
        inspected = open_inspected(checkpoints.exported(family, "W4A8"))
        patterns = [pattern.removeprefix("re:") for pattern in ignore_patterns(inspected)]
        for linear in inspected.linears.values():
            for name in linear.names:
                assert any(re.match(pattern, name) for pattern in patterns) == (linear.storage is None), name


def test_a_family_that_nobody_knows_gets_patterns_of_its_own(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from dataclasses import replace

    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    inspected = open_inspected(folder)
    unknown = replace(
        inspected,
        checkpoint=replace(inspected.checkpoint, config=inspected.checkpoint.config | {"model_type": "other"}),
    )
    assert unknown.family is None
    assert ignore_patterns(unknown) == [r"re:.*visual\..*", "re:.*lm_head"]


@pytest.mark.parametrize("place", ["", "thinker_config"])
def test_the_other_half_of_an_omni_config_gets_its_quantization(
    checkpoints: Checkpoints, place: str, tmp_path: Path
) -> None:
    sound, inputs = checkpoints.exported("qwen2.5-omni", "W8A8"), checkpoints.inputs("qwen2.5-omni")
    folder = copied(sound, tmp_path / "it")
    with edited(folder / "config.json") as config:
        del (config[place] if place else config)["quantization_config"]
    right = answer(sound, "qwen2.5-omni", inputs)
    if place == "thinker_config":
        assert is_wrong(folder, "qwen2.5-omni", inputs, right), "the thinker class reads its own part only"
    fixed = fix_folder(folder, tmp_path / "out")
    assert fixed.after.defects == ()
    assert torch.equal(answer(tmp_path / "out", "qwen2.5-omni", inputs), right)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((sound / "config.json").read_text())


@pytest.mark.parametrize("damage", [lose_index, break_index, misplace, leave_out])
def test_a_wrong_index_is_rebuilt(checkpoints: Checkpoints, damage: Callable[[Path], None], tmp_path: Path) -> None:
    sound, inputs = checkpoints.exported("qwen2.5-vl", "W4A16", shard_bytes=200_000), checkpoints.inputs("qwen2.5-vl")
    right = answer(sound, "qwen2.5-vl", inputs)
    folder = copied(sound, tmp_path / "it")
    damage(folder)
    # transformers takes what the named shards hold, wherever the index says each tensor is.
    assert is_wrong(folder, "qwen2.5-vl", inputs, right) == (damage in (lose_index, break_index))
    fixed = fix_folder(folder, tmp_path / "out")
    assert fixed.after.defects == ()
    assert torch.equal(answer(tmp_path / "out", "qwen2.5-vl", inputs), right)
    rebuilt, original = (json.loads((path / INDEX).read_text()) for path in (tmp_path / "out", sound))
    assert rebuilt == original


def test_the_dtype_of_the_tensors_is_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    sound = checkpoints.exported("qwen3-vl", "W4A16")
    folder = copied(sound, tmp_path / "it")
    with edited(folder / "config.json") as config:
        config[next(key for key in ("dtype", "torch_dtype") if key in config)] = "float32"
    assert fix_folder(folder, tmp_path / "out").after.defects == ()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((sound / "config.json").read_text())


def test_everything_else_is_copied_as_it_is_and_the_source_is_left_alone(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = copied(checkpoints.exported("qwen2.5-omni", "W8A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    fix_folder(folder, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name for name in before if before[name] != after.get(name)} == {"config.json"}
    assert set(after) == set(before)
    assert "spk_dict.pt" in after


def test_what_cannot_be_fixed_is_left_and_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    (folder / "preprocessor_config.json").unlink()
    result = run(folder, "--fix", tmp_path / "out")
    assert result.exit_code == 1
    assert "left as it is: missing-processor" in result.output
    assert defects(tmp_path / "out") == ["missing-processor"]
    fixed = json.loads(run(folder, "--fix", tmp_path / "out2", "--json").output)["fix"]
    assert [defect["name"] for defect in fixed["left"]] == ["missing-processor"]
    assert len(fixed["changes"]) == 1


def test_an_index_is_not_rebuilt_over_a_loss(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W4A16", shard_bytes=200_000), tmp_path / "it")
    misplace(folder)
    (folder / shard_names(folder)[-1]).write_bytes(b"torn")
    result = run(folder, "--fix", tmp_path / "out")
    assert result.exit_code == 1
    assert "no copy was written" in result.output
    assert not (tmp_path / "out").exists()


def test_an_index_is_not_rebuilt_over_tensors_that_are_stored_twice(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """It would choose one of the two, and hide that there are two."""
    folder = copied(checkpoints.exported("qwen2.5-vl", "W4A16", shard_bytes=200_000), tmp_path / "it")
    store_twice(folder)
    leave_out(folder)
    findings = {finding.name: finding.fixable for finding in inspect_folder(folder).defects}
    assert findings == {"wrong-index": False, "tensor-twice": False}
    assert fix_folder(folder, tmp_path / "out").out is None
    assert not (tmp_path / "out").exists()


def test_targets_of_several_groups_are_not_fixed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The files do not say which group a linear belongs to."""
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8"), tmp_path / "it")
    set_ignore(folder, ["re:.*lm_head", "re:.*visual.*", r"re:.*layers\.1\.mlp.*"])
    names = {"quantized-but-ignored", "ignored-on-disk"}
    assert {f.name: f.fixable for f in inspect_folder(folder).defects} == dict.fromkeys(names, True)
    with edited(folder / "config.json") as config:
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = json.loads(json.dumps(groups["group_0"])) | {"targets": [r"re:.*mlp\..*"]}
    assert {f.name: f.fixable for f in inspect_folder(folder).defects} == dict.fromkeys(names, False)
    assert fix_folder(folder, tmp_path / "out").out is None


def test_a_dense_linear_whose_names_end_differently_is_ignored_under_each(checkpoints: Checkpoints) -> None:
    inspected = open_inspected(checkpoints.exported("qwen2.5-vl", "W8A8"))
    usual = ignore_patterns(inspected)
    inspected.linears["head.qkv"] = Linear("head.qkv", ("tail.in_proj",), frozenset({"Linear"}), {}, (8, 8))
    assert set(ignore_patterns(inspected)) == {*usual, "head.qkv", "tail.in_proj"}


def test_a_fixed_checkpoint_exits_with_zero(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W4A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    assert run(folder).exit_code == 1
    result = run(folder, "--fix", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "no defects left" in result.output
    assert run(tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("where", ["itself", "inside", "taken"])
def test_it_never_writes_in_place(checkpoints: Checkpoints, where: str, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W4A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("keep")
    out = {"itself": folder, "inside": folder / "fixed", "taken": tmp_path / "taken"}[where]
    before = sorted(path.name for path in folder.iterdir())
    result = run(folder, "--fix", out)
    assert result.exit_code == 2
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


def test_a_copy_that_failed_does_not_look_complete(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W4A8"), tmp_path / "it")
    set_ignore(folder, exact_names(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # less than a shard
    try:
        result = run(folder, "--fix", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2
    assert "cannot write the checkpoint" in result.output
    assert list((tmp_path / "out").iterdir()) == []
