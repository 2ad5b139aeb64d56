"""Activation outliers as large models have them, by a rescaling that leaves the function exactly as it was.

A few channels are multiplied by a power of two where they are produced (gain of a norm, rows of v_proj and up_proj) and divided
by it where they are read (columns of the linears behind). A power of two moves only the exponent, so in bfloat16 and float32
every product and every sum stays the same to the last bit. float16 has too small an exponent for the divided weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.family import AUDIO, IMAGE, TEXT, text_config
from onptq.models.structure import LINEARS, Block
from onptq.policy import Policy, load_policy
from onptq.quantizer.theta import PAIRS
from onptq.zoo.catalog import CHOSEN

KINDS = {"vision": IMAGE, "audio": AUDIO, "text": TEXT}
PRODUCERS = dict(PAIRS.values())
TINY = 1e-30
RESPONSE_TOKENS = 48  # of the dense model's own answer, measured along with each prompt

_QUERY = re.compile(r"((?:.*\.)?)layers\.0\.self_attn\.q_proj\.weight")

CARD = """
## Outliers

This is `{name}` with activation outliers: some channels of norm gains, v_proj and up_proj rows are multiplied by powers of two,
and the linears that read them are divided. Dense outputs are the same to the last bit; quantization has a harder time.
"""


@dataclass(frozen=True)
class Strengths:
    """Factors for the channels that one kind of token excites more than the others do; the most excited come first."""

    vision: tuple[int, ...] = ()
    audio: tuple[int, ...] = ()
    text: tuple[int, ...] = ()
    # Quiet channels can be made large without 8 bits losing them or their neighbours: only those whose peak lies within
    # this quantile of all peaks are taken, and factors are halved until the new peak is at most `reach` median peaks.
    loudest: float = 0.15
    reach: float = 32.0


_NORM = Strengths(vision=(64, 32), audio=(32,), text=(32,) * 12)
STRENGTHS: Mapping[str, Strengths] = {
    "input_layernorm": _NORM,
    "post_attention_layernorm": _NORM,
    "v_proj": Strengths(vision=(32,), text=(32,) * 12),
    "up_proj": Strengths(vision=(64, 32), audio=(32,), text=(32,) * 12),
}
HARDIER = ("qwen3-vl", "qwen2.5-omni")  # where as many channels do less harm: 9 to 9.5% of the W4A8 decisions


def strengths_of(family: str) -> Mapping[str, Strengths]:
    if family not in HARDIER:
        return STRENGTHS
    return {place: replace(one, text=(32,) * 18) for place, one in STRENGTHS.items()}


@dataclass(frozen=True)
class Outliers:
    """For every block: what produces the channels -> channel -> factor."""

    blocks: tuple[Mapping[str, Mapping[int, int]], ...]

    def __post_init__(self) -> None:
        for index, producers in enumerate(self.blocks):
            for producer, channels in producers.items():
                if producer not in PRODUCERS:
                    raise OnPTQError(f"block {index}: {producer!r} is none of {', '.join(PRODUCERS)}")
                for channel, factor in channels.items():
                    if channel < 0 or factor < 1 or factor & (factor - 1):
                        raise OnPTQError(
                            f"block {index}, {producer}: expected channels from 0 and factors that are powers of two, "
                            f"got channel {channel} times {factor}"
                        )

    @classmethod
    def read(cls, path: Path) -> Outliers:
        try:
            blocks = json.loads(path.read_text(encoding="utf-8"))["blocks"]
            return cls(
                tuple(
                    {
                        producer: {int(channel): int(factor) for channel, factor in channels.items()}
                        for producer, channels in producers.items()
                    }
                    for producers in blocks
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OnPTQError(f"cannot read {path}: {error!r}; `onptq zoo outliers FOLDER` writes it") from error

    def write(self, path: Path) -> None:
        lines = ",\n".join(f"    {json.dumps(producers)}" for producers in self.blocks)
        path.write_text(f'{{\n  "blocks": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def choose_outliers(
    policy: Policy, prompts: Sequence[EncodedPrompt], strengths: Mapping[str, Strengths] = STRENGTHS
) -> Outliers:
    """The channels that one kind of token excites most in comparison with the others, under the dense model."""
    present = {kind for prompt in prompts for kind in prompt.modality.unique().tolist()}
    if not present >= {TEXT, IMAGE}:
        raise OnPTQError("outliers are chosen by what pictures excite more than text: expected prompts with pictures")
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
    """peaks [3, channels]: the largest activation of each channel over the tokens of each kind."""
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
        picked |= dict(
            zip(best, factors, strict=False)
        )  # where fewer channels are quiet, the last factors are not used
    room = strengths.reach * overall.median() / overall.clamp(min=TINY)
    return {channel: _within(factor, float(room[channel])) for channel, factor in picked.items()}


def _within(factor: int, room: float) -> int:
    """The factor, halved until it fits; 1 leaves the channel alone."""
    while factor > max(room, 1):
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
    """Choose the outliers of a trained model by `prompts` and its own answers to them; write outliers.json beside it."""
    from onptq.models.loading import find_source
    from onptq.models.processing import PromptProcessor

    source = find_source(folder)
    policy = load_policy(source, "W16A16")
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    encoded = []
    for ordinal, prompt in enumerate(prompts):
        inputs = processor(prompt)
        encoded.append(policy.encode(inputs.tensors, inputs.modality, ordinal))
    strengths = strengths_of(source.family.name) if strengths is None else strengths
    outliers = choose_outliers(policy, _answered(policy, encoded), strengths)
    outliers.write(folder / CHOSEN)
    return outliers


def _answered(policy: Policy, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The prompts with the dense model's greedy answers: most decisions are taken there, not in the prompt."""
    from onptq.cycle.follow import follow
    from onptq.cycle.prefixes import Prefixes
    from onptq.methods.layerwise import answer_prompts

    responses = follow(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS), side="D")
    return [one.sequence for one in answer_prompts(policy, prompts, responses)]


