"""theta: the calibration parameters. All of them fold: a checkpoint holds integer codes and scales alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from onptq.models.structure import Block
from onptq.schemes import Scheme

SMOOTHING_REACH = 1.5  # largest distance of a log-smoothing entry from its value at the start of an update
RATIO_RANGE = (math.log(0.4), 0.0)  # of the log scale ratio
VALID_RANGE = (math.log(0.4), math.log(2.0))  # the same where scales are numbers of few bits
SETTLED_RANGE = (-0.5, 0.5)  # of the log scale ratio where codes are settled
OFFSET_RANGE = (-0.5, 0.5)  # of learned offsets; those of an init may lie beyond it, as GPTQ's do


@dataclass
class Free:
    """Codes follow the smoothed weight by plain rounding."""

    ratio: Tensor  # [O, G] log of the share of its full-range scale that each row or group has


@dataclass
class Learned:
    """Codes follow the smoothed weight plus an offset, in units of the scale."""

    ratio: Tensor
    offset: Tensor  # [O, I]


@dataclass
class Settled:
    """Codes no longer follow the weight: smoothing scales what enters the linear, the ratio its scale."""

    ratio: Tensor
    levels: Tensor  # codes less their zero points, integers [O, I]; never written to, so clones share them
    scale: Tensor  # [O, G] that the codes were settled with


LinearTheta = Free | Learned | Settled
# A linear's tensors by the names that files give them.
PARTS = {"ratio": "ratio", "offset": "offset", "levels": "levels", "step": "scale"}


@dataclass
class Theta:
    """Log-smoothing per pair, and for each linear how its codes come about."""

    smoothing: dict[str, Tensor] = field(default_factory=dict)  # "layers.0.v_o" -> [channels]
    linears: dict[str, LinearTheta] = field(default_factory=dict)  # "layers.0.self_attn.q_proj" -> its part
    inputs: dict[str, Tensor] = field(default_factory=dict)  # "layers.0.v_o" -> tensor scale of what enters, if any
    caches: dict[str, Tensor] = field(
        default_factory=dict
    )  # "layers.0" -> [2] scales of cached keys and values, if any
    # The tensors, kept alive, and their writes when `version` was last read; and how often they had changed by then.
    _seen: list[tuple[Tensor, int | None]] = field(default_factory=list, init=False, repr=False, compare=False)
    _changes: int = field(default=0, init=False, repr=False, compare=False)

    @classmethod
    def rtn(cls, blocks: Sequence[Block], scheme: Scheme, device: torch.device | str = "cpu") -> Theta:
        """No smoothing and full range: plain round-to-nearest."""
        theta = cls()
        for block in blocks:
            for pair in block.producers:
                theta.smoothing[pair_key(block, pair)] = torch.zeros(pair_width(block, pair), device=device)
            for name in block.linears:
                rows, columns = block.child(name).weight.shape  # type: ignore[union-attr, misc]
                shape = scheme.of(block.path(name)).scale_shape(rows, columns)
                theta.linears[block.path(name)] = Free(torch.zeros(shape, device=device))
        return theta

    @property
    def ratio(self) -> Mapping[str, Tensor]:
        """The log ratio of every linear, by path."""
        return MappingProxyType({path: linear.ratio for path, linear in self.linears.items()})

    @property
    def offset(self) -> Mapping[str, Tensor]:
        """The offsets of the linears whose codes are learned, by path."""
        learned = {path: linear for path, linear in self.linears.items() if isinstance(linear, Learned)}
        return MappingProxyType({path: linear.offset for path, linear in learned.items()})

    @property
    def settled(self) -> Mapping[str, Settled]:
        """The linears whose codes are settled, by path."""
        settled = {path: linear for path, linear in self.linears.items() if isinstance(linear, Settled)}
        return MappingProxyType(settled)

    def clone(self) -> Theta:
        return Theta(
            {key: u.detach().clone() for key, u in self.smoothing.items()},
            {path: clone_linear(linear) for path, linear in self.linears.items()},
            **self.cloned_scales(),
        )

    @torch.no_grad()
    def copy_(self, other: Theta) -> None:
        """Take the values of a theta with the same tensors."""
        values = other._named()
        for name, tensor in self._named().items():
            if tensor is not values[name]:  # codes are shared
                tensor.copy_(values[name])

    def freed(self) -> Theta:
        """A clone whose codes all follow the weights again: smoothing and ratios alone."""
        ratios = {path: Free(ratio.detach().clone()) for path, ratio in self.ratio.items()}
        smoothing = {key: u.detach().clone() for key, u in self.smoothing.items()}
        return Theta(smoothing, dict(ratios), **self.cloned_scales())

    @property
    def version(self) -> int:
        """A number that differs after every change that was made since it was last read.

        A tensor may be written to or replaced. Tensors of inference mode count no writes, so they count as changed."""
        now = [(tensor, None if tensor.is_inference() else tensor._version) for tensor in self._named().values()]
        same = len(now) == len(self._seen) and all(
            one is other and count is not None and count == before
            for (one, count), (other, before) in zip(now, self._seen, strict=True)
        )
        if not same:
            self._seen, self._changes = now, self._changes + 1
        return self._changes

    @torch.no_grad()
    def project_(self, origin: Theta) -> None:
        """Move it back into the trust region around `origin`.

        u keeps zero mean and a bounded distance, ratios and offsets stay in their ranges. An offset whose origin lies
        outside may go as far as its origin, and so may a ratio above full range. A constant added to a pair's u changes
        nothing, since row and token scales absorb it, so its mean is pinned. Scales of settled codes do not follow, so
        there it is not.
        """
        settled = self.settled
        if not settled:
            for u in self.smoothing.values():
                u.sub_(u.mean())
        if origins := [origin.smoothing[key] for key in self.smoothing]:
            low, high = torch._foreach_sub(origins, SMOOTHING_REACH), torch._foreach_add(origins, SMOOTHING_REACH)
            _clamp_(list(self.smoothing.values()), low, high)
        _clamp_([linear.ratio for linear in settled.values()], *SETTLED_RANGE)
        free = [path for path in self.linears if path not in settled]
        highest = [origin.ratio[path].clamp(min=RATIO_RANGE[1]) for path in free]
        _clamp_([self.ratio[path] for path in free], RATIO_RANGE[0], highest)
        offsets = origin.offset
        for path, offset in self.offset.items():
            begin = offsets[path]
            offset.clamp_(begin.clamp(max=OFFSET_RANGE[0]), begin.clamp(min=OFFSET_RANGE[1]))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in a file: `ratio/layers.0.self_attn.q_proj`."""
        return {name: tensor.detach().contiguous() for name, tensor in self._named().items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Theta:
        theta, parts = cls(), dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            part, key = name.split("/", 1)
            if part == "smoothing":
                theta.smoothing[key] = tensor
            elif part == "input":
                theta.inputs[key] = tensor
            elif part == "cache":
                theta.caches[key] = tensor
            else:
                parts.setdefault(key, {})[PARTS[part]] = tensor
        for path, given in parts.items():
            kind = Settled if "levels" in given else Learned if "offset" in given else Free
            theta.linears[path] = kind(**given)
        return theta

    def save(self, path: Path) -> None:
        self.saving()(path)

    def saving(self) -> Callable[[Path], None]:
        """A function that saves it to a path, now or later: its tensors are on the CPU already."""
        return partial(save_file, {name: tensor.cpu() for name, tensor in _halved(self.tensors())})

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu", codes: torch.device | str | None = None) -> Theta:
        """The theta of a file, its settled codes on a device of their own if one is given."""
        if codes is None:
            return cls.of_tensors(dict(_whole(load_file(path, device=str(device)))))
        tensors = _whole(load_file(path))
        return cls.of_tensors({name: one.to(codes if name.startswith("levels/") else device) for name, one in tensors})

    def cloned_scales(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the scales that belong to no linear, by the name of their field."""
        fields = {"inputs": self.inputs, "caches": self.caches}
        return {name: {key: scale.clone() for key, scale in scales.items()} for name, scales in fields.items()}

    def _named(self) -> dict[str, Tensor]:
        named = {f"smoothing/{key}": u for key, u in self.smoothing.items()}
        named |= {f"input/{key}": scale for key, scale in self.inputs.items()}
        named |= {f"cache/{key}": scales for key, scales in self.caches.items()}
        for part, field_name in PARTS.items():
            for path, linear in self.linears.items():
                if hasattr(linear, field_name):
                    named[f"{part}/{path}"] = getattr(linear, field_name)
        return named


def clone_linear(linear: LinearTheta) -> LinearTheta:
    """A copy of a linear's part; settled levels, which nobody writes to, are shared."""
    ratio = linear.ratio.detach().clone()
    match linear:
        case Free():
            return Free(ratio)
        case Learned(offset=offset):
            return Learned(ratio, offset.detach().clone())
        case Settled(levels=levels, scale=scale):
            return Settled(ratio, levels, scale)


def _halved(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Settled codes of at most four bits, two in a byte, the first in its lower half; everything else as it is."""
    for name, tensor in tensors.items():
        part, key = name.split("/", 1)
        if part == "levels" and tensor.dtype == torch.int8 and not tensor.shape[1] % 2 and _narrow(tensor):
            nibbles = (tensor + 8).to(torch.uint8)
            yield f"halved/{key}", nibbles[:, ::2] | nibbles[:, 1::2] << 4
        else:
            yield name, tensor


def _narrow(levels: Tensor) -> bool:
    low, high = levels.aminmax()
    return int(low) >= -8 and int(high) < 8


def _whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        part, key = name.split("/", 1)
        if part == "halved":
            nibbles = torch.stack((tensor & 15, tensor >> 4), -1).flatten(1)
            yield f"levels/{key}", nibbles.to(torch.int8) - 8
        else:
            yield name, tensor


def _clamp_(tensors: Sequence[Tensor], low: float | Sequence[Tensor], high: float | Sequence[Tensor]) -> None:
    """All of them at once: a GPU would wait for hundreds of small operations otherwise."""
    if tensors:
        torch._foreach_clamp_min_(tensors, low)  # type: ignore[call-overload]
        torch._foreach_clamp_max_(tensors, high)  # type: ignore[call-overload]


def ratio_range(scheme: Scheme) -> tuple[float, float]:
    """The bounds of a log scale ratio that is learned."""
    return RATIO_RANGE if scheme.scales == "dtype" else VALID_RANGE


def layer_key(block: Block) -> str:
    return f"layers.{block.index}"


def pair_key(block: Block, pair: str) -> str:
    return f"layers.{block.index}.{pair}"


def pair_width(block: Block, pair: str) -> int:
    producer = block.producers[pair]
    weight = block.child(producer).weight
    return int(weight.shape[0]) - block.emitted(producer)  # type: ignore[union-attr, index]


def log_scales_in(theta: Theta, block: Block, name: str) -> Tensor | None:
    """log s of the input columns of a linear or a follower, [I]; None where nothing is folded into what it reads.

    Under GQA one s per KV channel serves every query head of its group."""
    pair = block.pair_into(name)
    if pair not in block.producers:
        return None
    u = theta.smoothing[pair_key(block, pair)]
    if pair == "v_o":
        u = u.view(block.kv_heads, 1, block.head_dim).expand(-1, block.groups, -1).reshape(-1)
    return u


def log_scales_out(theta: Theta, block: Block, name: str) -> Tensor | None:
    """log s that divides what a norm, v_proj or up_proj emits; None where nothing is divided.

    A fused linear has zeros for the rows in front of them."""
    pair = block.pair_out_of(name)
    if pair is None:
        return None
    u, first = theta.smoothing[pair_key(block, pair)], block.emitted(name)
    return functional.pad(u, (first, 0)) if first else u
