"""The pipeline of a quantization: check, load, encode, initialize, rounds, measure, export, reload and check."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from onptq import methods
from onptq.check.degenerate import ADVICE, check_on_degenerate, degenerate, of_held_out, of_questions
from onptq.check.graph import Graph, answer_graph, reload_and_check
from onptq.check.job import Job, Manifest, check_job, check_settings
from onptq.check.trial import Answer, ask, questions
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.parts import own_layers
from onptq.checkpoint.source import Source, choose_device, choose_dtype
from onptq.checkpoint.write import write_checkpoint
from onptq.checkpoint.written import damage, record
from onptq.cycle.expert_tokens import cold_warning
from onptq.cycle.inputs import Inputs
from onptq.cycle.rounds import Cycle
from onptq.data.calibration import Prompts, write_run_prompts
from onptq.engine.agreement import check_agreement
from onptq.engine.budget import cached_bytes
from onptq.engine.memory import free_memory, peak_memory
from onptq.engine.prompts import EncodedPrompts
from onptq.errors import OnPTQError
from onptq.evaluate.details import LIGHT, check_level
from onptq.evaluate.guard import keep_better
from onptq.evaluate.model_card import read_provenance, read_results
from onptq.evaluate.previews import keep_previews
from onptq.evaluate.run_details import RoundDetails, keep_details
from onptq.evaluate.run_figures import Figures, measure
from onptq.evaluate.store import write_tokens
from onptq.methods.resume import RunStore
from onptq.models.encoding import EncodedPrompt, encode_each
from onptq.models.language_model import Side
from onptq.models.processing import PromptProcessor
from onptq.page.card_picture import card_picture
from onptq.plan.layouts import WHERE, choose_layout
from onptq.progress import Bar, LoggedReporter, QuietReporter, Reporter, SilentReporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.ranks import Ranks, is_first, join
from onptq.recipe import Recipe
from onptq.run import INIT, SUMMARY, Run, remove, run_home
from onptq.serving.vllm import Vllm
from onptq.shared_run import open_run

SKIPPED = "skipped.json"
T = TypeVar("T")
SIDES: tuple[Side, Side] = ("D", "Q")


@dataclass(frozen=True)
class Result:
    path: Path
    summary: dict[str, Any]
    prompts: Prompts


@dataclass(frozen=True)
class Options:
    """How a run is worked on, beside what it computes."""

    start: Path | None
    verify: bool
    detail: str
    held_out_detail: str
    on_degenerate: str


def quantize(
    model: str | Path | Source,
    out: str | Path,
    *,
    calibration: Manifest = None,
    recipe: Recipe | None = None,
    holdout: Manifest = None,
    reporter: Reporter | None = None,
    verify: bool = True,
    start: Path | None = None,
    on_bad_prompt: str = "fail",
    on_degenerate: str = "fail",
    detail: str = LIGHT,
    held_out_detail: str | None = None,
    policy_endpoint: str | None = None,
    vllm_python: str | Path | None = None,
    vllm_args: Sequence[str] = (),
) -> Result:
    """Quantize `model` into the folder `out`; called again after a kill, go on after the last finished step.

    `start` is the file of a theta^(0) to use instead of the recipe's base method. `on_bad_prompt` is `fail`, or `skip` to
    leave out prompts that cannot be read or that the model cannot take. `on_degenerate` is `fail`, or `warn` to write a model
    whose answers are broken where the dense model's are not. `detail` is how much of single states is kept for the page:
    `off`, `light` or `full`; `held_out_detail` the same of held-out states alone. With `follow.engine=vllm` a server at
    `policy_endpoint` writes the rollouts, or one that is started by `vllm_python` (else by that of ONPTQ_VLLM_PYTHON, or this
    one) with `vllm_args`.
    """
    reporter = reporter or (QuietReporter() if is_first() else SilentReporter())
    recipe = recipe or Recipe()
    options = Options(start, verify, detail, detail if held_out_detail is None else held_out_detail, on_degenerate)
    for level in (options.detail, options.held_out_detail):
        check_level(level)
    check_on_degenerate(on_degenerate)
    vllm = Vllm.given(policy_endpoint, vllm_python, vllm_args)
    with join(recipe.compute.device) as ranks:
        device = torch.device(ranks.lead(lambda: str(check_settings(Path(out), recipe, calibration, holdout))))
        if ranks.size > 1:
            device = choose_device(device.type)  # the rank's own GPU
        job = ranks.after_first(
            lambda: check_job(model, Path(out), recipe, calibration, holdout, on_bad_prompt, device, reporter, vllm)
        )
        with open_run(out, run_home(out), lambda: job.identify(reporter), ranks, reporter.warn) as run:
            logged = LoggedReporter(reporter, run.log, partial(peak_memory, job.device))
            summary = ranks.lead(lambda: finished(job, run, logged))
            if summary is None:
                summary = work(job, run, logged, options)
    return Result(job.out, summary, job.prompts)


def work(job: Job, run: Run, reporter: LoggedReporter, options: Options) -> dict[str, Any]:
    """The summary of the run, worked on from the first step that is not finished to the end. Of several processes, only the
    first has that of the verification, too."""
    if options.start is not None and run.ranks.is_first and not run.has(INIT):
        with run.writing(INIT) as path:
            shutil.copyfile(options.start, path)
    run.ranks.lead(lambda: job.check_server(run))
    processor = job.processor()
    policy = load(job, run.ranks, reporter)
    prompts, held_out = encode_prompts(job, policy, processor, run, reporter, options.detail)
    inputs = Inputs(policy, prompts, held_out, job.recipe, run, reporter.warn, job.source.generation)
    cycle = Cycle(inputs, job.recipe, run, reporter, RoundDetails(options.detail), job.served)
    theta = cycle.rounds(initialize(job, policy, prompts, run, reporter))
    theta = keep_better(cycle, theta, partial(read_init, policy, run))
    figures = measure(cycle, theta)
    dense = run.ranks.first_alone(lambda: try_result(job, cycle, figures, processor, options))
    for side in SIDES:  # nothing is run until the checkpoint is reloaded
        cycle.inputs.forget(side)
    policy.drop_floats()
    summary = describe(job, policy, figures) | {"checkpoint": export(job, policy, run, reporter)}
    checked = None
    if options.verify:
        checked = verify(job, cycle, theta, processor, dense or (), reporter)
    run.ranks.leave()
    if not run.ranks.is_first:
        return summary
    if checked is not None:
        summary["verification"] = checked
    summary["seconds"] = run.seconds()
    run.finish(summary)
    return summary


def finished(job: Job, run: Run, reporter: Reporter) -> dict[str, Any] | None:
    """The summary of a finished run all of whose files are there as they were written; None if there is work to do."""
    if run.finished:
        summary: dict[str, Any] = run.read_json(SUMMARY)
        lost = run.missing()
        changed = f"{run.file(lost[0])} is missing" if lost else damage(job.out, summary.get("checkpoint") or {})
        if changed is None:
            reporter.note(f"{job.out} is a finished run; its summary is shown as it was")
            return summary
        again = "its step is computed" if lost else "the checkpoint is written"
        reporter.warn(f"the run is finished, but {changed}: {again} again")
    elif run.resumed:
        reporter.note(f"going on with the run in {run.home}: {', '.join(done(run)) or 'no step'} finished")
    return None


def done(run: Run) -> list[str]:
    """The steps that an earlier process finished, in words."""
    rounds = [f"round {k + 1}" for k in range(len(list(run.file("rounds").glob("*/theta.safetensors"))))]
    return [*(["the initial theta"] if run.has(INIT) else []), *rounds]


def load(job: Job, ranks: Ranks, reporter: LoggedReporter) -> Policy:
    dtype, prompts = choose_dtype(job.recipe.compute.dtype, job.device, reporter.note), job.prompts
    counts = len(prompts.calibration), len(prompts.holdout)
    layout = choose_layout(job.source, job.recipe, *counts, ranks, job.device, dtype)
    if layout != "whole":
        reporter.note(f"the decoder's blocks are {WHERE[layout]}, and gathered where they are used")
    with reporter.phase("Load", total=1, unit="checkpoint") as bar:
        policy = load_policy(job.source, job.scheme, device=job.device, dtype=dtype, layout=layout, ranks=ranks)
        bar.advance()
    for text in policy.unfolded:
        reporter.warn(text)
    return policy


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
    recipe, ranks = job.recipe, run.ranks
    store = RunStore(run, policy.device, codes=policy.resting)
    if ranks.lead(lambda: run.has(INIT)):
        if ranks.is_first:
            remove(store.folder)  # a kill may have come between the file and this
        return read_init(policy, run)
    if not ranks.is_first:
        ranks.meet()  # while the first computes it
        return read_init(policy, run)
    with reporter.phase(f"Initialize ({recipe.init})", total=policy.blocks, unit="blocks") as bar:
        if store.finished:
            reporter.note(f"{store.finished} of {policy.blocks} blocks of the initial theta are finished")
            bar.advance(store.finished)
        theta = methods.initialize(policy, prompts, recipe, bar.advance, settled=recipe.settles, store=store)
    run.write_behind(theta.saving(), INIT, instead_of=store.folder)
    if ranks.size > 1:  # the others read the file
        run.wait()
        ranks.meet()
    return policy.split(theta)


def read_init(policy: Policy, run: Run) -> Theta:
    return run.read(INIT, policy.load)


def try_result(
    job: Job, cycle: Cycle, figures: Figures, processor: PromptProcessor, options: Options
) -> Sequence[Answer]:
    """The dense model's answers to the built-in questions, by the first process alone; an error where those of Q are broken,
    before anything of the checkpoint is written. Beside it, warnings and details of the result."""
    policy, reporter = cycle.policy, cycle.reporter
    for text in (figures.no_help, cold_warning(figures.summary.get("experts", {}))):
        if text is not None:
            reporter.warn(text)
    keep_details(cycle, figures.result, options.held_out_detail)
    write_tokens(cycle.run, processor.tokenizer)
    probes, eos = questions(processor), job.source.eos()
    answers = {}
    for side in SIDES:
        with policy.speaking(side):
            answers[side] = ask(policy.model, probes, processor.tokenizer, eos)
    responses = [] if figures.result is None else figures.result.trajectories
    cases = [*of_questions(answers["D"], answers["Q"]), *of_held_out(figures.dense, responses, eos)]
    if (broken := degenerate(cases)) is not None:
        if options.on_degenerate == "fail":
            raise OnPTQError(
                f"nothing was written to {job.out}: {broken}. The files of the run stay in {cycle.run.home}. {ADVICE}"
            )
        reporter.warn(broken)
    return answers["D"]


def describe(job: Job, policy: Policy, figures: Figures) -> dict[str, Any]:
    """The summary of the run but for the checkpoint."""
    return {
        "scheme": str(job.scheme),
        "method": job.recipe.method,
        "model": job.source.name,
        "dense": {"bytes": sum(shard.stat().st_size for shard in job.source.shards)},
        "unfolded": list(policy.unfolded),
        "prompts": {"calibration": len(job.prompts.calibration), "holdout": len(job.prompts.holdout)},
        **figures.summary,
    }


def export(job: Job, policy: Policy, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Write the checkpoint with its model card, every process the shards that are its own; return the record of its files."""
    ranks = run.ranks
    own = own_layers(job.source, job.scheme, ranks)
    results = read_results(run.home, job.recipe) if ranks.is_first else None
    with reporter.phase("Export", total=sum(one.block.index in own for one in policy.wrapped), unit="modules") as bar:
        write_checkpoint(
            job.source,
            job.out,
            _counted(policy.folded(own), bar),
            job.scheme,
            provenance=read_provenance(run, job.recipe, job.prompts) if ranks.is_first else None,
            results=results,
            picture=card_picture(results),
            ranks=ranks,
        )
        written: dict[str, Any] = ranks.lead(lambda: record(job.source.folder, job.out))
    return written


def verify(
    job: Job, cycle: Cycle, theta: Theta, processor: PromptProcessor, dense: Sequence[Answer], reporter: Reporter
) -> dict[str, Any] | None:
    """The checkpoint, reloaded by the first process, against the graph it was folded from. The others leave."""
    prompts, ranks, policy = job.prompts.calibration[:1], cycle.run.ranks, cycle.policy
    with ExitStack() as verifying:

        def answered() -> Graph:
            bar = verifying.enter_context(reporter.phase("Verify", total=1 + len(prompts), unit="prompts"))
            return answer_graph(policy, theta, processor, prompts, dense, bar)

        graph = ranks.first_alone(answered)  # the others have parts of the weights
        ranks.leave()  # the rest is for one process; compressed-tensors would share it among all it sees
        if graph is None:
            return None
        return reload_and_check(job.out, job.source, job.scheme, policy, graph, processor, reporter)


def _counted(items: Iterable[T], bar: Bar) -> Iterator[T]:
    for item in items:
        yield item
        bar.advance()
