"""Activation outliers as in large models, by a rescaling that leaves the dense function unchanged.

Some channels are multiplied by a power of two where they are produced (gain of a norm, rows of v_proj and up_proj) and divided
by it where they are read (columns of the next linears). A power of two moves only the exponent, so in bfloat16 and float32
every multiplication and every sum stays the same to the last bit. float16 has too small an exponent for the divided weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import text_config
from onptq.models.structure import LINEARS, PAIRS
from onptq.zoo.catalog import CHOSEN, RECORDS

PRODUCERS = dict(PAIRS.values())

_QUERY = re.compile(r"((?:.*\.)?)layers\.0\.self_attn\.q_proj\.weight")

CARD = """
## Outliers

This is `{name}` with activation outliers: some channels of norm gains, v_proj and up_proj rows are multiplied by powers of two,
and the linears that read them are divided. Dense outputs are the same to the last bit; quantization has a harder time.
"""


@dataclass(frozen=True)
class Outliers:
    """Factors of every block, by producer of the channels and channel."""

    blocks: tuple[Mapping[str, Mapping[int, int]], ...]

    def __post_init__(self) -> None:
        for index, producers in enumerate(self.blocks):
            for producer, channels in producers.items():
                if producer not in PRODUCERS:
                    raise OnPTQError(
                        f"block {index}: unknown producer {producer!r}; expected one of {', '.join(PRODUCERS)}"
                    )
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
            raise OnPTQError(f"cannot read {path}: {error!r}; `python -m tools.zoo.outliers` writes it") from error

    def write(self, path: Path) -> None:
        lines = ",\n".join(f"    {json.dumps(producers)}" for producers in self.blocks)
        path.write_text(f'{{\n  "blocks": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


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
    """Multiply the gain of a norm, or rows of a linear and its bias, in place."""
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
    """The columns of o_proj that read the KV channels, one per query head of the group, and their factors."""
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
    decoders = [match[1] for match in map(_QUERY.fullmatch, tensors) if match]
    others = [
        prefix for prefix in decoders if prefix.startswith(family.other_models) or _in_tower(prefix, family.towers)
    ]
    prefixes = [prefix for prefix in decoders if prefix not in others]
    if len(prefixes) != 1:
        raise OnPTQError(f"the checkpoint has {len(prefixes)} language models ({', '.join(prefixes)}); expected one")
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
        if path.is_file() and path not in shards and path.name not in RECORDS:
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
