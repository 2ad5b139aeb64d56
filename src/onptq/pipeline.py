"""The pipeline of a quantization: check, load, encode, initialize, rounds, measure, export, reload and check."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onptq import __version__, methods
from onptq.bank import ROLLOUTS, Trajectory
from onptq.check.examine import verify_export
from onptq.check.probes import probe_prompt
from onptq.check.trial import Answer, ask, questions
from onptq.checkpoint.companions import check_room, companion_bytes, companions
from onptq.checkpoint.exportable import check_apart, check_cached, check_exportable, check_groups, output_bytes
from onptq.checkpoint.folder import CONFIG, INDEX
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source, is_hub_id
from onptq.checkpoint.write import write_checkpoint
from onptq.cycle.calibrate import Holdout
from onptq.cycle.expert_tokens import cold_warning, expert_summary
from onptq.cycle.inputs import Inputs
from onptq.cycle.rounds import Cycle, bank_figures
from onptq.cycle.served import ServedPolicy
from onptq.data.calibration import Prompts, check_on_bad_prompt, gather_prompts, write_run_prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.engine.agreement import check_agreement
from onptq.engine.budget import cached_bytes, give_back_memory
from onptq.engine.memory import free_memory, host_free, peak_memory
from onptq.engine.prompts import EncodedPrompts
from onptq.errors import OnPTQError
from onptq.evaluate.details import LIGHT, check_level
from onptq.evaluate.guard import keep_better
from onptq.evaluate.model_card import read_provenance, read_results
from onptq.evaluate.previews import keep_previews
from onptq.evaluate.run_details import RoundDetails, keep_details
from onptq.evaluate.store import write_tokens
from onptq.files import file_sha256
from onptq.methods.experts import check_method
from onptq.methods.resume import RunStore
from onptq.models.encoding import EncodedPrompt, encode_each
from onptq.models.language_model import Side
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.models.sharding import Layout
from onptq.page.card_picture import card_picture
from onptq.plan.layouts import WHERE, layout_of_run
from onptq.plan.machine import Machine
from onptq.progress import Bar, LoggedReporter, QuietReporter, Reporter, SilentReporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.ranks import Ranks, is_first, join
from onptq.recipe import Recipe
from onptq.run import CALIBRATED, CHOICE, INIT, INIT_KEPT, SUMMARY, Run, check_place, is_contract_1, remove, run_home
from onptq.schemes import Scheme
from onptq.serving.vllm import Vllm
from onptq.shared_run import open_run

WEIGHTS = "*.safetensors"
SKIPPED = "skipped.json"
PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors")
T = TypeVar("T")
SIDES: tuple[Side, Side] = ("D", "Q")


@dataclass(frozen=True)
class Result:
    path: Path
    summary: dict[str, Any]
    prompts: Prompts


@dataclass(frozen=True)
class Job:
    """The checked inputs of a quantization."""

    source: Source
    out: Path
    recipe: Recipe
    scheme: Scheme
    prompts: Prompts
    manifest: str | None  # of the calibration prompts, as the user named it
    device: torch.device
    vllm: Vllm

    @property
    def served(self) -> ServedPolicy | None:
        """Who writes the rollouts, where it is not this package."""
        served = self.recipe.rounds and self.recipe.follow.engine == "vllm"
        return ServedPolicy(self.source, self.prompts.calibration, self.vllm) if served else None


def quantize(
    model: str | Path | Source,
    out: str | Path,
    *,
    calibration: str | Path | Sequence[Prompt] | None = None,
    recipe: Recipe | None = None,
    holdout: str | Path | Sequence[Prompt] | None = None,
    reporter: Reporter | None = None,
    verify: bool = True,
    start: Path | None = None,
    on_bad_prompt: str = "fail",
    detail: str = LIGHT,
    held_out_detail: str | None = None,
    policy_endpoint: str | None = None,
    vllm_python: str | Path | None = None,
    vllm_args: Sequence[str] = (),
) -> Result:
    """Quantize `model` into the folder `out`; called again after a kill, go on after the last finished step.

    `start` is the file of a theta^(0) to use instead of the recipe's base method. `on_bad_prompt` is `fail`, or `skip` to
    leave out prompts that cannot be read or that the model cannot take. `detail` is how much of single states is kept for the
    page: `off`, `light` or `full`; `held_out_detail` the same of held-out states alone. With `follow.engine=vllm` a server at
    `policy_endpoint` writes the rollouts, or one that is started by `vllm_python` (else by that of ONPTQ_VLLM_PYTHON, or this
    one) with `vllm_args`.
    """
    reporter = reporter or (QuietReporter() if is_first() else SilentReporter())
    recipe = recipe or Recipe()
    held_out_detail = detail if held_out_detail is None else held_out_detail
    for level in (detail, held_out_detail):
        check_level(level)
    vllm = Vllm.given(policy_endpoint, vllm_python, vllm_args)
    with join(recipe.compute.device) as ranks:
        device = torch.device(ranks.lead(lambda: str(check_settings(Path(out), recipe, calibration, holdout))))
        if ranks.size > 1:
            device = choose_device(device.type)  # the rank's own GPU
        job = ranks.after_first(
            lambda: check(model, Path(out), recipe, calibration, holdout, on_bad_prompt, device, reporter, vllm)
        )
        with open_run(out, run_home(out), lambda: identify(job, reporter), ranks, reporter.warn) as run:
            logged = LoggedReporter(reporter, run.log, partial(peak_memory, job.device))
            summary = ranks.lead(lambda: finished(job, run, logged))
            if summary is None:
                summary = work(job, run, logged, start, verify, detail, held_out_detail)
    return Result(job.out, summary, job.prompts)


def work(
    job: Job,
    run: Run,
    reporter: LoggedReporter,
    start: Path | None,
    verify: bool,
    detail: str,
    held_out_detail: str,
) -> dict[str, Any]:
    """The summary of the run, worked on from the first step that is not finished to the end. Of several processes, only the
    first has that of the checkpoint, too."""
    if start is not None and run.ranks.is_first and not run.has(INIT):
        with run.writing(INIT) as path:
            shutil.copyfile(start, path)
    run.ranks.lead(lambda: check_server(job, run))
    processor = open_processor(job.source, job.recipe)
    policy = load(job, run.ranks, reporter)
    prompts, held_out = encode_prompts(job, policy, processor, run, reporter, detail)
    inputs = Inputs(policy, prompts, held_out, job.recipe, run, reporter.warn, job.source.generation)
    cycle = Cycle(inputs, job.recipe, run, reporter, RoundDetails(detail), job.served)
    theta = cycle.rounds(initialize(job, policy, prompts, run, reporter))
    theta = keep_better(cycle, theta, partial(read_init, policy, run))
    summary, held_out_states = measure(job, cycle, theta)
    with ExitStack() as verifying:

        def conclude() -> Graph | None:
            """The first process writes; the others have parts of the weights."""
            warn_of_no_help(summary, reporter)
            if (cold := cold_warning(summary.get("experts", {}))) is not None:
                reporter.warn(cold)
            keep_details(cycle, held_out_states, held_out_detail)
            for side in SIDES:  # nobody is asked until the checkpoint is reloaded
                cycle.inputs.forget(side)
            policy.drop_floats()
            summary["checkpoint"] = export(job, policy, run, reporter)
            if not verify:
                return None
            total = 1 + bool(job.prompts.calibration)
            bar = verifying.enter_context(reporter.phase("Verify", total=total, unit="prompts"))
            return graph_answers(job, cycle, theta, processor, bar)

        graph = run.ranks.first_alone(conclude)
        run.ranks.leave()  # the rest is for one process; compressed-tensors would share it among all it sees
        if not run.ranks.is_first:
            return summary
        write_tokens(run, processor.tokenizer)
        checked = None if graph is None else reload_and_check(job, policy, graph, processor, reporter)
    if checked is not None:
        summary["verification"] = checked
    summary["seconds"] = run.seconds()
    run.finish(summary)
    return summary


def check(
    model: str | Path | Source,
    out: Path,
    recipe: Recipe,
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
    on_bad_prompt: str,
    device: torch.device,
    reporter: Reporter,
    vllm: Vllm,
) -> Job:
    """Refuse before any work what would fail later, beside what `check_settings` refuses."""
    check_on_bad_prompt(on_bad_prompt)
    if not isinstance(model, Source) and not is_hub_id(str(model)):
        model = find_source(model)
    if calibration is None and recipe.needs_prompts:
        fetched = "" if isinstance(model, Source) else f"; {str(model)!r} is no folder here and would be fetched"
        raise OnPTQError(
            f"method {recipe.method} needs --calibration, a .jsonl or .parquet manifest of prompts{fetched}"
        )
    source = model if isinstance(model, Source) else find_source(model)
    check_apart(source.folder, out)
    check_apart(source.folder, run_home(out))
    scheme = Scheme.parse(recipe.scheme)
    if recipe.rounds and recipe.follow.engine == "vllm":
        vllm.check(scheme)
    check_exportable(source)
    check_groups(source, scheme)
    check_cached(source, scheme)
    check_method(recipe.init, source.family)
    if not (out / CONFIG).exists():
        check_room(out, output_bytes(source, scheme) + companion_bytes(source.folder))
    seed = None if is_contract_1(out) else recipe.seed
    prompts = _gather(source, calibration, holdout, recipe, seed, on_bad_prompt, reporter)
    named = str(calibration) if isinstance(calibration, str | Path) else None
    return Job(source, out, recipe, scheme, prompts, named, device, vllm)


def check_settings(
    out: Path,
    recipe: Recipe,
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
) -> torch.device:
    """Refuse what can be refused without the model; return the device."""
    if not Scheme.parse(recipe.scheme).quantizes_weights:
        raise OnPTQError(
            f"scheme {recipe.scheme} leaves the weights in 16 bits: there is nothing to write; expected W2 to W8"
        )
    for manifest in (calibration, holdout):
        if isinstance(manifest, str | Path) and not Path(manifest).exists():
            raise OnPTQError(f"cannot read the manifest {manifest}: no such file; expected a .jsonl or .parquet file")
    check_place(out, run_home(out))
    return choose_device(recipe.compute.device)


def _gather(
    source: Source,
    calibration: str | Path | Sequence[Prompt] | None,
    holdout: str | Path | Sequence[Prompt] | None,
    recipe: Recipe,
    seed: int | None,
    on_bad_prompt: str,
    reporter: Reporter,
) -> Prompts:
    """The prompts of the run, with a line on how many are used and a warning where that is worth one."""
    usable = None
    if on_bad_prompt == "skip":
        processor = open_processor(source, recipe)
        usable = partial(processor.check, max_new=recipe.follow.max_tokens)
    modalities = source.family.modalities
    prompts = gather_prompts(
        calibration, holdout, recipe.data, modalities, seed=seed, usable=usable, note=reporter.note
    )
    for text in prompts.warnings(recipe.rounds > 0):
        reporter.warn(text)
    if prompts.every:
        reporter.note(prompts.describe())
    return prompts


def open_processor(source: Source, recipe: Recipe) -> PromptProcessor:
    return PromptProcessor.from_folder(source.folder, source.family, source.config, recipe.data.special_tokens)


def identify(job: Job, reporter: Reporter) -> dict[str, Any]:
    """Everything that makes this run the same as another one: see `Run.open`."""
    with reporter.phase("Hash the model", total=len(job.source.files), unit="files") as bar:
        sha256 = job.source.sha256(bar.advance)
    return {
        "recipe": job.recipe.model_dump(),
        "model": {"source": job.source.name, "family": job.source.family.name, "sha256": sha256},
        "prompts": {
            "source": job.manifest,
            "sha256": manifest_digest(job.prompts.every),
            "calibration": len(job.prompts.calibration),
            "holdout": len(job.prompts.holdout),
        },
        "seeds": {"recipe": job.recipe.seed},
        "versions": {
            "onptq": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        },
    }


def finished(job: Job, run: Run, reporter: Reporter) -> dict[str, Any] | None:
    """The summary of a finished run whose checkpoint is there as it was written; None if there is work to do."""
    if run.finished:
        summary: dict[str, Any] = run.read_json(SUMMARY)
        damage = damaged(job.out, summary.get("checkpoint") or {})
        if damage is None:
            reporter.note(f"{job.out} is a finished run; its summary is shown as it was")
            return summary
        reporter.warn(f"the run is finished, but {damage}: the checkpoint is written again")
    elif run.resumed:
        reporter.note(f"going on with the run in {run.home}: {', '.join(done(run)) or 'no step'} finished")
    return None


def done(run: Run) -> list[str]:
    """The steps that an earlier process finished, in words."""
    rounds = [f"round {k + 1}" for k in range(len(list(run.file("rounds").glob("*/theta.safetensors"))))]
    return [*(["the initial theta"] if run.has(INIT) else []), *rounds]


def damaged(out: Path, written: Mapping[str, Any]) -> str | None:
    """The first difference of the checkpoint from what the run wrote; None if there is none."""
    for name, digest in written.get("sha256", {CONFIG: None}).items():
        if not (out / name).is_file():
            return f"{out / name} is missing"
        if digest is not None and file_sha256(out / name) != digest:
            return f"{out / name} has changed"
    size, before = weight_bytes(out), written.get("bytes", 0)
    return None if size == before else f"{out} has {size:,} bytes of weights, not {before:,}"


def load(job: Job, ranks: Ranks, reporter: LoggedReporter) -> Policy:
    dtype = choose_dtype(job.recipe.compute.dtype, job.device, reporter.note)
    layout = choose_layout(job, ranks, dtype)
    if layout != "whole":
        reporter.note(f"the decoder's blocks are {WHERE[layout]}, and gathered where they are used")
    with reporter.phase("Load", total=1, unit="checkpoint") as bar:
        policy = load_policy(job.source, job.scheme, device=job.device, dtype=dtype, layout=layout, ranks=ranks)
        bar.advance()
    for text in policy.unfolded:
        reporter.warn(text)
    return policy


def choose_layout(job: Job, ranks: Ranks, dtype: torch.dtype) -> Layout:
    """Where the decoder's blocks are, the same on all ranks."""
    free, prompts = min(ranks.gather(free_memory(job.device))), job.prompts
    host = host_free() if job.device.type == "cuda" else free
    machine = Machine(str(job.device), "", dtype, free, host, gpus=ranks.size)
    counts = len(prompts.calibration), len(prompts.holdout)
    return ranks.lead(lambda: layout_of_run(job.source, job.recipe, *counts, machine))


