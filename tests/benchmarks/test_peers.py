"""`benchmarks/peers`: other tools get our prompts, responses and tensors, and the right command lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cli import app
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.errors import OnPTQError
from onptq.methods.layerwise import RESPONSE_TOKENS, answer_prompts
from onptq.models.encoding import encode
from onptq.models.processing import PromptProcessor
from onptq.progress import QuietReporter
from onptq.recipe import Recipe
from onptq.schemes import Scheme

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
QUIET = QuietReporter()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts, imported as when they are started."""
    monkeypatch.syspath_prepend(str(PEERS))
    import calibration
    import peer_inputs
    import run

    yield SimpleNamespace(run=run, inputs=peer_inputs, calibration=calibration)
    for name in ("run", "peer_inputs", "calibration"):
        monkeypatch.delitem(sys.modules, name)


def parsed(peers: SimpleNamespace, *arguments: str) -> Any:
    return peers.run.make_plan(peers.run.parse_arguments([*arguments, "--out", "out", "--environments", "venvs"]))


@pytest.mark.slow
@pytest.mark.parametrize("manifest", [False, True], ids=["embedded", "manifest"])
def test_peers_get_the_calibration_prompts_of_our_candidates(
    peers: SimpleNamespace, small: Path, tmp_path: Path, manifest: bool
) -> None:
    recipe = Recipe.preset("risk", {"data.prompts": 3, "data.holdout": 2})
    model, calibration = (str(small), small / "prompts.jsonl") if manifest else ("zoo:qwen2.5-vl", None)
    prompts = peers.run.candidates_prompts(find_source(model), calibration, recipe, QUIET)
    peers.inputs.write_prompts(prompts, tmp_path)
    read = load_manifest(tmp_path / "prompts.jsonl")
    assert len(read) == 3
    command = ["compare", model, "smoothquant:W4A16@default", "--tasks", "none", "--prompts", "1", "--quiet"]
    command += ["--set", "data.prompts=3", "--set", "data.holdout=2", "--out", str(tmp_path / "compared")]
    command += ["--manifest", str(calibration), "--calibration", str(calibration)] if manifest else []
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (identity,) = tmp_path.glob("compared/**/candidates/*/identity.json")
    assert manifest_digest(read) == json.loads(identity.read_text())["calibration"]


def test_the_default_preset_decides_how_many_prompts_there_are(peers: SimpleNamespace) -> None:
    assert peers.run.parse_arguments(["--out", "x"]).preset == "default"


def test_a_folder_without_prompts_of_its_own_needs_a_manifest(peers: SimpleNamespace, small: Path) -> None:
    with pytest.raises(OnPTQError, match="need --calibration PROMPTS"):
        peers.run.candidates_prompts(find_source(small), None, Recipe.preset("risk"), QUIET)


def test_peers_read_the_tensors_and_responses_of_our_methods(
    peers: SimpleNamespace, small: Path, tmp_path: Path
) -> None:
    source, prompts = find_source(small), load_manifest(small / "prompts.jsonl")[:3]
    peers.inputs.write_material(source, prompts, RESPONSE_TOKENS, tmp_path, QUIET)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    policy = load_policy(source, "W4A8", dtype="float32")
    inputs = [processor(prompt) for prompt in prompts]
    encoded = [encode(policy, [one], [ordinal])[0] for ordinal, one in enumerate(inputs)]
    answered = answer_prompts(policy, encoded)
    samples = peers.calibration.read_samples(tmp_path, small)
    assert len(samples) == len(prompts)
    for sample, one, whole in zip(samples, inputs, answered, strict=True):
        assert sample.keys() == one.tensors.keys()
        assert sample["input_ids"].shape[1] == whole.sequence.length
        for name, tensor in one.tensors.items():
            given = sample[name] if name.startswith(("pixel", "image")) else sample[name][:, : one.length]
            assert torch.equal(given, tensor), name
        response = sample["input_ids"][0, one.length :]
        assert torch.equal(policy.embed(response), whole.sequence.embeds[one.length :])


def test_whole_material_is_used_again_and_that_of_another_run_is_refused(
    peers: SimpleNamespace, small: Path, tmp_path: Path
) -> None:
    source, prompts = find_source(small), load_manifest(small / "prompts.jsonl")
    peers.inputs.write_material(source, prompts[:2], 2, tmp_path, QUIET)
    responses = tmp_path / "responses.jsonl"
    assert all(len(json.loads(line)["tokens"]) <= 2 for line in responses.read_text().splitlines())
    written = responses.stat().st_mtime_ns
    peers.inputs.write_material(source, prompts[:2], 2, tmp_path, QUIET)
    assert responses.stat().st_mtime_ns == written
    with pytest.raises(OnPTQError, match="material of another run"):
        peers.inputs.write_material(source, prompts[:3], 2, tmp_path, QUIET)


