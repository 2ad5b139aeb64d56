"""A mixed scheme for a model and a budget: measured on calibration prompts, kept in a folder, continued after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onptq import methods
from onptq.checkpoint.exportable import check_exportable, check_groups
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import Source, choose_device, choose_dtype
from onptq.cycle.allocate import Allocation, allocate
from onptq.data.calibration import gather_prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.engine.agreement import check_agreement
from onptq.engine.prefixes import Prefixes
from onptq.engine.prompts import EncodedPrompts
from onptq.models.encoding import encode_each
from onptq.models.processing import PromptProcessor
from onptq.progress import Reporter
from onptq.quantizer.mix import multiplied_together
from onptq.recipe import Recipe
from onptq.run import Run
from onptq.schemes import Scheme

MIX, KNOWN = "mix.json", "kl.json"


def mix_under_budget(
    source: Source,
    out: Path,
    recipe: Recipe,
    higher: Scheme,
    bits: float,
    calibration: str | Path | Sequence[Prompt],
    reporter: Reporter,
) -> Allocation:
    """The mix of the recipe's scheme and `higher` for so many bits a weight; `out` gets `mix.json`, with the table.

    Another budget in the same folder measures nothing again but the mix itself."""
    check_exportable(source)
    lower = Scheme.parse(recipe.scheme)
    for scheme in (lower, higher):
        check_groups(source, scheme)
    prompts = gather_prompts(
        calibration, None, recipe.data, source.family.modalities, seed=recipe.seed, note=reporter.note
    ).calibration
    identity = {
        "recipe": recipe.model_dump(),
        "raised": str(higher),
        "model": {"source": source.name, "sha256": source.sha256()},
        "prompts": {"source": None, "sha256": manifest_digest(prompts)},
    }
    with Run.open(out, identity, home=out, warn=reporter.warn) as run:
        device = choose_device(recipe.compute.device)
        dtype = choose_dtype(recipe.compute.dtype, device, reporter.note)
        policy = load_policy(source, lower, device=device, dtype=dtype)
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        check_agreement(policy, processor, prompts)
        inputs = processor.ahead(prompts, recipe.follow.max_tokens)
        with reporter.phase("Encode", total=len(prompts), unit="prompts") as bar:
            each = encode_each(policy, inputs, [prompt.ordinal for prompt in prompts], bar.advance)
            encoded = EncodedPrompts.of(each)
        with reporter.phase(f"Initialize ({recipe.init})", total=policy.blocks, unit="blocks") as bar:
            theta = methods.initialize(policy, encoded, recipe, bar.advance)
        batch_tokens = recipe.compute.batch_tokens
        prefixes = Prefixes(policy, encoded, max_tokens=recipe.follow.max_tokens, batch_tokens=batch_tokens)
        known = {tuple(group): kl for group, kl in run.read_json(KNOWN)} if run.has(KNOWN) else {}
        groups = 1 + len(multiplied_together(tuple(policy.linears)))
        with reporter.phase("Raise", total=groups, unit="groups") as bar:
            bar.advance(len(known))

            def note(group: tuple[str, ...], kl: float) -> None:
                known[group] = kl
                run.write_json([[list(one), value] for one, value in known.items()], KNOWN)
                bar.advance()

            found = allocate(policy, theta, prefixes, higher, bits, dict(known), note)
        run.write_json(to_json(found), MIX)
    return found


def to_json(found: Allocation) -> dict[str, Any]:
    """The mix and its table, as `mix.json` has them."""
    return {
        "scheme": str(found.scheme),
        "bits": found.bits,
        "kl": {"start": found.kl, "expected": found.added, "measured": found.measured},
        "chosen": found.chosen,
        "gains": [
            {"linears": list(gain.linears), "kl": gain.kl, "saved": gain.saved, "bytes": gain.bytes}
            for gain in found.gains
        ],
    }
