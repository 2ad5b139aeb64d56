"""What a run leaves behind is a public contract: names, columns, types and meanings, as docs/run-folder.md says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import Tiny
from safetensors.torch import load_file
from test_bank import CONTRACT

import onptq
from onptq.data.calibration import in_order, split
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.evaluate.guard import CALIBRATED_ELSEWHERE, INIT_ELSEWHERE
from onptq.models.structure import LINEARS, NORMS, READERS
from onptq.recipe import Recipe
from onptq.run import run_home

ROUNDS, CALIBRATION, HOLDOUT, TOKENS, HORIZON = 2, 5, 3, 8, 4
CHANGES = {
    "rounds": ROUNDS,
    "seed": 11,
    "init_steps": 4,
    "data.prompts": CALIBRATION,
    "data.holdout": HOLDOUT,
    "follow.max_tokens": TOKENS,
    "branch.horizon": HORIZON,
    "select.budget": 9,
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.gamma": 0.2,
    "compute.device": "cpu",
}
MEDIA = pa.list_(pa.struct([("path", pa.string()), ("sha256", pa.string()), ("bytes", pa.binary())]))
PROMPTS = {
    "ordinal": pa.int32(),
    "id": pa.string(),
    "role": pa.string(),
    "input_ids": pa.list_(pa.int32()),
    "images": MEDIA,
    "audios": MEDIA,
    "messages": pa.string(),
    "task": pa.string(),
    "reference": pa.string(),
}
TRAJECTORIES = {"prompt": pa.int32(), "response": pa.list_(pa.int32()), "finished": pa.bool_()}
ROUND_FILES = ("trajectories.parquet", "bank.parquet", "theta.safetensors", "update.json")
DETAIL_FILES = ("mismatches.parquet", "details.parquet")
HELD_OUT_FILES = ("holdout_trajectories.parquet", "holdout.parquet")


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny]) -> Tiny:
    return tiny("qwen2.5-omni")  # images and audio


@pytest.fixture(scope="module")
def run(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("outputs") / "run"
    onptq.quantize(model.folder, out, calibration=model.manifest, recipe=Recipe.preset("risk", CHANGES))
    yield out
    torch.set_num_threads(threads)


def names(table: pa.Table) -> dict[str, pa.DataType]:
    return {column.name: column.type for column in table.schema}


def columns(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def rows(path: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return table


def bank(run: Path, k: int) -> dict[str, np.ndarray]:
    return columns(run_home(run) / f"rounds/{k}/bank.parquet")


def states_files(run: Path) -> list[tuple[Path, Path]]:
    """Every table of states with the trajectories it visits."""
    held_out = [run_home(run) / part for part in ("rounds/0", "rounds/1", "final", "rtn/final")]
    rounds = [run_home(run) / f"rounds/{k}" for k in range(ROUNDS)]
    return [(folder / "holdout.parquet", folder / "holdout_trajectories.parquet") for folder in held_out] + [
        (folder / "bank.parquet", folder / "trajectories.parquet") for folder in rounds
    ]


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_files_of_a_run_are_these_and_no_others(run: Path, model: Tiny) -> None:
    expected = {
        ".lock",
        "SHA256SUMS",
        "recipe.yaml",
        "summary.json",
        "log.jsonl",
        "prompts.parquet",
        "previews.parquet",
        "tokens.json",
        "init.safetensors",
    }
    expected |= {f"{part}/{name}" for part in ("final", "rtn/final") for name in HELD_OUT_FILES}
    expected |= {f"final/{name}" for name in ("choice.json", "dense_trajectories.parquet", *DETAIL_FILES)}
    expected |= {CALIBRATED_ELSEWHERE, INIT_ELSEWHERE}
    of_round = (*ROUND_FILES, *HELD_OUT_FILES, "details.parquet")
    expected |= {f"rounds/{k}/{name}" for k in range(ROUNDS) for name in of_round}
    home = run_home(run)
    assert home == run.with_name(f"{run.name}-run")
    assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} == expected
    checkpoint = {path.name for path in run.iterdir()}
    assert checkpoint >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"}
    assert not [name for name in checkpoint if name.startswith(".")]


def test_the_checkpoint_folder_holds_nothing_of_the_prompts(run: Path, model: Tiny) -> None:
    """What one uploads: no text, id, media, hash or path of a prompt, and no answer."""
    prompts = load_manifest(model.manifest)[: CALIBRATION + HOLDOUT]
    texts = {part["text"] for one in prompts for turn in one.messages for part in turn["content"] if "text" in part}
    media = [one for prompt in prompts for one in (*prompt.images, *prompt.audios)]
    private = {text.encode() for text in texts if len(text) > 8}
    private |= {one.sha256.encode() for one in media} | {one.read()[:200] for one in media}
    private |= {str(place).encode() for place in (model.folder, model.manifest, run.parent)}
    assert len(private) > CALIBRATION
    for path in run.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert [text for text in private if text in content] == [], path
        assert path.suffix not in (".parquet", ".jsonl")


def test_the_sums_are_those_of_the_files_that_are_there(run: Path) -> None:
    home = run_home(run)
    lines = (home / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    unsummed = {".lock", "SHA256SUMS", "log.jsonl"}
    assert sums.keys() == {str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.name not in unsummed}
    assert {name: hashlib.sha256((home / name).read_bytes()).hexdigest() for name in sums} == sums


def test_the_document_names_every_file_and_every_column() -> None:
    text = (Path(__file__).parents[2] / "docs/run-folder.md").read_text()
    documented = set(re.findall(r"`([^`\s]+)`", text))
    files = {
        *ROUND_FILES,
        *HELD_OUT_FILES,
        "choice.json",
        CALIBRATED_ELSEWHERE,
        INIT_ELSEWHERE,
        "recipe.yaml",
        "summary.json",
        "log.jsonl",
        "prompts.parquet",
        "previews.parquet",
        "tokens.json",
        "init.safetensors",
    }
    assert {name for name in files if not any(entry.endswith(name) for entry in documented)} == set()
    for table in (CONTRACT, PROMPTS, TRAJECTORIES):
        assert table.keys() <= documented


def test_every_file_may_be_read_by_whom_the_umask_lets(run: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    modes = {str(path.relative_to(run)): stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*") if path.is_file()}
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~umask} == {}


# --- recipe, summary, log -------------------------------------------------------------------------------------------


def test_the_record_holds_recipe_versions_seeds_and_hashes(run: Path, model: Tiny) -> None:
    record = yaml.safe_load((run_home(run) / "recipe.yaml").read_text())
    assert list(record) == ["contract", "recipe", "model", "prompts", "seeds", "versions"]
    assert record["contract"] == 2
    assert record["recipe"] == Recipe.preset("risk", CHANGES).model_dump()
    assert record["model"] == {
        "source": str(model.folder),
        "family": "qwen2.5-omni",
        "sha256": model.source.sha256(),
    }
    assert {key: record["prompts"][key] for key in ("source", "calibration", "holdout")} == {
        "source": str(model.manifest), "calibration": CALIBRATION, "holdout": HOLDOUT,
    }  # fmt: skip
    assert re.fullmatch("[0-9a-f]{64}", record["prompts"]["sha256"])
    assert record["seeds"] == {"recipe": 11}
    assert record["versions"].keys() >= {
        "python",
        "onptq",
        "torch",
        "transformers",
        "compressed-tensors",
        "safetensors",
    }
    assert record["versions"]["torch"] == version("torch")


def responses(run: Path, name: str) -> dict[int, list[int]]:
    table = columns(run_home(run) / name)
    return {int(prompt): list(tokens) for prompt, tokens in zip(table["prompt"], table["response"], strict=True)}


def test_the_summary_is_counted_from_the_tables(run: Path) -> None:
    summary = json.loads((run_home(run) / "summary.json").read_text())
    assert summary.keys() >= {"scheme", "method", "model", "prompts", "rounds", "holdout", "checkpoint", "seconds"}
    tables = [(summary["rounds"][k], bank(run, k)) for k in range(ROUNDS)]
    for name, part in (("rtn", "rtn/final"), ("initial", "rounds/0"), ("calibrated", "final")):
        tables.append((summary["holdout"][name], columns(run_home(run) / f"{part}/holdout.parquet")))
    for figures, states in tables:
        assert figures["states"] == len(states["t"])
        assert figures["mismatches"] == (states["kind"] == "mismatch").sum()
        assert figures["near_misses"] == (states["kind"] == "near_miss").sum()
        assert figures["mismatch_percent"] == pytest.approx(100 * (states["kind"] == "mismatch").mean())
        for name in ("erosion", "js", "kl"):
            assert figures[name] == pytest.approx(states[name].mean(), rel=1e-5)
        assert figures["critical"] == states["critical"].sum()
        assert figures["critical_prompts"] == len(set(states["prompt"][states["critical"]]))
        branched = states["horizon"] > 0
        assert figures["consequence"] == pytest.approx(
            states["consequence"][branched].mean() if branched.any() else 0, rel=1e-5
        )
        assert figures["rollout_disagreements"] == (states["token"] != states["quantized"]).sum()
        assert figures["first_fork"] == pytest.approx(first_fork(states))
    dense = responses(run, "final/dense_trajectories.parquet")
    for name, part in (("rtn", "rtn/final"), ("initial", "rounds/0"), ("calibrated", "final")):
        other = responses(run, f"{part}/holdout_trajectories.parquet")
        assert other.keys() == dense.keys()
        changed = sum(other[prompt] != dense[prompt] for prompt in dense)
        assert summary["holdout"][name]["reworded_percent"] == pytest.approx(100 * changed / len(dense))
    assert [figures["steps"] for figures in summary["rounds"]] == [3] * ROUNDS
    assert all(0 <= figures["best_step"] <= 3 for figures in summary["rounds"])


def first_fork(states: dict[str, np.ndarray]) -> float:
    """Tokens before the first mismatch of each prompt, its whole response where there is none."""
    common = []
    for prompt in sorted(set(states["prompt"].tolist())):
        kinds = states["kind"][states["prompt"] == prompt].tolist()
        common.append(kinds.index("mismatch") if "mismatch" in kinds else len(kinds))
    return float(np.mean(common))


def test_the_log_is_json_lines_with_time_and_event(run: Path) -> None:
    events = [json.loads(line) for line in (run_home(run) / "log.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", event["time"]) for event in events)
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert events[0]["event"] == "open"
    assert {event["event"] for event in events} >= {"open", "phase", "bank", "step", "calibrated"}
    ended = [event["phase"] for event in events if event["event"] == "phase" and event["state"] == "end"]
    steps = [f"{step} {k + 1}" for k in range(ROUNDS) for step in ("Follow", "Compare", "Branch", "Calibrate")]
    assert [phase for phase in ended if phase in steps] == steps
    updates = [(event["round"], event["step"]) for event in events if event["event"] == "step"]
    assert updates == [(k, step) for k in range(ROUNDS) for step in (1, 2, 3)]


# --- prompts --------------------------------------------------------------------------------------------------------


def test_the_prompts_table_says_exactly_what_went_in(run: Path, model: Tiny) -> None:
    table = pq.read_table(run_home(run) / "prompts.parquet")
    assert names(table) == PROMPTS
    given = load_manifest(model.manifest)
    chosen, held_out = split(given, prompts=CALIBRATION, holdout=HOLDOUT, share=0.125, seed=11)
    for row, prompt in zip(table.to_pylist(), [*in_order(chosen), *in_order(held_out)], strict=True):
        assert (row["ordinal"], row["id"]) == (prompt.ordinal, prompt.id)
        assert row["role"] == ("calibration" if prompt in chosen else "holdout")
        assert row["input_ids"] == model.processor(prompt).input_ids[0].tolist()
        for kind in ("images", "audios"):
            assert len(row[kind]) == len(getattr(prompt, kind))
            for media in row[kind]:
                assert media["bytes"] is None
                assert Path(media["path"]).is_absolute()
                assert hashlib.sha256(Path(media["path"]).read_bytes()).hexdigest() == media["sha256"]
    assert any(row["images"] for row in table.to_pylist())
    assert any(row["audios"] for row in table.to_pylist())


def test_generated_media_are_embedded_in_the_prompts_table(model: Tiny, tmp_path: Path) -> None:
    from onptq.check.probes import probe_prompt

    generated: Prompt = probe_prompt(model.source.family.modalities)
    rtn = Recipe.preset("risk", {"method": "rtn", "follow.max_tokens": 4, "compute.device": "cpu"})
    onptq.quantize(model.folder, tmp_path / "run", calibration=[generated], recipe=rtn, verify=False)
    [row] = rows(run_home(tmp_path / "run") / "prompts.parquet")
    for kind in ("images", "audios"):
        [media] = row[kind]
        assert media["path"] is None
        assert media["bytes"] == getattr(generated, kind)[0].data
        assert media["sha256"] == hashlib.sha256(media["bytes"]).hexdigest()


# --- trajectories and states ----------------------------------------------------------------------------------------


def test_trajectories_hold_exact_responses_of_every_prompt_once(run: Path, model: Tiny) -> None:
    prompts = {row["ordinal"]: row for row in rows(run_home(run) / "prompts.parquet")}
    eos = set(model.source.eos())
    for states, visited in states_files(run):
        role = "holdout" if states.name == "holdout.parquet" else "calibration"
        assert names(pq.read_table(visited)) == TRAJECTORIES
        table = rows(visited)
        assert [row["prompt"] for row in table] == [n for n, row in prompts.items() if row["role"] == role]
        for row in table:
            assert 1 <= len(row["response"]) <= TOKENS
            assert row["finished"] == (row["response"][-1] in eos)
            assert not eos & set(row["response"][:-1])
            assert row["finished"] or len(row["response"]) == TOKENS


def test_one_row_per_visited_state_in_order_with_the_token_that_was_written(run: Path) -> None:
    for path, visited in states_files(run):
        assert names(pq.read_table(path)) == CONTRACT
        states = columns(path)
        expected = [
            (row["prompt"], t, token) for row in rows(visited) for t, token in enumerate(row["response"], start=1)
        ]
        assert list(zip(states["prompt"], states["t"], states["token"], strict=True)) == expected


def test_decisions_margins_and_kinds_agree_with_their_definitions(run: Path) -> None:
    seen = set()
    for path, _ in states_files(run):
        states = columns(path)
        mismatch, near = states["kind"] == "mismatch", states["kind"] == "near_miss"
        seen |= set(states["kind"].tolist())
        assert set(states["kind"]) <= {"agree", "near_miss", "mismatch"}
        assert np.array_equal(mismatch, states["reference"] != states["quantized"])
        assert np.array_equal(states["competitor"][mismatch], states["quantized"][mismatch])
        assert (states["competitor"] != states["reference"]).all()
        assert (states["margin_dense"] >= 0).all()
        assert (states["margin_quant"][mismatch] <= 0).all()
        assert (states["margin_quant"][~mismatch] >= 0).all()
        lost = np.maximum(states["margin_dense"] - states["margin_quant"], 0)
        assert np.allclose(states["erosion"], lost, atol=1e-6)
        assert (states["erosion"][mismatch] > 0).all()
        assert np.array_equal(near, ~mismatch & (states["erosion"] > 0))
        assert ((states["js"] >= -1e-7) & (states["js"] <= np.log(2) + 1e-6)).all()
        assert (states["kl"] >= -1e-6).all()
    assert seen == {"agree", "near_miss", "mismatch"}


def test_branches_risk_and_weights_agree_with_their_definitions(run: Path) -> None:
    for k in range(ROUNDS):
        states = bank(run, k)
        candidate = states["kind"] != "agree"
        assert not states["horizon"][~candidate].any()
        assert not states["consequence"][~candidate].any()
        assert ((states["horizon"] >= 0) & (states["horizon"] <= HORIZON)).all()
        assert states["horizon"].max() == HORIZON
        assert not states["consequence"][states["horizon"] == 0].any()
        assert ((states["consequence"] >= -1e-7) & (states["consequence"] <= np.log(2) + 1e-6)).all()
        eq9 = states["erosion"] * (1 + states["consequence"]) + states["js"]
        assert np.allclose(states["risk"], np.where(candidate, eq9, 0), rtol=1e-5, atol=1e-7)
        order = np.lexsort((states["t"], states["prompt"], -states["risk"]))
        chosen = [row for row in order if candidate[row]][:9]
        assert np.flatnonzero(states["critical"]).tolist() == sorted(chosen)
        expected = np.where(states["critical"], states["risk"], 0) / states["risk"][states["critical"]].sum()
        assert np.allclose(states["weight"], expected, rtol=1e-5)
        assert states["weight"].sum() == pytest.approx(1, abs=1e-6)


def test_held_out_states_are_compared_and_nothing_else(run: Path) -> None:
    for path, _ in states_files(run):
        if path.name == "holdout.parquet":
            states = columns(path)
            assert not any(states[name].any() for name in ("horizon", "consequence", "risk", "critical", "weight"))


# --- theta and the checkpoint ---------------------------------------------------------------------------------------


def test_theta_has_a_vector_per_pair_a_step_ratio_per_row_and_what_its_codes_need(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())["thinker_config"]["text_config"]
    hidden, ffn, heads, kv = (config[name] for name in WIDTHS)
    wide = {"norm_qkv": hidden, "norm_gate_up": hidden, "v_o": hidden // heads * kv, "up_down": ffn}
    tall = {"q_proj": hidden, "k_proj": wide["v_o"], "v_proj": wide["v_o"], "o_proj": hidden}
    tall |= {"gate_proj": ffn, "up_proj": ffn, "down_proj": hidden}
    layers = range(config["num_hidden_layers"])
    scales: dict[str, tuple[int, ...]] = {
        f"smoothing/layers.{n}.{pair}": (width,) for n in layers for pair, width in wide.items()
    }
    settled: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        for name, (parent, _) in LINEARS.items():
            path, rows = f"layers.{layer}.{parent}.{name}", (tall[name], 1)
            columns = wide[next(pair for pair, names in READERS.items() if name in names)] * (
                heads // kv if name == "o_proj" else 1
            )
            scales[f"ratio/{path}"] = settled[f"step/{path}"] = rows
            settled[f"halved/{path}"] = tall[name], columns // 2
    updates = [json.loads((run_home(run) / f"rounds/{k}/update.json").read_text()) for k in range(ROUNDS)]
    best = [update["best_step"] for update in updates]
    moved = {f"rounds/{k}/theta.safetensors" for k in range(ROUNDS) if any(best[: k + 1])}
    for name in ("init.safetensors", *(f"rounds/{k}/theta.safetensors" for k in range(ROUNDS))):
        theta = load_file(run_home(run) / name)
        assert {key: tuple(tensor.shape) for key, tensor in theta.items()} == scales | settled
        for key, tensor in theta.items():
            assert tensor.dtype == (torch.uint8 if key.startswith("halved/") else torch.float32)
            assert bool(tensor.isfinite().all())
        ratios = [tensor for key, tensor in theta.items() if key.startswith("ratio/")]
        assert any(bool(ratio.any()) for ratio in ratios) == (name in moved), "they count from the step"


WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def test_only_the_decoders_linears_and_norms_differ_from_the_model(run: Path, model: Tiny) -> None:
    before, after = load_file(model.folder / "model.safetensors"), load_file(run / "model.safetensors")
    changed = {name for name in before if name not in after or not torch.equal(before[name], after[name])}
    decoder = re.compile(
        rf"thinker\.model\.layers\.\d+\.(self_attn|mlp)?\.?({'|'.join((*LINEARS, *NORMS))})\.(weight|bias)"
    )
    assert changed
    assert [name for name in sorted(changed) if not decoder.fullmatch(name)] == []
    linears = {name for name in before if re.search(r"thinker\.model\.layers\.\d+\..*_proj\.weight", name)}
    assert len(linears) == 14
    assert linears <= changed


def test_the_source_is_untouched(run: Path, model: Tiny) -> None:
    record = yaml.safe_load((run_home(run) / "recipe.yaml").read_text())
    assert model.source.sha256() == record["model"]["sha256"]
    assert not run_home(model.folder).exists()
