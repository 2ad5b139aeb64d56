"""The model card: true to the run, runnable, short, and without a trace of the machine it was written on."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

import onptq
from onptq.checkpoint.card import FOLDER, escaped, write_card
from onptq.checkpoint.provenance import BaseModel, Calibration, Estimate, Provenance, Results, Update, find_base
from onptq.data.calibration import Prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Media, Prompt
from onptq.evaluate.model_card import RESULT, read_results
from onptq.page.card_picture import card_picture, results_plot
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

VL = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
HOSTILE = "x```\n<script>alert(1)</script>[a](javascript:b)*_|#"
CHANGES: dict[str, Any] = {
    "rounds": 1,
    "init_steps": 4,
    "data.prompts": 3,
    "data.holdout": 2,
    "follow.max_tokens": 5,
    "calibrate.epochs": 1,
    "compute.device": "cpu",
}


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)  # type: ignore[no-any-return]


def card(folder: Path, scheme: str = "W4A8", config: dict[str, Any] | None = None, **more: Any) -> str:
    return write_card(folder, config or VL, Scheme.parse(scheme), **more)


def example(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return str(code)


# --- base model and license -------------------------------------------------------------------------------------------


def test_license_language_and_purpose_come_from_the_sources_card(tmp_path: Path) -> None:
    stated = "license: other\nlicense_name: research\nlicense_link: https://example.org/L\nlanguage: [en, de]\n"
    (tmp_path / "README.md").write_text(f"---\n{stated}tags: [a]\n---\n# Theirs\n")
    front = front_matter(card(tmp_path))
    assert (front["license"], front["license_name"], front["language"]) == ("other", "research", ["en", "de"])
    assert (front["pipeline_tag"], front["library_name"]) == ("image-text-to-text", "transformers")
    assert front["quantized_by"] == "onptq"
    assert front["tags"] == ["onptq", "compressed-tensors", "quantized", "W4A8"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "# no front matter",
        "---\nlicense: [unclosed\n---\n",
        "---\njust words\n---\n",
        "---\nlicense: {nested: text}\n---\n",
        "---\nlicense: 7\n---\n",
        f"---\nlicense: {'x' * 201}\n---\n",
        '---\nlicense: "a\\nb"\n---\n',
    ],
)
def test_nothing_is_stated_that_the_source_does_not_state(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert "license" not in front_matter(card(tmp_path))
    assert front_matter(card(tmp_path, config=VL | {"license": "mit"}))["license"] == "mit"


@pytest.mark.parametrize("merge", [False, True])
def test_an_alias_bomb_in_the_sources_card_is_not_copied(merge: bool, tmp_path: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    if merge:  # merged mappings are unfolded when they are read
        levels = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    bomb = "\n".join(["a0: &a0 {x: y}" if merge else "a0: &a0 [x]", *levels, "license: *a11"])
    (tmp_path / "README.md").write_text(f"---\n{bomb}\n---\n")
    text = card(tmp_path)
    assert "license" not in front_matter(text)
    assert "&" not in text.split("---\n")[1]


def test_a_card_that_is_a_link_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_text("---\nlicense: secret\n---\n")
    (tmp_path / "model" / "README.md").symlink_to(tmp_path / "secret")
    assert "license" not in front_matter(card(tmp_path / "model"))


def test_only_a_hub_id_is_a_base_model_in_the_metadata(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-VL-7B" / "snapshots" / "0a1b"
    mine = tmp_path / "mine"
    for folder in (snapshot, mine):
        folder.mkdir(parents=True)
    hub = BaseModel("Qwen/Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B")
    assert find_base(snapshot) == hub
    assert find_base(mine, "Qwen/Qwen2.5-VL-7B") == hub
    assert find_base(mine, str(mine)) == find_base(mine) == BaseModel("mine")
    assert find_base(tmp_path / "cache-1234", "zoo:qwen2.5-vl+outliers") == BaseModel("zoo:qwen2.5-vl+outliers")
    front = front_matter(card(snapshot))
    assert (front["base_model"], front["base_model_relation"]) == ("Qwen/Qwen2.5-VL-7B", "quantized")
    text = card(mine)
    assert "base_model" not in front_matter(text)
    assert "\nmine with the linears" in text
    assert str(tmp_path) not in card(snapshot) + text


@pytest.mark.parametrize("stated", ["me/tuned-from", "[me/tuned-from, me/other]"])
def test_the_base_model_of_the_sources_own_card_is_named_as_such(stated: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nbase_model: {stated}\n---\n")
    text = card(tmp_path)
    assert front_matter(text)["base_model"] == "me/tuned-from"
    assert "base_model_relation" not in front_matter(text)  # it is the base of the source, not what was quantized
    assert "whose card names [me/tuned-from](https://huggingface.co/me/tuned-from) as its base model" in text


@pytest.mark.parametrize("stated", ["../up", "'a b/c'", "7", "'x/y](http://z)'"])
def test_a_stated_base_model_that_is_no_hub_id_is_left_out(stated: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\nbase_model: {stated}\n---\n")
    assert "base_model" not in front_matter(card(tmp_path))


def test_text_of_the_model_folder_cannot_leave_its_place() -> None:
    config = VL | {"architectures": [HOSTILE], "license": HOSTILE, "model_type": "qwen2_5_vl"}
    text = card(Path(HOSTILE.replace("/", "")), config=config, provenance=Provenance(HOSTILE, HOSTILE))
    assert "<script>" not in text.replace("\\<", "")
    assert "](javascript" not in text
    assert "license" not in front_matter(text)
    assert text.count("```") == 4
    ast.parse(example(text))
    assert "transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained" in example(text)


def test_escaped_text_is_one_line_of_plain_markdown() -> None:
    assert escaped("a_b*c\n\x1b[31m") == r"a\_b\*c \[31m"
    assert escaped("Qwen2.5-VL") == "Qwen2.5-VL"


# --- use --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "scheme"), [("llama", "W4A8"), ("qwen2.5-vl", "W4A8"), ("llama", "NVFP4")])
def test_the_example_of_the_card_runs(
    family: str, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if family != "llama" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("transformers' AutoProcessor needs torchvision")
    model, out = tmp_path / "model", tmp_path / "out"
    write_random(family, model, prompts=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512)
    recipe = Recipe.preset("risk", {"method": "rtn", "scheme": scheme, "compute.device": "cpu"})
    onptq.quantize(model, out, recipe=recipe, verify=False)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "image.png")
    code = example((out / "README.md").read_text())
    code = code.replace(FOLDER, str(out)).replace("image.png", str(tmp_path / "image.png"))
    capsys.readouterr()
    exec(compile(code.replace("max_new_tokens=128", "max_new_tokens=3"), "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")


def test_a_model_that_sees_is_asked_about_an_image_and_a_text_model_is_not() -> None:
    sees, reads = card(Path("m")), card(Path("m"), config={"model_type": "llama"})
    assert '"type": "image"' in example(sees)
    assert "needs torchvision" in sees
    assert "image" not in example(reads)
    assert "torchvision" not in reads
    assert all("model.generate(" in example(text) for text in (sees, reads))


def test_omni_is_loaded_by_the_class_that_answers_in_text() -> None:
    full: dict[str, Any] = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": {}}
    text = card(Path("m"), config=full)
    assert "transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained" in example(text)
    assert front_matter(text)["pipeline_tag"] == "any-to-any"
    alone = {"model_type": "qwen2_5_omni_thinker", "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}
    assert "vLLM takes full Omni checkpoints only" in card(Path("m"), config=alone)


@pytest.mark.parametrize(
    ("scheme", "command", "computes"),
    [
        ("W4A8", "vllm serve path/to/this/folder --linear-backend humming", "int4 x int8"),
        ("W4A16", "vllm serve path/to/this/folder", "int4 x 16-bit"),
        ("W8A8", "vllm serve path/to/this/folder", "int8 x int8"),
        ("W8A16", "vllm serve path/to/this/folder", "int8 x 16-bit"),
        ("W4A8-g128", "vllm serve path/to/this/folder --linear-backend humming", "int4 x int8"),
        ("FP8-block", "vllm serve path/to/this/folder", "E4M3 x E4M3"),
        ("NVFP4", "vllm serve path/to/this/folder", "E2M1 x E2M1"),
    ],
)
def test_one_command_serves_the_scheme(scheme: str, command: str, computes: str) -> None:
    text = card(Path("model"), scheme)
    assert re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL) == [command]
    assert f"this multiplies {computes}." in text
    differs = "Without `--linear-backend humming` the server answers too, but multiplies int4 x 16-bit."
    assert (differs in text) == scheme.startswith("W4A8")
    assert ("Blackwell" in text) == (scheme == "NVFP4")
    assert ("So its source says; it was not run." in text) == (scheme not in ("W4A8", "W4A16", "W8A8"))


@pytest.mark.parametrize(
    ("scheme", "weights", "activations"),
    [
        ("W4A8-g128", "4-bit integers, symmetric, one scale per 128 input columns of an output row", "8-bit integers"),
        (
            "FP8-block",
            "8-bit floats (E4M3), symmetric, one scale per block of 128 output rows and 128 input columns",
            "8-bit floats (E4M3), symmetric, one dynamic scale per 128 channels of a token",
        ),
        (
            "NVFP4",
            "4-bit floats (E2M1), symmetric, one scale in E4M3, under one for the tensor, per 16 input columns",
            "one dynamic scale in E4M3, under one for the tensor, per 16 channels of a token",
        ),
        ("MXFP4", "one scale, a power of two, per 32 input columns", "4-bit floats (E2M1)"),
    ],
)
def test_numbers_are_described(scheme: str, weights: str, activations: str) -> None:
    text = card(Path("model"), scheme)
    assert weights in text.split("- Weights: ")[1].split("\n")[0]
    assert activations in text.split("- Activations: ")[1].split("\n")[0]


def test_a_kernel_that_lists_no_such_groups_is_not_promised() -> None:
    text = card(Path("model"), "W4A16-g32")
    assert "this multiplies" in text or "was not seen" in text
    doubtful = card(Path("model"), "W8A16-g32-asym")
    assert "Whether vLLM 0.32 runs W8A16-g32-asym was not seen" in doubtful


def test_what_is_only_simulated_says_so() -> None:
    text = card(Path("model"), "W4A6")
    assert "Simulation only: no server is known to run W4A6" in text
    assert "vllm serve" not in text


def test_the_card_is_short() -> None:
    text = card(Path("model"), provenance=Provenance("onptq", "search", (Update(24, 18),)))
    assert len(text.splitlines()) < 80
    assert "Hopper" in text
    assert "H200" not in text


def test_norms_are_not_said_to_keep_their_precision() -> None:
    text = card(Path("model"))
    assert (
        "norms inside the decoder layers take up smoothing factors. They are stored in the dtype of the scales" in text
    )
    assert not re.search(r"norms?[^.]*(keep|copied)", text)


# --- what made it -----------------------------------------------------------------------------------------------------


def making(provenance: Provenance | None) -> str:
    return card(Path("model"), provenance=provenance).split("## How it was made")[1].split("## Results")[0]


def test_a_base_method_is_named_and_no_calibration_claimed() -> None:
    text = making(Provenance("awq", "awq", calibration=Calibration(4, 0, {"text only": 4}, "f" * 64)))
    assert "method awq. The base method awq made the weights. No on-policy calibration followed." in text
    assert "4 prompts (4 with text only). None were held out." in text
    assert making(Provenance("onptq", "search+signround")) == making(Provenance("onptq", "search+signround", ()))
    assert "The base method search+signround made the weights" in making(Provenance("onptq", "search+signround"))


def test_rounding_to_nearest_claims_no_calibration_data() -> None:
    text = making(Provenance("rtn", "rtn", calibration=Calibration(4, 0, {"text only": 4}, "f" * 64)))
    assert "Rounding to nearest (RTN)" in text
    assert "No calibration data" in text
    assert "4 prompts" not in text


def test_an_init_that_no_step_improved_is_called_that() -> None:
    text = making(Provenance("onptq", "search", (Update(24, 0), Update(24, 0))))
    assert "**The init was kept: none of 48 steps was better.** The weights are those of search." in text


def test_the_iterate_of_every_round_is_named() -> None:
    text = making(Provenance("onptq", "search", (Update(24, 18), Update(24, 0))))
    assert "Iterate kept, round 1: step 18 of 24; round 2: its init, none of 24 steps." in text
    assert "The init was kept" not in text
    assert "smoothing and scales are fitted" in text
    assert "smoothing, scales and codes are" in making(Provenance("onptq", "rtn", (Update(2, 1),), learns_codes=True))


def test_the_kind_of_calibration_is_that_of_the_recipe() -> None:
    static, uniform, risk = (
        making(Provenance("any", "search", (Update(2, 1),), rule=rule)) for rule in (None, "all", "risk")
    )
    assert "static calibration" in static
    assert "on-policy" not in static
    assert "on-policy calibration" in uniform
    assert "all states alike" in uniform
    assert "states selected by risk" in risk


def test_calibration_data_is_counted_by_its_contents() -> None:
    media = Media(None, "a" * 64, b"a")

    def prompt(number: int, **more: Any) -> Prompt:
        return Prompt(number, str(number), [{"role": "user", "content": [{"type": "text", "text": "?"}]}], **more)

    both = prompt(2, images=(media,), audios=(media,))
    prompts = Prompts([prompt(0, images=(media,)), prompt(1, images=(media,)), both, prompt(3)], [prompt(4)])
    calibration = Calibration.of(prompts)
    assert calibration is not None
    assert calibration.mix == {"image and text": 2, "image, audio and text": 1, "text only": 1}
    text = making(Provenance("onptq", "search", (Update(2, 1),), calibration=calibration))
    contents = "4 prompts (2 with image and text, 1 with image, audio and text, 1 with text only)."
    assert f"{contents} 1 more were held out." in text
    assert manifest_digest(prompts.every) in text
    assert Calibration.of(Prompts((), ())) is None


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("card") / "run"
    recipe = Recipe.preset("risk", CHANGES)
    onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe, verify=False)
    return out


def answers(file: Path) -> Iterator[tuple[int, list[int]]]:
    for row in pq.read_table(file).to_pylist():
        yield row["prompt"], row["response"]


def test_the_card_of_a_run_has_the_baselines_beside_the_result(run: Path, small: Path) -> None:
    text = (run / "README.md").read_text(encoding="utf-8")
    table = [line.split(" | ") for line in text.split("## Results")[1].splitlines() if line.startswith("|")]
    assert [name.strip("| ") for name in table[0]] == ["", "mismatch %", "KL", "answers reworded %"]
    dense = dict(answers(run_home(run) / "final/dense_trajectories.parquet"))
    files = {
        "| RTN": "rtn/final/holdout.parquet",
        r"| init \(search+signround\)": "rounds/0/holdout.parquet",
        f"| {RESULT}": "final/holdout.parquet",
    }
    assert [row[0] for row in table[2:]] == list(files)
    for row, file in zip(table[2:], files.values(), strict=True):
        states = pq.read_table(run_home(run) / file).to_pylist()
        mismatch = 100 * np.mean([state["kind"] == "mismatch" for state in states])
        kl = np.mean([state["kl"] for state in states])
        other = dict(answers((run_home(run) / file).with_name("holdout_trajectories.parquet")))
        reworded = 100 * np.mean([other[prompt] != dense[prompt] for prompt in dense])
        for shown, value in zip(row[1:], (mismatch, kl, reworded), strict=True):
            assert shown.startswith(f"{value:.1f}" if value >= 1 or not value else f"{value:.4f}")
    assert f"to the 2 held-out prompts that also chose the iterate ({len(states)} states)" in text
    assert "95% bootstrap intervals over prompts" in text
    assert "3 prompts (3 with image and text). 2 more were held out." in text
    assert str(run.parent) not in text
    assert str(small.parent) not in text
    picture = (run / "results.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert all(name in picture for name in ("RTN", "init (search+signround)", RESULT))
    assert "](results.svg)" in text.split("## Results")[1]


def test_the_card_of_a_run_says_which_iterate_it_exported(run: Path) -> None:
    import json

    update = json.loads((run_home(run) / "rounds/0/update.json").read_text())
    text = (run / "README.md").read_text(encoding="utf-8")
    if update["best_step"]:
        assert f"round 1: step {update['best_step']} of {update['steps']}." in text
    else:
        assert f"The init was kept: none of {update['steps']} steps was better." in text


def test_a_run_without_held_out_prompts_has_no_results(tmp_path: Path) -> None:
    assert read_results(tmp_path, Recipe()) is None
    assert "Nothing was measured" in card(Path("model"))


def test_the_picture_of_a_card_has_the_interval_of_every_model() -> None:
    rows = {"RTN": {"KL": Estimate(0.5, 0.25, 0.75)}, RESULT: {"KL": Estimate(0.002, None, None)}}
    plot = results_plot(Results(rows, 0.95, 100, "5 held-out prompts"))
    assert plot is not None
    assert plot.spec["data"]["values"] == [
        {"model": "RTN", "kl": 0.5, "low": 0.25, "high": 0.75},
        {"model": RESULT, "kl": 0.002, "low": 0.002, "high": 0.002},
    ]
    alone = Results({RESULT: {"KL": Estimate(0.002)}}, 0.95, 100, "5 held-out prompts")
    assert results_plot(alone) is None
    assert card_picture(None) is None
    assert "results.svg" not in card(Path("model"), results=alone)


def test_figures_have_their_intervals() -> None:
    rows = {
        "RTN": {"KL": Estimate(0.5, 0.25, 0.75)},
        RESULT: {"KL": Estimate(12.3), "mismatch %": Estimate(0.0, 0.0, 0.0)},
    }
    text = card(Path("model"), results=Results(rows, 0.9, 1234, "5 held-out prompts"))
    assert "| | KL | mismatch % |" in text
    assert "| RTN | 0.5000 [0.2500, 0.7500] | - |" in text
    assert f"| {RESULT} | 12.3 | 0.0 [0.0, 0.0] |" in text
    assert "5 held-out prompts (1,234 states). In brackets: 90% bootstrap intervals" in text