def apply_outliers(tensors: Mapping[str, Tensor], outliers: Outliers, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The checkpoint's tensors, by their names on disk, with the channels of the language model rescaled."""
    prefix, scaled = _decoder_prefix(tensors, config), dict(tensors)
    for index, producers in enumerate(outliers.blocks):
        for producer, channels in producers.items():
            places = list(channels)
            factors = torch.tensor(list(channels.values()))
            _rescale(scaled, _path(prefix, index, producer), places, factors)
            columns, factors = _columns_of_kv(places, factors, config) if producer == "v_proj" else (places, factors)
            for consumer in PRODUCERS[producer]:
                name = f"{_path(prefix, index, consumer)}.weight"
                weight = scaled[name].clone()
                weight[:, columns] /= factors.to(weight.dtype)
                scaled[name] = weight
    return scaled


def _rescale(tensors: dict[str, Tensor], path: str, channels: list[int], factors: Tensor) -> None:
    """Gain of a norm, or rows of a linear with their bias."""
    for name in (f"{path}.weight", f"{path}.bias"):
        if name not in tensors and name.endswith("bias"):
            continue
        if name not in tensors:
            raise OnPTQError(f"the checkpoint has no {name}; expected the model that the outliers were chosen for")
        tensor = tensors[name].clone()
        if max(channels, default=0) >= len(tensor):
            raise OnPTQError(f"{name} has {len(tensor)} channels; the outliers name channel {max(channels)}")
        tensor[channels] *= factors.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
        tensors[name] = tensor


def _columns_of_kv(channels: list[int], factors: Tensor, config: Mapping[str, Any]) -> tuple[list[int], Tensor]:
    """o_proj's columns for KV channels: one in every query head of the group that reads the KV head."""
    text = text_config(config)
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    width, group = text.get("head_dim") or text["hidden_size"] // heads, heads // kv_heads
    columns = [
        (channel // width * group + query) * width + channel % width for channel in channels for query in range(group)
    ]
    return columns, factors.repeat_interleave(group)


def _path(prefix: str, index: int, name: str) -> str:
    return f"{prefix}layers.{index}." + ".".join(LINEARS.get(name, (name,)))


def _decoder_prefix(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    family = family_of(config)
    found = [match[1] for match in map(_QUERY.fullmatch, tensors) if match]
    others = [prefix for prefix in found if prefix.startswith(family.other_models) or _in_tower(prefix, family.towers)]
    prefixes = [prefix for prefix in found if prefix not in others]
    if len(prefixes) != 1:
        raise OnPTQError(f"expected one language model in the checkpoint, found {prefixes or 'none'}")
    return prefixes[0]


def _in_tower(prefix: str, towers: Sequence[str]) -> bool:
    return any(re.fullmatch(tower, prefix) for tower in towers)


def derive(folder: Path, out: Path, name: str | None = None) -> None:
    """Write the checkpoint of `folder` with its outliers into the existing folder `out`."""
    outliers = Outliers.read(folder / CHOSEN)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shards: dict[Path, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            shards[shard] = list(file.keys())
            tensors |= {key: file.get_tensor(key) for key in shards[shard]}
    for path in folder.iterdir():
        if path.is_file() and path not in shards and path.name != CHOSEN:
            shutil.copyfile(path, out / path.name)
    scaled = apply_outliers(tensors, outliers, config)
    for shard, names in shards.items():
        target = out / shard.name
        target.touch()
        mode = target.stat().st_mode  # as the user's umask has it; safetensors lets only the owner read its files
        save_file({key: scaled[key] for key in names}, target, metadata={"format": "pt"})
        target.chmod(mode)
    with (out / "README.md").open("a", encoding="utf-8") as card:
        card.write(CARD.format(name=name or folder.name))