@pytest.mark.parametrize(
    ("scheme", "peer", "expected"),
    [
        ("W4A16", "gptq", "--method gptq --bits 4 --activation-bits 16"),
        ("W4A8", "awq", "--method awq --bits 4 --activation-bits 8"),
        ("W4A16-g128", "autoround-best", "--recipe best --bits 4 --activation-bits 16 --group-size 128"),
        ("W8A8", "smoothquant", "--method smoothquant --bits 8 --activation-bits 8"),
        ("NVFP4", "autoround", "--recipe default --named NVFP4"),
        ("NVFP4A16", "gptq", "--method gptq --named NVFP4A16"),
    ],
)
def test_a_peer_is_started_in_its_own_environment_with_the_scheme(
    peers: SimpleNamespace, scheme: str, peer: str, expected: str
) -> None:
    plan = parsed(peers, "--scheme", scheme, "--peers", peer)
    tool = "autoround" if peer.startswith("autoround") else "llmcompressor"
    out, venv = Path("out").absolute(), Path("venvs").absolute() / tool
    places = f"--model {out / 'dense'} --material {out / 'material'} --out {out / scheme / peer}"
    script = PEERS / f"quantize_{tool}.py"
    assert " ".join(plan.quantize_command(peer)) == f"{venv / 'bin' / 'python'} {script} {expected} {places}"
    assert script.is_file()
    assert (PEERS / f"{tool}.txt").is_file()


def test_the_scoring_command_compares_every_peer_with_ours_in_the_same_scheme(peers: SimpleNamespace) -> None:
    plan = parsed(peers, "--scheme", "W4A16", "--peers", "gptq,autoround,autoround-best")
    out = Path("out").absolute() / "W4A16"
    assert plan.score_command("default", 300, 96) == [
        *("onptq", "compare", "zoo:qwen2.5-vl"),
        *("rtn:W4A16@default", "gptq:W4A16@default", "awq:W4A16@default", "search:W4A16@default"),
        *("search+signround:W4A16@default", "static:W4A16@default", "onptq:W4A16@default", "onptq:W4A16@best"),
        *(f"llmcompressor-gptq={out / 'gptq'}", f"autoround={out / 'autoround'}"),
        f"autoround-best={out / 'autoround-best'}",
        *("--items", "300", "--prompts", "96", "--out", str(out / "compared")),
    ]
    assert not [name for name in plan.score_command("zoo", 300, 96) if name.endswith("@best")]


def test_unknown_and_unsuitable_peers_are_refused_with_those_that_can(peers: SimpleNamespace) -> None:
    with pytest.raises(OnPTQError, match=r"unknown peer 'gptqq' \(did you mean gptq\?\); expected of rtn, gptq, awq"):
        parsed(peers, "--peers", "gptqq")
    with pytest.raises(OnPTQError, match=r"autoround cannot write W4A8; of the peers rtn, gptq, awq, smoothquant"):
        parsed(peers, "--scheme", "W4A8", "--peers", "autoround")
    with pytest.raises(OnPTQError, match="autoround cannot write NVFP4A16"):
        parsed(peers, "--scheme", "NVFP4A16", "--peers", "autoround")
    with pytest.raises(OnPTQError, match="with WbAb, -gN, NVFP4 and NVFP4A16"):
        parsed(peers, "--scheme", "MXFP4")
    with pytest.raises(OnPTQError, match="symmetric"):
        parsed(peers, "--scheme", "W4A16-asym")


def test_without_names_all_peers_are_run_that_can_write_the_scheme(peers: SimpleNamespace) -> None:
    assert peers.run.choose_peers(None, Scheme.parse("W8A8")) == tuple(peers.run.PEERS)
    able = peers.run.choose_peers(None, Scheme.parse("W3A8"))
    assert set(peers.run.PEERS) - set(able) == {"autoround", "autoround-best"}


def test_finished_checkpoints_are_not_made_again(
    peers: SimpleNamespace, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "W4A16" / "gptq").mkdir(parents=True)
    arguments = ["--model", str(small), "--calibration", str(small / "prompts.jsonl"), "--peers", "gptq"]
    assert peers.run.run(peers.run.parse_arguments([*arguments, "--out", str(tmp_path)])) == 0
    assert not (tmp_path / "environments").exists()
    assert (tmp_path / "dense" / "config.json").is_file()
    assert f"llmcompressor-gptq={tmp_path / 'W4A16' / 'gptq'}" in capsys.readouterr().out.replace("\n", "")


def test_a_peer_that_fails_is_reported_with_the_end_of_its_log(peers: SimpleNamespace, tmp_path: Path) -> None:
    plan = peers.run.Plan("zoo:qwen2.5-vl", Scheme.parse("W4A16"), ("gptq",), tmp_path, tmp_path / "venvs")
    python = plan.environment("gptq") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    plan.dense.mkdir()
    with pytest.raises(OnPTQError, match=r"llm-compressor, GPTQ failed on W4A16 \(.*gptq\.log\):\n(.*\n)*.*Error"):
        peers.run.quantize(plan, "gptq")
    assert not plan.checkpoint("gptq").exists()


def test_a_checkpoint_appears_only_when_it_is_whole(peers: SimpleNamespace, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint"

    def fail() -> None:
        with peers.calibration.writing(out, small) as stage:
            (stage / "config.json").write_text("{}")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        fail()
    assert not out.exists()
    with peers.calibration.writing(out, small) as stage:
        assert list(stage.iterdir()) == []
        (stage / "config.json").write_text("{}")
    assert (out / "config.json").read_text() == "{}"
    assert (out / "tokenizer.json").read_bytes() == (small / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_an_environment_is_made_once_for_its_requirements(peers: SimpleNamespace, tmp_path: Path) -> None:
    requirements, folder = tmp_path / "tool.txt", tmp_path / "venv"
    requirements.write_text("# nothing\n")
    peers.run.make_environment(folder, requirements)
    python = folder / "bin" / "python"
    assert python.exists()
    python.unlink()
    peers.run.make_environment(folder, requirements)
    assert not python.exists()  # used without a look inside