def check_server(job: Job, run: Run) -> None:
    """Refuse a Python without vLLM before any work, where rollouts are still to be written by one."""
    written = range(job.recipe.rounds if job.recipe.refresh else 1)
    if job.served is not None and not all(run.has(f"rounds/{k}/{ROLLOUTS}") for k in written):
        job.vllm.check_installed()


def encode_prompts(
    job: Job, policy: Policy, processor: PromptProcessor, run: Run, reporter: Reporter, detail: str
) -> tuple[EncodedPrompts, EncodedPrompts]:
    """Calibration and held-out prompts, through the towers once for the whole run; the run keeps what they are."""
    prompts, recipe = job.prompts.every, job.recipe
    check_agreement(policy, processor, prompts)
    with reporter.phase("Encode", total=len(prompts), unit="prompts") as bar:
        inputs = processor.ahead(prompts, recipe.follow.max_tokens)
        each = encode_each(policy, inputs, [prompt.ordinal for prompt in prompts], bar.advance)
        budget = cached_bytes(free_memory(policy.device), recipe.compute.cache_gib)
        encoded = EncodedPrompts.of(each, budget=budget, folder=run.scratch("prompts"))
    if job.prompts.skipped and not run.has(SKIPPED):
        run.write_json(job.prompts.skipped, SKIPPED)
    if len(encoded) and not run.has("prompts.parquet"):
        with run.writing("prompts.parquet") as path:
            write_run_prompts(job.prompts, encoded.ids, path)
    if run.ranks.is_first:
        keep_previews(run, [*job.prompts.holdout, *job.prompts.calibration], detail)
    count = len(job.prompts.calibration)
    return encoded[:count], encoded[count:]


