"""The main job, top to bottom: load, encode, initialize, the rounds, fold, export, reload, summarize."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onptq import __version__
from onptq.bank import States
from onptq.cycle.room import Budgets, Keep, free_memory
from onptq.cycle.rounds import Cycle, bank_figures
from onptq.data.calibration import Prompts, gather_prompts, write_prompts
from onptq.data.manifest import manifest_digest
from onptq.data.probes import probe_prompt
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.answers import check_items
from onptq.evaluate.arms import compare_arms, make_arms
from onptq.evaluate.items import Item, items_digest
from onptq.export.card import Calibration, write_card
from onptq.export.card_tables import read_results
from onptq.export.compressed import check_apart, write_checkpoint
from onptq.export.examine import verify_export
from onptq.export.trial import ask, questions
from onptq.files import atomically
from onptq.methods import initialize
from onptq.models.encoding import EncodedPrompt, encode_prompts
from onptq.models.loading import Source, choose_device, choose_dtype, find_source
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.models.structure import LINEARS, NORMS
from onptq.policy import Policy, load_policy
from onptq.progress import Bar, LoggedReporter, QuietReporter, Reporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Run
from onptq.runtime.swap import swap_policy
from onptq.schemes import Scheme

PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors")
T = TypeVar("T")
INIT = "init.safetensors"
SHARE_OF_FREE = 0.5  # of the device's free memory, for prefixes and targets together


@dataclass(frozen=True)
class Result:
    path: Path
    summary: dict[str, Any]


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    calibration: str | Path | Sequence[Prompt] | None = None,
    recipe: Recipe | None = None,
    holdout: str | Path | Sequence[Prompt] | None = None,
    evaluation: Sequence[Item] | None = None,
    reporter: Reporter | None = None,
    verify: bool = True,
    start: Path | None = None,
) -> Result:
    """Quantize `model` into `out`; called again after a kill, it goes on from the last finished step.

    `start` is the file of a theta^(0) that the recipe's base method made of the same prompts before. With `evaluation`, the
    dense model, plain rounding, the static control and the result answer its items, and the
    summary has a `comparison`. The checkpoint is the same either way.
    """
    recipe, reporter = recipe or Recipe(), reporter or QuietReporter()
    scheme = Scheme.parse(recipe.scheme)
    if not scheme.quantizes_weights:
        raise OnPTQError(f"scheme {scheme} leaves the weights in 16 bits: there is nothing to write; expected W2 to W8")
    source = find_source(model)
    check_apart(source.folder, Path(out))
    if calibration is None and recipe.method != "rtn":
        raise OnPTQError(f"method {recipe.method} needs calibration prompts: give a manifest (JSONL or parquet)")
    prompts = gather_prompts(calibration, holdout, recipe.data, source.family.modalities)
    if evaluation is not None:
        check_items(evaluation)
    device = choose_device(recipe.compute.device)
    with reporter.phase("Hash the model", total=len(source.files), unit="files") as bar:
        sha256 = source.sha256(bar.advance)
    identity = _identity(source, sha256, prompts, calibration, recipe, device)
    if evaluation is not None:
        identity["evaluation"] = {"sha256": items_digest(evaluation), "items": len(evaluation)}
    with Run.open(out, identity, warn=reporter.warn) as run:
        if run.finished:
            reporter.note(f"{out} is a finished run; its summary is shown as it was")
            return Result(Path(out), run.read_json("summary.json"))
        logged = LoggedReporter(reporter, run.log)
        if start is not None and not run.has(INIT):
            with run.writing(INIT) as path:
                shutil.copyfile(start, path)
        return _run(source, prompts, recipe, scheme, device, run, logged, evaluation, verify)


def _identity(
    source: Source, sha256: str, prompts: Prompts, calibration: object, recipe: Recipe, device: torch.device
) -> dict[str, Any]:
    return {
        "recipe": recipe.model_dump(),
        "model": {"source": source.name, "family": source.family.name, "sha256": sha256},
        "prompts": {
            "source": str(calibration) if isinstance(calibration, str | Path) else None,
            "sha256": manifest_digest(prompts.every),
            "calibration": len(prompts.calibration),
            "holdout": len(prompts.holdout),
        },
        "seeds": {"recipe": recipe.seed},
        "versions": {
            "onptq": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
    }


def _run(
    source: Source,
    prompts: Prompts,
    recipe: Recipe,
    scheme: Scheme,
    device: torch.device,
    run: Run,
    reporter: LoggedReporter,
    evaluation: Sequence[Item] | None,
    verify: bool,
) -> Result:
    dtype = choose_dtype(recipe.compute.dtype, device, reporter.note)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    with reporter.phase("Load", total=1, unit="checkpoint") as bar:
        policy = load_policy(source, scheme, device=device, dtype=dtype)
        bar.advance()
    calibration, holdout = _encode(policy, processor, prompts, recipe, run, reporter)
    budgets = _budgets(policy, recipe)
    if budgets.keep == "integers":
        swap_policy(policy)
    cycle = Cycle(policy, calibration, holdout, recipe, run, reporter, budgets)

    theta = cycle.rounds(_initialize(policy, calibration, recipe, run, reporter))
    after = cycle.holdout("final", "held-out at the end")
    before = cycle.holdout("rounds/0", "held-out 1") if recipe.rounds else after

    with reporter.phase("Export", total=policy.blocks * len((*LINEARS, *NORMS)), unit="modules") as bar:
        write_checkpoint(
            source.folder,
            run.folder,
            _counted(policy.folded(), bar),
            scheme,
            ignore=source.family.ignore,
            other_models=source.family.other_models,
            method=recipe.method,
            calibration=Calibration.of(prompts),
        )
    summary = {
        "scheme": str(scheme),
        "method": recipe.method,
        "model": source.name,
        "prompts": {"calibration": len(calibration), "holdout": len(holdout)},
        "rounds": _round_figures(run, recipe),
        "holdout": {
            "initial": None if before is None else bank_figures(before.states),
            "final": None if after is None else bank_figures(after.states),
        },
        "checkpoint": {"bytes": sum(file.stat().st_size for file in run.folder.glob("*.safetensors"))},
    }
    if evaluation is not None:
        arms = make_arms(cycle, lambda: _start(policy, run), theta)
        summary["comparison"] = compare_arms(cycle, arms, evaluation, processor)
        cycle.speak_as(theta)
    _write_card(source, prompts, recipe, scheme, run)
    if verify:
        tried = [processor(prompt) for prompt in (probe_prompt(source.family.modalities), *prompts.calibration[:1])]
        with reporter.phase("Verify", total=len(tried), unit="prompts") as bar:
            policy.attach(theta)  # simulated, as whoever loads the checkpoint does
            expected = [_graph_logits(policy, inputs) for inputs in tried]
            with policy.speaking("D"):
                dense = ask(policy.model, questions(processor), processor.tokenizer, source.eos())
            cycle.release()
            policy.release()
            inputs = [one.tensors for one in tried]
            found, checks = verify_export(
                run.folder, source, processor, inputs, expected, dense, dtype=dtype, device=device
            )
            bar.advance(len(tried))
        for check in checks:
            if not check.passed:
                reporter.warn(f"{check.name}: the checkpoint {check.seen}")
        summary["verification"] = asdict(found) | {"checks": [asdict(check) for check in checks]}
    summary["seconds"] = _phase_seconds(run)
    run.write_json(summary, "summary.json")
    return Result(run.folder, summary)


def _write_card(source: Source, prompts: Prompts, recipe: Recipe, scheme: Scheme, run: Run) -> None:
    """The model card again, now with what the run has measured."""
    results = read_results(run.file(), recipe.method, recipe.seed)
    made = Calibration.of(prompts)
    card = write_card(source.folder, source.config, scheme, recipe.method, made, results, source.name)
    with atomically(run.folder / "README.md") as path:
        path.write_text(card, encoding="utf-8")


def _encode(
    policy: Policy, processor: PromptProcessor, prompts: Prompts, recipe: Recipe, run: Run, reporter: Reporter
) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Towers run once per prompt, for everybody; what exactly went in is written down."""
    most, ordinals = [recipe.follow.max_tokens] * len(prompts.every), [prompt.ordinal for prompt in prompts.every]
    with reporter.phase("Encode", total=len(prompts.every), unit="prompts") as bar:
        encoded = encode_prompts(policy, processor, prompts.every, most, ordinals, bar.advance)
    if encoded and not run.has("prompts.parquet"):
        with run.writing("prompts.parquet") as path:
            write_prompts(prompts, [prompt.ids.tolist() for prompt in encoded], path)
    count = len(prompts.calibration)
    return encoded[:count], encoded[count:]


