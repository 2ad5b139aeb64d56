"""A mixed scheme for a model and a budget: chosen on calibration prompts, judged on held-out ones, continued after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq import methods
from onptq.bank import States
from onptq.checkpoint.exportable import check_exportable, check_groups
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import Source, choose_device, choose_dtype
from onptq.cycle.allocate import Allocation, allocate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.data.calibration import gather_prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.engine.agreement import check_agreement
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.errors import OnPTQError
from onptq.evaluate.metrics import behaviour_measures
from onptq.evaluate.statistics import Interval, Resampler
from onptq.models.encoding import encode_each
from onptq.models.processing import PromptProcessor
from onptq.progress import Reporter
from onptq.quantizer.mix import multiplied_together
from onptq.recipe import Recipe
from onptq.run import Run
from onptq.schemes import Scheme

MIX, KNOWN = "mix.json", "kl.json"


@dataclass(frozen=True)
class Judgement:
    """KL of the scheme that everything starts from and of the mix, each on its own answers to held-out prompts."""

    prompts: int
    start: float
    mix: float
    change: Interval  # mix - start, paired by prompt


@dataclass(frozen=True)
class Mix:
    allocation: Allocation
    judgement: Judgement | None  # None without held-out prompts


def mix_under_budget(
    source: Source,
    out: Path,
    recipe: Recipe,
    higher: Scheme,
    bits: float,
    calibration: str | Path | Sequence[Prompt],
    holdout: str | Path | Sequence[Prompt] | None,
    reporter: Reporter,
) -> Mix:
    """The mix of the recipe's scheme and `higher` for so many bits a weight; `out` gets `mix.json`, with the table.

    Raises where no group saves KL, and where held-out prompts show the mix to be worse than the recipe's scheme. Another
    budget in the same folder measures no mix twice."""
    check_exportable(source)
    lower = Scheme.parse(recipe.scheme)
    for scheme in (lower, higher):
        check_groups(source, scheme)
    prompts = gather_prompts(
        calibration, holdout, recipe.data, source.family.modalities, seed=recipe.seed, note=reporter.note
    )
    identity = {
        "recipe": recipe.model_dump(),
        "raised": str(higher),
        "model": {"source": source.name, "sha256": source.sha256()},
        "prompts": {"source": None, "sha256": manifest_digest(prompts.every)},
    }
    with Run.open(out, identity, home=out, warn=reporter.warn) as run:
        run.file(MIX).unlink(missing_ok=True)  # of another budget
        device = choose_device(recipe.compute.device)
        dtype = choose_dtype(recipe.compute.dtype, device, reporter.note)
        policy = load_policy(source, lower, device=device, dtype=dtype)
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        check_agreement(policy, processor, prompts.calibration)

        def encoded(some: Sequence[Prompt]) -> EncodedPrompts:
            inputs = processor.ahead(some, recipe.follow.max_tokens)
            with reporter.phase("Encode", total=len(some), unit="prompts") as bar:
                return EncodedPrompts.of(encode_each(policy, inputs, [one.ordinal for one in some], bar.advance))

        def prefixes_of(some: EncodedPrompts) -> Prefixes:
            batch_tokens = recipe.compute.batch_tokens
            return Prefixes(policy, some, max_tokens=recipe.follow.max_tokens, batch_tokens=batch_tokens)

        calibrating = encoded(prompts.calibration)
        with reporter.phase(f"Initialize ({recipe.init})", total=policy.blocks, unit="blocks") as bar:
            theta = methods.initialize(policy, calibrating, recipe, bar.advance)
        known = {tuple(group): kl for group, kl in run.read_json(KNOWN)} if run.has(KNOWN) else {}
        groups = len(multiplied_together(tuple(policy.linears)))
        # Each group alone, and as many times at most one more beside those that are raised.
        with reporter.phase("Raise", total=1 + 2 * groups, unit="mixes") as bar:

            def note(raised: tuple[str, ...], kl: float) -> None:
                known[raised] = kl
                run.write_json([[list(one), value] for one, value in known.items()], KNOWN)
                bar.advance()

            mix = allocate(policy, theta, prefixes_of(calibrating), higher, bits, dict(known), note)
        if not mix.chosen:
            raise OnPTQError(
                f"raising no group of linears to {higher} under {bits:g} bits a weight lowers KL: expected a larger budget, "
                f"more prompts (--set data.prompts=N), or {lower} as it is"
            )
        judgement = None
        if prompts.holdout:
            held = prefixes_of(encoded(prompts.holdout))
            with reporter.phase("Judge", total=2, unit="schemes") as bar:
                before = compare(held, follow(held))
                bar.advance()
                with policy.raised(theta, mix.raised, higher):
                    after = compare(held, follow(held))
                bar.advance()
            judgement = judge(before, after, [one.ordinal for one in prompts.holdout], recipe.seed)
            require_no_worse(judgement, lower)
        found = Mix(mix, judgement)
        run.write_json(to_json(found), MIX)
    return found


def judge(before: States, after: States, prompts: Sequence[int], seed: int) -> Judgement:
    """The KL of two schemes at the states that each visits."""
    resampler = Resampler(seed)
    start, mix = (behaviour_measures(states, prompts)["kl"] for states in (before, after))
    change = resampler.difference(start, mix)
    return Judgement(len(prompts), float(before.kl.mean()), float(after.kl.mean()), change)


def require_no_worse(judgement: Judgement, lower: Scheme) -> None:
    """Raise where the mix is worse beyond chance; of one prompt, where it is worse at all."""
    change = judgement.change
    least = change.value if change.low is None else change.low
    if least is None or least > 0:
        shown = "" if change.low is None else f" (difference {change.value:.3g} [{change.low:.3g}, {change.high:.3g}])"
        raise OnPTQError(
            f"the mix is worse than {lower} on {judgement.prompts} held-out prompts: KL {judgement.mix:.4g} instead of "
            f"{judgement.start:.4g}{shown}; expected more prompts (--set data.prompts=N), longer answers "
            f"(--set follow.max_tokens=N), another budget, or {lower} as it is"
        )


def to_json(found: Mix) -> dict[str, Any]:
    """The mix and its table, as `mix.json` has them."""
    mix, judgement = found.allocation, found.judgement
    held = None
    if judgement is not None:
        change = judgement.change.to_dict()
        held = {"prompts": judgement.prompts, "start": judgement.start, "mix": judgement.mix, "change": change}
    return {
        "scheme": str(mix.scheme),
        "bits": mix.bits,
        "kl": {"start": mix.kl, "expected": mix.added, "measured": mix.measured},
        "held_out": held,
        "chosen": mix.chosen,
        "gains": [
            {"linears": list(gain.linears), "kl": gain.kl, "saved": gain.saved, "bytes": gain.bytes}
            for gain in mix.gains
        ],
    }