def initialize(job: Job, policy: Policy, prompts: Sequence[EncodedPrompt], run: Run, reporter: Reporter) -> Theta:
    """theta^(0), by the recipe's base method; blocks that an earlier process finished are read back."""
    recipe, store = job.recipe, RunStore(run, policy.device)
    if run.ranks.lead(lambda: run.has(INIT)):
        if run.ranks.is_first:
            remove(store.folder)  # a kill may have come between the file and this
        return read_init(policy, run)
    if not run.ranks.is_first:
        run.ranks.meet()  # while the first computes it
        return read_init(policy, run)
    with reporter.phase(f"Initialize ({recipe.init})", total=policy.blocks, unit="blocks") as bar:
        if store.finished:
            reporter.note(f"{store.finished} of {policy.blocks} blocks of the initial theta are finished")
            bar.advance(store.finished)
        theta = methods.initialize(policy, prompts, recipe, bar.advance, settled=recipe.settles, store=store)
    run.write_behind(theta.saving(), INIT, instead_of=store.folder)
    if run.ranks.size > 1:  # the others read the file
        run.wait()
        run.ranks.meet()
    return theta


def read_init(policy: Policy, run: Run) -> Theta:
    return run.read(INIT, lambda path: Theta.load(path, policy.device))


def measure(job: Job, cycle: Cycle, theta: Theta) -> tuple[dict[str, Any], Holdout | None]:
    """The summary so far: every round's figures, and those of held-out prompts under RTN, the init and the result; and the
    held-out states of the result."""
    ranks, run = cycle.run.ranks, cycle.run
    choice = ranks.lead(lambda: run.read_json(*CHOICE) if run.has(*CHOICE) else None)
    calibrated = cycle.holdout("final", "held-out at the end")
    dense = cycle.answer_holdout()
    before = cycle.holdout("rounds/0", "held-out 1") if job.recipe.rounds else calibrated
    after = before if choice is not None and choice["kept"] == INIT_KEPT else calibrated
    rounded = round_to_nearest(cycle, theta) if job.recipe.method != "rtn" else after
    figures = {
        name: None
        if one is None
        else bank_figures(one.states) | {"reworded_percent": reworded(dense, one.trajectories)}
        for name, one in (("rtn", rounded), ("initial", before), ("calibrated", calibrated), ("final", after))
    }
    summary: dict[str, Any] = {
        "scheme": str(job.scheme),
        "method": job.recipe.method,
        "model": job.source.name,
        "dense": {"bytes": sum(shard.stat().st_size for shard in job.source.shards)},
        "unfolded": list(cycle.policy.unfolded),
        "prompts": {"calibration": len(job.prompts.calibration), "holdout": len(job.prompts.holdout)},
        "rounds": ranks.lead(lambda: [cycle.figures(k) for k in range(job.recipe.rounds)]),
        "holdout": figures,
        "choice": choice,
        "helped": None if choice is None else choice["kept"] == CALIBRATED,
    }
    if experts := expert_summary(cycle):
        summary["experts"] = experts
    return summary, after


