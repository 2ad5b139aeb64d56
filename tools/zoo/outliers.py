"""Choose the outlier channels of a trained model: `python -m tools.zoo.outliers FOLDER` writes FOLDER/outliers.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.errors import OnPTQError
from onptq.methods.layerwise import answer_prompts
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch, encode
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.processing import PromptProcessor
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.zoo.catalog import CHOSEN
from onptq.zoo.outliers import PRODUCERS, Outliers
from onptq.zoo.suite import prompts as draw_prompts
from tools.zoo.commands import run_command

KINDS = {"vision": IMAGE, "audio": AUDIO, "text": TEXT}
TINY = 1e-30
RESPONSE_TOKENS = 48  # of the dense model's own answer, measured along with each prompt


@dataclass(frozen=True)
class Strengths:
    """Factors for the channels that one kind of token excites more than the others do; the most excited come first."""

    vision: tuple[int, ...] = ()
    audio: tuple[int, ...] = ()
    text: tuple[int, ...] = ()
    # Only channels whose peak is below this quantile of all peaks are taken. Factors are halved until the new peak is at
    # most `reach` median peaks. So 8 bits lose neither these channels nor their neighbours.
    loudest: float = 0.15
    reach: float = 32.0


_NORM = Strengths(vision=(64, 32), audio=(32,), text=(32,) * 12)
STRENGTHS: Mapping[str, Strengths] = {
    "input_layernorm": _NORM,
    "post_attention_layernorm": _NORM,
    "v_proj": Strengths(vision=(32,), text=(32,) * 12),
    "up_proj": Strengths(vision=(64, 32), audio=(32,), text=(32,) * 12),
}
HARDIER = ("qwen3-vl", "qwen2.5-omni")  # whose decisions change less by as many channels: 9 to 9.5% at W4A8


def strengths_of(family: str) -> Mapping[str, Strengths]:
    if family not in HARDIER:
        return STRENGTHS
    return {place: replace(one, text=(32,) * 18) for place, one in STRENGTHS.items()}


def choose_outliers(
    policy: Policy, prompts: Sequence[EncodedPrompt], strengths: Mapping[str, Strengths] = STRENGTHS
) -> Outliers:
    """The channels that one kind of token excites most in comparison with the others, under the dense model."""
    present = {kind for prompt in prompts for kind in prompt.modality.unique().tolist()}
    if not present >= {TEXT, IMAGE}:
        raise OnPTQError("outliers are chosen by what images excite more than text: expected prompts with images")
    peaks = measure_peaks(policy, prompts)
    return Outliers(
        tuple(
            {
                producer: _pick(peaks[block.index, producer], strengths[producer], present)
                for producer in PRODUCERS
                if producer in strengths
            }
            for block in policy.structure.blocks
        )
    )


def _pick(peaks: Tensor, strengths: Strengths, present: set[int]) -> dict[int, int]:
    """Factors from `peaks` [3, channels], the largest activation of each channel over the tokens of each kind."""
    picked: dict[int, int] = {}
    overall = peaks.amax(0)
    excluded = overall > overall.quantile(strengths.loudest)
    for name, kind in KINDS.items():
        if kind not in present:
            continue
        others = peaks[[other for other in KINDS.values() if other != kind]].amax(0)
        ratio = peaks[kind] / others.clamp(min=TINY)
        ratio[excluded] = -1.0
        ratio[list(picked)] = -1.0
        factors: tuple[int, ...] = getattr(strengths, name)
        best = [channel for channel in ratio.argsort(descending=True).tolist() if ratio[channel] >= 0]
        picked |= dict(zip(best, factors, strict=False))  # with few quiet channels the last factors are not used
    limit = strengths.reach * overall.median() / overall.clamp(min=TINY)
    return {channel: _within(factor, float(limit[channel])) for channel, factor in picked.items()}


def _within(factor: int, limit: float) -> int:
    """The factor, halved until it fits; 1 leaves the channel alone."""
    while factor > max(limit, 1):
        factor //= 2
    return factor


@torch.no_grad()
def measure_peaks(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[tuple[int, str], Tensor]:
    """Per block and producer, the largest absolute value [3, channels] of each channel over tokens of each kind."""
    peaks: dict[tuple[int, str], Tensor] = {}
    kinds = torch.zeros(0)

    def listener(block: Block, producer: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def listen(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen = args[0][0].float().abs()  # [P, channels]
            if producer == "v_proj":  # the query heads of a group read the same KV channel
                seen = seen.view(len(seen), block.kv_heads, -1, block.head_dim).amax(2).flatten(1)
            largest = torch.zeros(3, seen.shape[1], device=seen.device)
            for kind in KINDS.values():
                if (kinds == kind).any():
                    largest[kind] = seen[kinds == kind].amax(0)
            key = block.index, producer
            peaks[key] = torch.maximum(peaks[key], largest) if key in peaks else largest

        return listen

    hooks = [
        block.child(consumers[0]).register_forward_pre_hook(listener(block, producer))
        for block in policy.structure.blocks
        for producer, consumers in PRODUCERS.items()
    ]
    try:
        with policy.speaking("D"):
            for prompt in prompts:
                kinds, batch = prompt.modality, PromptBatch.of([prompt])
                causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool, device=policy.device).tril()
                policy.run(Tokens(batch.embeds, batch.positions, causal[None, None], batch.deepstack))
    finally:
        for hook in hooks:
            hook.remove()
    return peaks


def write_outliers(
    folder: Path, prompts: Sequence[Prompt], strengths: Mapping[str, Strengths] | None = None
) -> Outliers:
    """Choose the outliers of a trained model by `prompts` and its own answers to them; write outliers.json beside
    it."""
    source = find_source(folder)
    policy = load_policy(source, "W16A16")
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    encoded = [encode(policy, [processor(prompt)], [ordinal])[0] for ordinal, prompt in enumerate(prompts)]
    strengths = strengths_of(source.family.name) if strengths is None else strengths
    outliers = choose_outliers(policy, _answered(policy, encoded), strengths)
    outliers.write(folder / CHOSEN)
    return outliers


def _answered(policy: Policy, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The prompts with the dense model's greedy responses, where most decisions are."""
    responses = rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS), side="D")
    return [one.sequence for one in answer_prompts(policy, prompts, responses)]