def _initialize(
    policy: Policy, prompts: Sequence[EncodedPrompt], recipe: Recipe, run: Run, reporter: Reporter
) -> Theta:
    """theta^(0), computed once and kept: every arm of a comparison can start from the same file."""
    if not run.has(INIT):
        with reporter.phase(f"Initialize ({recipe.init})", total=policy.blocks, unit="blocks") as bar:
            theta = initialize(policy, prompts, recipe, bar.advance, settled=recipe.settles)
        run.write_behind(theta.saving(), INIT)
        return theta
    return _start(policy, run)


def _start(policy: Policy, run: Run) -> Theta:
    return Theta.load(run.file(INIT), policy.device)


def _budgets(policy: Policy, recipe: Recipe) -> Budgets:
    """Half of what is free, shared by prefixes and targets; Q's weights stay as integers, floats or codes where these fit beside
    that."""
    free, cache = free_memory(policy.device), recipe.compute.cache_gib
    budget = int(SHARE_OF_FREE * free) if cache is None else int(cache * 2**30)
    parameters = [parameter for block in policy.structure.blocks for parameter in block.module.parameters()]
    floats, codes = sum(one.nbytes for one in parameters), sum(one.numel() for one in parameters)
    keep = keep_of_q(free, cache, floats, codes, recipe, policy.device.type == "cuda")
    return Budgets(budget // 2, budget // 2, keep)


def keep_of_q(free: int, cache_gib: float | None, floats: int, codes: int, recipe: Recipe, on_gpu: bool) -> Keep:
    """By the bytes of Q's weights as floats and as codes. Settled codes are theta's own and cost nothing."""
    codes_fit = recipe.settles or codes < SHARE_OF_FREE * free
    if codes_fit and on_gpu and recipe.multiplies_integers:
        return "integers"
    if cache_gib is None and floats < SHARE_OF_FREE * free / 2:
        return "floats"
    return "codes" if codes_fit else "nothing"


def _counted(items: Iterable[T], bar: Bar) -> Iterator[T]:
    for item in items:
        yield item
        bar.advance()


def _phase_seconds(run: Run) -> dict[str, float]:
    """What every finished phase took, whichever process finished it."""
    seconds: dict[str, float] = {}
    for event in run.events():
        if event["event"] == "phase" and event["state"] == "end":
            seconds[event["phase"]] = round(seconds.get(event["phase"], 0.0) + event["seconds"], 3)
    return seconds


def _round_figures(run: Run, recipe: Recipe) -> list[dict[str, Any]]:
    banks = (run.file("rounds", str(k), "bank.parquet") for k in range(recipe.rounds))
    own = (event for event in run.events() if "arm" not in event)
    steps = {event["round"]: event for event in own if event["event"] == "calibrated"}
    return [
        bank_figures(States.read(bank)) | {key: steps[k][key] for key in ("steps", "best_step") if k in steps}
        for k, bank in enumerate(banks)
    ]


@torch.no_grad()
def _graph_logits(policy: Policy, inputs: ModelInputs) -> Tensor:
    tensors: Mapping[str, Tensor] = {name: tensor.to(policy.device) for name, tensor in inputs.tensors.items()}
    with policy.speaking("Q"):
        logits: Tensor = policy.model(**tensors, use_cache=False).logits
    return logits.float().cpu()