def reworded(dense: Sequence[Trajectory], quantized: Sequence[Trajectory]) -> float:
    """How many responses in a hundred are in other tokens than the dense model's."""
    tokens = {one.prompt: one.tokens for one in dense}
    return 100 * sum(one.tokens != tokens[one.prompt] for one in quantized) / len(quantized)


def round_to_nearest(cycle: Cycle, theta: Theta) -> Holdout | None:
    """The held-out prompts under plain rounding; Q is what `theta` folds to again afterwards."""
    if cycle.inputs.held_out is None:
        return None
    cycle.inputs.speak_as(methods.run("rtn", cycle.policy, cycle.inputs.prompts, lambda blocks: None))
    rounded = cycle.holdout("rtn/final", "held-out of RTN")
    cycle.inputs.speak_as(theta)
    return rounded


def warn_of_no_help(summary: Mapping[str, Any], reporter: Reporter) -> None:
    if summary["helped"] is False:
        before, after = (summary["holdout"][side] for side in ("initial", "calibrated"))
        why = summary["choice"].get("why", "it was no better")
        reporter.warn(
            f"calibration did not help, so the init is kept: on {summary['prompts']['holdout']} held-out prompts {why}. "
            f"On the responses of each, mismatch went from {before['mismatch_percent']:.2f}% to "
            f"{after['mismatch_percent']:.2f}%, KL from {before['kl']:.5f} to {after['kl']:.5f}. "
            "More prompts or longer answers (follow.max_tokens) may help; --set calibrate.keep=last and "
            "another --out take the calibrated weights all the same"
        )