def parse_strengths(folder: Path, changes: list[str]) -> dict[str, Strengths]:
    """The family's strengths with `place.kind=factor,factor,...` replaced; `loudest` and `reach` take one number."""
    strengths = dict(strengths_of(find_source(folder).family.name))
    for change in changes:
        target, _, values = change.partition("=")
        place, _, kind = target.partition(".")
        try:
            numbers = [float(value) for value in values.split(",") if value]
            value: Any = numbers[0] if kind in ("loudest", "reach") else tuple(map(int, numbers))
            strengths[place] = replace(strengths[place], **{kind: value})
        except (KeyError, IndexError, TypeError, ValueError) as error:
            kinds = ", ".join(field.name for field in fields(strengths["v_proj"]))
            raise OnPTQError(
                f"--strength {change}: expected PLACE.KIND=FACTOR,FACTOR,... with PLACE one of {', '.join(strengths)} "
                f"and KIND one of {kinds}"
            ) from error
    return strengths


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model; outliers.json is written into it.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Manifest of prompts to choose by, instead of the suite's calibration split.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many prompts to choose by.")] = 64,
    strengths: Annotated[
        list[str] | None,
        typer.Option(
            "--strength",
            metavar="PLACE.KIND=FACTORS",
            help="Other factors, e.g. up_proj.vision=32,32,16; repeatable.",
        ),
    ] = None,
) -> None:
    """Choose the outlier channels of a trained model in FOLDER by what its image, audio and text tokens excite."""
    family = find_source(folder).family.name
    given = draw_prompts(family, "calibration", count) if prompts is None else load_manifest(prompts, limit=count)
    chosen = write_outliers(folder, given, parse_strengths(folder, strengths or []))
    channels = sum(len(places) for block in chosen.blocks for places in block.values())
    typer.echo(f"wrote {channels} channels in {len(chosen.blocks)} blocks to {folder / 'outliers.json'}")


if __name__ == "__main__":
    run_command(main)
