"""Rollouts by a server: transformers behind an endpoint writes what Q would have written, and what goes wrong is said.

The server here loads the exported folder and decodes greedily by transformers' own forward; clients/run.py has a real vLLM.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny
from naive import WEIGHT_ONLY, next_logits, scene
from typer.testing import CliRunner
from web_server import Serve

import onptq
from onptq.bank import Trajectory, load_bank, load_trajectories
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import open_checkpoint
from onptq.cli import app
from onptq.cycle.compare import compare
from onptq.cycle.disagreements import NEAR_TIE, Disagreements, disagreements
from onptq.cycle.served import drawn
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.engine.sampling import Sampling
from onptq.errors import OnPTQError
from onptq.models.processing import PromptProcessor
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.serving.messages import chat_messages

TOKENS, LIMIT = 6, 5


class Deployed:
    """A checkpoint as vLLM serves it: /v1/models with its folder, and greedy token ids."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = {json.dumps(chat_messages(prompt)): prompt for prompt in prompts}
        self.folder: Path | None = None
        self.context = 4096
        self.twist: Callable[[list[int]], list[int]] = list

    def load(self, folder: Path) -> None:
        source = open_checkpoint(str(folder))
        self.folder = folder
        self.processor = PromptProcessor.from_folder(folder, source.family, source.config)
        self.model: Any = load_model(source, torch.float32, torch.device("cpu"))

    @torch.inference_mode()
    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            root = "org/other" if self.folder is None else str(self.folder)
            return 200, {"data": [{"id": "served", "root": root, "max_model_len": self.context}]}
        assert body["model"] == "served"
        if path == "/v1/completions":
            ids = torch.tensor([body["prompt"]])
            tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if self.processor.family.token_types:
                tensors["mm_token_type_ids"] = torch.zeros_like(ids)
        else:
            tensors = self.processor(self.prompts[json.dumps(body["messages"])]).tensors
        ends = body["stop_token_ids"]
        length = tensors["input_ids"].shape[1]
        tokens = self.model.generate(
            **tensors, max_new_tokens=body["max_tokens"], do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
        new = self.twist(tokens[0, length:].tolist())
        reason = "stop" if new[-1] in ends else "length"
        choice = {"token_ids": new, "finish_reason": reason}
        return 200, {"choices": [choice], "prompt_token_ids": tensors["input_ids"][0].tolist()}


def recipe(engine: str, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "scheme": "W4A16", "init": "rtn", "data.prompts": 4, "data.holdout": 2, "follow.max_tokens": TOKENS,
        "follow.engine": engine, "calibrate.epochs": 1, "calibrate.batch": 4, "calibrate.codes": "free",
        "compute.device": "cpu",
    }  # fmt: skip
    return Recipe.preset("default", fields | changes)


def folder_to_serve(message: str) -> Path:
    found = re.search(r"vllm serve (\S+) --port (\d+)", message)
    assert found is not None, message
    return Path(found[1])


@pytest.mark.slow
def test_an_endpoint_writes_the_bank_that_this_package_writes_and_is_asked_once(
    small: Path, tmp_path: Path, serve: Serve
) -> None:
    manifest = small / "prompts.jsonl"
    own = onptq.quantize(small, tmp_path / "own", calibration=manifest, recipe=recipe("own"), verify=False)
    deployed = Deployed(load_manifest(manifest))
    server = serve(deployed)

    def served() -> onptq.pipeline.Result:
        options: dict[str, Any] = {"recipe": recipe("vllm"), "verify": False, "policy_endpoint": server.url}
        return onptq.quantize(small, tmp_path / "served", calibration=manifest, **options)

    with pytest.raises(OnPTQError, match=r"serves org/other; expected the quantized model of this round") as refused:
        served()
    assert "then give the same command again" in str(refused.value)
    folder = folder_to_serve(str(refused.value))
    assert folder.is_dir()
    deployed.load(folder)
    deployed.context = 10
    with pytest.raises(OnPTQError, match="takes 10 tokens; expected"):
        served()
    deployed.context = 4096
    result = served()
    ours, theirs = run_home(own.path), run_home(result.path)
    assert load_trajectories(theirs) == load_trajectories(ours)
    for name in load_bank(ours).__dataclass_fields__:
        np.testing.assert_array_equal(getattr(load_bank(theirs), name), getattr(load_bank(ours), name), err_msg=name)
    figures = result.summary["rounds"][0]
    assert {name: value for name, value in figures.items() if not name.startswith("server_")} == own.summary["rounds"][
        0
    ]
    assert (figures["server_near_ties"], figures["server_clear"], figures["server_largest_gap"]) == (0, 0, 0.0)
    assert not folder.exists()
    assert result.summary["checkpoint"]["sha256"] == own.summary["checkpoint"]["sha256"]
    kinds = [path for path, _, _ in server.asked if path != "/v1/models"]
    assert len(kinds) == 4
    (theirs / "summary.json").unlink()
    again = served()
    assert [path for path, _, _ in server.asked if path != "/v1/models"] == kinds
    assert again.summary["rounds"] == result.summary["rounds"]


@pytest.mark.slow
def test_a_server_that_chooses_other_tokens_is_told_from_one_with_near_ties(
    small: Path, tmp_path: Path, serve: Serve
) -> None:
    manifest = small / "prompts.jsonl"
    deployed = Deployed(load_manifest(manifest))
    server = serve(deployed)
    deployed.twist = lambda tokens: [*tokens[:2], 100, *tokens[3:]]
    options: dict[str, Any] = {"recipe": recipe("vllm", rounds=1), "verify": False, "policy_endpoint": server.url}
    with pytest.raises(OnPTQError) as refused:
        onptq.quantize(small, tmp_path / "out", calibration=manifest, **options)
    deployed.load(folder_to_serve(str(refused.value)))
    result = onptq.quantize(small, tmp_path / "out", calibration=manifest, **options)
    figures, home = result.summary["rounds"][0], run_home(result.path)
    assert figures["server_clear"] > 0
    assert figures["server_near_ties"] + figures["server_clear"] == figures["rollout_disagreements"]
    table = Disagreements.read(home / "rounds/0/disagreements.parquet")
    assert (table.gap.min() > 0) & (table.gap.max() == figures["server_largest_gap"])
    log = (home / "log.jsonl").read_text(encoding="utf-8")
    assert "So the server does not compute what the checkpoint says" in log


AT_ONCE = "if '-m' in sys.argv:\n    raise SystemExit('ValueError: no kernel for that')\n"
LATER = """
if "-m" in sys.argv:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            assert self.headers["Authorization"] == "Bearer secret"
            print("ValueError: no kernel for that", flush=True)
            os._exit(4)

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(AT_ONCE, "the server ended while starting, exit code 1"), (LATER, "; vLLM ended with exit code 4")],
    ids=["at once", "at the first request"],
)
def test_a_server_that_dies_is_an_error_with_the_end_of_its_log(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    python, imports = (
        tmp_path / "python",
        "import os, sys\nfrom http.server import BaseHTTPRequestHandler, HTTPServer\n",
    )
    python.write_text(f"#!{sys.executable}\n{imports}{program}", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(OnPTQError) as refused:
        onptq.quantize(
            small, tmp_path / "out", calibration=small / "prompts.jsonl", recipe=recipe("vllm"), vllm_python=python
        )
    assert said in str(refused.value)
    assert str(refused.value).startswith("follow.engine=vllm: ")
    assert "ValueError: no kernel for that" in str(refused.value)
    assert (run_home(tmp_path / "out") / "rounds/0/.vllm.log").is_file()


def test_what_no_run_could_use_is_refused_at_once(small: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(small), "--out", str(tmp_path / "out"), "--calibration", str(small / "prompts.jsonl")]

    def refused(*more: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    served = ("--set", "follow.engine=vllm")
    assert "this recipe has follow.engine=own" in refused("--policy-endpoint", "http://localhost:8000")
    assert "got both" in refused(*served, "--policy-endpoint", "http://a:1", "--vllm-python", "x")
    assert "cannot be split" in refused(*served, "--vllm-args", "'")
    assert "W4A6 is for simulation" in refused(*served, "--scheme", "W4A6")
    assert "is no address" in refused(*served, "--policy-endpoint", "localhost")
    assert "follow.engine=own" in refused(*served, "--method", "offpolicy")
    assert not (tmp_path / "out-run").exists()


def test_gaps_are_those_of_a_prefill_of_every_state_alone(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("qwen3-vl"), *WEIGHT_ONLY)
    policy, random = scenery.policy, np.random.default_rng(3)
    trajectories = []
    for number, ordinal in enumerate(scenery.ordinals):
        tokens = list(scenery.rollout(ordinal, LIMIT - number % 3).tokens)
        if number != 1:  # one response without a disagreement
            tokens[number % len(tokens)] = int(random.integers(400))
        trajectories.append(Trajectory(ordinal, tuple(tokens), False))
    size = scenery.batch_tokens("several", LIMIT)
    prefixes = Prefixes(policy, scenery.encoded(policy), max_tokens=LIMIT, batch_tokens=size)
    states = compare(prefixes, trajectories)
    found = disagreements(prefixes, trajectories, states)
    expected = []
    for one in trajectories:
        for t, token in enumerate(one.tokens, start=1):
            logits = next_logits(policy, "Q", scenery.inputs[one.prompt], one.tokens[: t - 1])
            if token != logits.argmax():
                expected.append((one.prompt, t, token, int(logits.argmax()), logits.max() - logits[token]))
    columns = (found.prompt, found.t, found.token, found.quantized)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [row[:4] for row in expected]
    assert len(found) >= 4
    np.testing.assert_allclose(found.gap, [row[4] for row in expected], rtol=0, atol=1e-5)
    near = sum(row[4] < NEAR_TIE for row in expected)
    figures = found.figures(len(states))
    assert (figures["server_near_ties"], figures["server_clear"]) == (near, len(expected) - near)


def test_a_bank_without_disagreements_has_none(tiny: Callable[[str], Tiny]) -> None:
    scenery = scene(tiny("qwen3-vl"), *WEIGHT_ONLY)
    prefixes = Prefixes(scenery.policy, scenery.encoded(scenery.policy), max_tokens=2)
    trajectories = [scenery.rollout(ordinal, 2) for ordinal in scenery.ordinals]
    none = disagreements(prefixes, trajectories, compare(prefixes, trajectories))
    assert len(none) == 0
    assert none.figures(10) == {
        "server_near_ties": 0,
        "server_clear": 0,
        "server_clear_percent": 0.0,
        "server_largest_gap": 0.0,
    }


def test_a_request_is_drawn_by_the_seed_and_the_prompt_alone() -> None:
    one = drawn(Sampling(0.7, 20, 0.8, seed=5), 3)
    assert (one["temperature"], one["top_k"], one["top_p"]) == (0.7, 20, 0.8)
    assert one == drawn(Sampling(0.7, 20, 0.8, seed=5), 3)
    assert one["seed"] != drawn(Sampling(0.7, 20, 0.8, seed=5), 4)["seed"]
    assert drawn(Sampling(), 0)["top_k"] == -1
    assert drawn(Sampling(repetition_penalty=1.1), 0)["repetition_penalty"] == 1.1
    assert (drawn(Sampling(top_p=0.0), 0)["top_k"], drawn(Sampling(top_p=0.0), 0)["top_p"]) == (1, 1.0)


def test_a_recipe_of_before_reads_as_it_did() -> None:
    assert "engine" not in Recipe().model_dump()["follow"]
    assert recipe("vllm").model_dump()["follow"]["engine"] == "vllm"
    with pytest.raises(OnPTQError, match="vllm writes rollouts of the quantized model"):
        Recipe.preset("default", {"follow.engine": "vllm", "method": "offpolicy"})
