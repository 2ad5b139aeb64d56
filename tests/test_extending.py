"""The pages of docs/extending: their Python runs on small models, their names work where the pages say so."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_docs import ROOT, code
from typer.testing import CliRunner

from onptq import FAMILIES, LOSS_TERMS, METHODS, SELECTION_RULES, TASKS, Recipe, load_policy
from onptq.bank import load_bank
from onptq.checkpoint.source import find_source
from onptq.cli import app
from onptq.methods.linears import dense_weight, rounded_weight
from onptq.methods.rtn import rtn
from onptq.models.structure import LINEARS
from onptq.quantizer.theta import Theta, log_scales_in
from onptq.registry import Registry
from onptq.run import run_home
from onptq.zoo.random import write_random

EXTENDING = ROOT / "docs" / "extending"
PAGES = ("base-method", "selection-rule", "loss-term", "task", "model-family")
REGISTRIES: dict[str, Registry[Any]] = {  # as `onptq list` calls them, in the order of the pages
    "methods": METHODS,
    "selection-rules": SELECTION_RULES,
    "loss-terms": LOSS_TERMS,
    "tasks": TASKS,
    "families": FAMILIES,
}

Page = Callable[..., dict[str, Any]]


def definitions(name: str) -> list[str]:
    """The page's blocks that register something."""
    return [block for block in code(EXTENDING / f"{name}.md", "python") if ".register(" in block]


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Page:
    """`execute(blocks, model)`: the names that blocks of a page define. What they register is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_registered", {})

    def run(blocks: Sequence[str], model: Path) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "page"}
        for block in blocks:
            given = block.replace('"MODEL"', repr(str(model)))
            exec(given.replace('"prompts.jsonl"', repr(str(model / "prompts.jsonl"))), names)
        return names

    return run


def initial(out: str) -> Theta:
    return Theta.load(run_home(out) / "init.safetensors")


@pytest.mark.slow
def test_the_methods_of_the_page_are_used_by_name(execute: Page, small: Path) -> None:
    names = execute(code(EXTENDING / "base-method.md", "python"), small)
    policy = load_policy(find_source(small), "W4A8")
    least, plain = names["least_error"](policy, []), rtn(policy)
    for block in policy.structure.blocks:
        for name in LINEARS:
            weight, log_in = dense_weight(block, name), log_scales_in(plain, block, name)
            errors = [
                (rounded_weight(policy, theta, block, name, log_in) - weight).square().sum(1)
                for theta in (least, plain)
            ]
            assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
            assert (errors[0] < 0.99 * errors[1]).any()
    smoothing = initial("smoothed").smoothing
    assert all((smoothing[f"layers.{block.index}.norm_qkv"].abs() > 0.01).any() for block in policy.structure.blocks)
    assert all(not smoothing[f"layers.{block.index}.v_o"].any() for block in policy.structure.blocks)
    assert names["alone"].rounds == 0
    assert names["alone"].init == "least-error"
    assert Recipe.from_yaml(run_home("smoothed") / "recipe.yaml") == names["init"]


@pytest.mark.slow
def test_the_rule_of_the_page_chooses_the_critical_states(execute: Page, small: Path) -> None:
    execute(code(EXTENDING / "selection-rule.md", "python"), small)
    states = load_bank(run_home("early"))
    rank = np.where(states.candidates, states.risk / states.t, -np.inf)
    expected = np.zeros(len(states), np.bool_)
    expected[np.lexsort((states.t, states.prompt, -rank))[:16]] = True
    assert states.critical.tolist() == expected.tolist()
    by_risk = np.argsort(-np.where(states.candidates, states.risk, -np.inf), kind="stable")[:16]
    assert set(by_risk.tolist()) != set(np.flatnonzero(expected).tolist())


@pytest.mark.slow
def test_the_loss_term_of_the_page_moves_theta(execute: Page, small: Path) -> None:
    blocks = code(EXTENDING / "loss-term.md", "python")
    without = blocks[-1].replace('"calibrate.terms.pair-probability"', '"calibrate.gamma"').replace("5.0", "1.0")
    execute([*blocks, without.replace('"probability"', '"plain"')], small)
    steps = [
        [
            event
            for event in map(json.loads, (run_home(out) / "log.jsonl").read_text().splitlines())
            if event["event"] == "step"
        ]
        for out in ("probability", "plain")
    ]
    assert all(event["pair-probability"] > 0 for event in steps[0])
    assert not any("pair-probability" in event for event in steps[1])
    thetas = [Theta.load(run_home(out) / "rounds/0/theta.safetensors") for out in ("probability", "plain")]
    assert any(not torch.equal(u, thetas[1].smoothing[key]) for key, u in thetas[0].smoothing.items())


def test_the_tasks_of_the_page_get_scores(execute: Page, small: Path, tmp_path: Path) -> None:
    [question] = [json.loads(block) for block in code(EXTENDING / "task.md", "json")]
    (tmp_path / question["image"]).write_bytes(next((small / "media").glob("*.png")).read_bytes())
    (tmp_path / "test.jsonl").write_text(json.dumps(question) + "\n")
    names = execute(code(EXTENDING / "task.md", "python"), small)
    for model in names["report"].models.values():
        assert {task: score.items for task, score in model.scores.tasks.items()} == {"sums": 20, "table": 1}
    splits = [
        {item.prompt.messages[0]["content"][0]["text"] for item in names["sums"]("", split, 0)}
        for split in ("test", "held-out")
    ]
    assert not splits[0] & splits[1]


@pytest.mark.slow
def test_the_families_of_the_page_quantize_their_checkpoints(execute: Page, small: Path, tmp_path: Path) -> None:
    vision = write_qwen2_vl(small, tmp_path / "qwen2-vl")
    execute(code(EXTENDING / "model-family.md", "python"), vision)
    verified = json.loads((run_home("quantized") / "summary.json").read_text())["verification"]
    assert verified["argmax_agreement"] == 1
    assert all(check["passed"] for check in verified["checks"])
    assert find_source(vision).family.name == "qwen2-vl"

    text = write_random("llama", tmp_path / "mistral", prompts=4, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512)
    config = json.loads((text / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (text / "config.json").write_text(json.dumps(config))
    assert find_source(text).family.name == "mistral"
    assert load_policy(find_source(text), "W4A8").blocks == 2


def write_qwen2_vl(like: Path, folder: Path) -> Path:
    """A random Qwen2-VL checkpoint with the tokenizer, processor and prompts of a Qwen2.5-VL one."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    shutil.copytree(like, folder)
    given = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": given["rope_scaling"]["mrope_section"]}
    text = {name: given[name] for name in (*sizes, "vocab_size", "bos_token_id", "eos_token_id")} | {
        "rope_parameters": rope
    }
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": given["hidden_size"]}
    ids = {name: given[name] for name in given if name.endswith("token_id") and name not in text}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder


SMALLER = {  # options with which a command of the documentation takes a second on a small model
    "quantize": "--set init_steps=2 --set follow.max_tokens=4 --no-verify --quiet",
    "compare": "--set init_steps=2 --set follow.max_tokens=4 --set calibrate.epochs=1 --prompts 2 --quiet",
}


def calls(name: str) -> list[list[str]]:
    """The arguments of every `python mine.py` on a page."""
    text = "\n".join(code(EXTENDING / f"{name}.md", "bash")).replace("\\\n", " ")
    lines = [line.partition("python mine.py ")[2] for line in text.splitlines()]
    return [shlex.split(line) for line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", *PAGES])
def test_every_command_of_the_page_works_where_its_names_are_known(
    name: str, execute: Page, small: Path, tmp_path: Path
) -> None:
    model = write_qwen2_vl(small, tmp_path / "qwen2-vl") if name == "model-family" else small
    prompts = str(model / "prompts.jsonl")
    (tmp_path / "test.jsonl").write_text('{"id": "sky", "text": "Is the sky blue?", "answer": "yes"}\n')
    for recipe in code(EXTENDING / f"{name}.md", "yaml"):
        (tmp_path / "probability.yaml").write_text(recipe)
    execute(definitions(name), model)
    others = tmp_path / "others.jsonl"
    others.write_text('{"text": "What is a comet?"}\n{"text": "Name a color."}\n')
    arguments = {"MODEL": str(model), "QUANTIZED": "rtn:W3A8", "prompts.jsonl": prompts}
    for number, call in enumerate(calls(name)):
        words = [arguments.get(word, word) for word in call] + shlex.split(SMALLER.get(call[0], ""))
        if call[0] == "compare":
            words += ["--out", f"compared-{number}", *([] if "--tasks" in words else ["--manifest", str(others)])]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (call, done.output, done.exception)


@pytest.mark.slow
def test_a_package_brings_the_names_of_the_pages_by_entry_points(tmp_path: Path) -> None:
    package, metadata = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    entries: dict[str, dict[str, str]] = {}
    for page, (kind, registry) in zip(PAGES, REGISTRIES.items(), strict=True):
        published = tomllib.loads(code(EXTENDING / f"{page}.md", "toml")[0])["project"]["entry-points"]
        entries[kind] = published[registry.group]
        [module] = {path.partition(":")[0].removeprefix("my_package.") for path in entries[kind].values()}
        lines = [line for line in "\n".join(definitions(page)).splitlines() if ".register(" not in line]
        (package / f"{module}.py").write_text("\n".join(lines))
        with (metadata / "entry_points.txt").open("a") as file:
            file.write(f"[{registry.group}]\n" + "".join(f"{name} = {path}\n" for name, path in entries[kind].items()))

    program = "from onptq import registry\nfrom onptq.cli import app\n"
    for kind, names in entries.items():
        program += "".join(f"registry.{kind.replace('-', '_').upper()}[{name!r}]\n" for name in names)
    program += "app(['list', '--json'])\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kind, listed in json.loads(done.stdout).items():
        assert {name for name, origin in listed.items() if origin == "my-package"} == set(entries[kind])