def export(job: Job, policy: Policy, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Write the checkpoint with its model card; return the size of its weights and the hashes of its files."""
    results = read_results(run.home, job.recipe)
    with reporter.phase("Export", total=len(policy.wrapped), unit="modules") as bar:
        write_checkpoint(
            job.source,
            job.out,
            _counted(policy.folded(), bar),
            job.scheme,
            provenance=read_provenance(run, job.recipe, job.prompts),
            results=results,
            picture=card_picture(results),
        )
        return {"bytes": weight_bytes(job.out), "sha256": {name: file_sha256(job.out / name) for name in made_of(job)}}


def made_of(job: Job) -> list[str]:
    """The files of the checkpoint by which a model works: weights, config, tokenizer, processor; not its card."""
    weights = sorted(file.name for pattern in (WEIGHTS, INDEX) for file in job.out.glob(pattern))
    return [CONFIG, *weights, *map(str, companions(job.source.folder))]


def weight_bytes(out: Path) -> int:
    return sum(file.stat().st_size for file in out.glob(WEIGHTS))


@dataclass(frozen=True)
class Graph:
    """What the graph says that the checkpoint is folded from, and the dense model's answers."""

    tried: list[ModelInputs]
    logits: list[Tensor]  # of the graph
    dense: list[Answer]


def graph_answers(job: Job, cycle: Cycle, theta: Theta, processor: PromptProcessor, bar: Bar) -> Graph:
    """What the checkpoint will be compared with. Q is theta, simulated, as whoever loads the checkpoint computes it."""
    source, policy = job.source, cycle.policy
    tried = [processor(prompt) for prompt in (probe_prompt(source.family.modalities), *job.prompts.calibration[:1])]
    policy.attach(theta)
    logits = []
    for inputs in tried:
        logits.append(_graph_logits(policy, inputs))
        bar.advance()
    with policy.speaking("D"):
        dense = ask(policy.model, questions(processor), processor.tokenizer, source.eos())
    return Graph(tried, logits, dense)


def reload_and_check(
    job: Job, policy: Policy, graph: Graph, processor: PromptProcessor, reporter: Reporter
) -> dict[str, Any] | None:
    """The checkpoint, loaded by transformers, against the graph it was folded from; None where a model whose blocks were
    sharded does not fit whole. Releases the policy."""
    needed = sum(tensor.numel for tensor in job.source.checkpoint.tensors.values()) * policy.dtype.itemsize
    policy.release()
    give_back_memory()
    if policy.sharded is not None and needed > free_memory(job.device):
        reporter.warn(
            f"{job.out} was not loaded to check it: whole, it takes {needed / 2**30:.1f} GiB, and {job.device} has "
            f"{free_memory(job.device) / 2**30:.1f}. `onptq verify {job.out}` does that where there is room"
        )
        return None
    inputs = [one.tensors for one in graph.tried]
    verification, checks = verify_export(
        job.out,
        job.source,
        processor,
        inputs,
        graph.logits,
        graph.dense,
        scheme=job.scheme,
        dtype=policy.dtype,
        device=job.device,
    )
    for one in checks:
        if not one.passed:
            reporter.warn(f"{one.name}: the checkpoint {one.seen}")
    return asdict(verification) | {"checks": [asdict(one) for one in checks]}


def _counted(items: Iterable[T], bar: Bar) -> Iterator[T]:
    for item in items:
        yield item
        bar.advance()


@torch.no_grad()
def _graph_logits(policy: Policy, inputs: ModelInputs) -> Tensor:
    tensors: Mapping[str, Tensor] = {name: tensor.to(policy.device) for name, tensor in inputs.tensors.items()}
    with policy.speaking("Q"):
        logits: Tensor = policy.model(**tensors, use_cache=False).logits
    return logits.float().cpu()
