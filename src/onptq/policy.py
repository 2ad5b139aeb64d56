"""D and Q in one: a single set of weights, wrapped so that it speaks as the dense or as the quantized policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.models.decoder import Cache, KVCache, Tokens, head_logits, run_blocks
from onptq.models.encoding import EncodedPrompt, encode_many
from onptq.models.loading import Source, choose_device, choose_dtype, find_source, load_model
from onptq.models.structure import LINEARS, NORMS, Block, find_structure
from onptq.quantizer.folded import FoldedLinear, FoldedNorm
from onptq.quantizer.modules import QuantLinear, QuantNorm, Switch
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme

Side = Literal["D", "Q"]


class Policy:
    """pi_D and pi_Q over the same weights; `speaking` says, for a with-block, which of them answers."""

    def __init__(
        self, model: nn.Module, scheme: Scheme, *, storage: torch.dtype | None = None, eos: Sequence[int] = ()
    ) -> None:
        model.eval().requires_grad_(False)
        self.model, self.scheme = model, scheme
        self.structure = find_structure(model)
        self.eos = frozenset(eos)
        self.switch = Switch()
        self.dtype, self.device = self.structure.embedding.weight.dtype, self.structure.embedding.weight.device
        self.storage = storage or self.dtype
        self._wrap()

    @property
    def blocks(self) -> int:
        return len(self.structure.blocks)

    @property
    def vocabulary(self) -> int:
        return self.structure.head.weight.shape[0]

    @contextmanager
    def speaking(self, side: Side) -> Iterator[None]:
        before, self.switch.quantized = self.switch.quantized, side == "Q"
        try:
            yield
        finally:
            self.switch.quantized = before

    def attach(self, theta: Theta) -> None:
        """Q becomes differentiable in theta: weights are fake-quantized in every forward."""
        for module in self._modules():
            module.attach(theta)

    def freeze(self, theta: Theta, *, keep_dequantized: bool = False) -> None:
        """Q becomes what will be deployed: integer codes, steps and folded gains."""
        self.switch.keep_dequantized = keep_dequantized
        for module in self._modules():
            module.freeze(theta)

    @torch.no_grad()
    def settle(self, theta: Theta) -> Theta:
        """The same Q with its codes settled, so that smoothing and ratios scale it and round nothing any more."""
        settled = replace(theta, offset={}).clone()
        settled.offset = dict(theta.offset)
        for block in self.structure.blocks:
            self.settle_block(settled, block)
        return settled

    @torch.no_grad()
    def settle_block(self, theta: Theta, block: Block) -> None:
        """The same for one block, in place."""
        for name in LINEARS if self.scheme.quantizes_weights else ():
            path, module = block.path(name), block.child(name)
            assert isinstance(module, QuantLinear)
            folded = module.fold(theta)
            grouped = folded.codes.view(*folded.step.shape, -1)
            levels = grouped if folded.zero is None else grouped.short() - folded.zero[..., None]
            theta.levels[path], theta.step[path] = levels.view_as(folded.codes), folded.step.float()
            theta.ratio[path] = torch.zeros_like(theta.ratio[path])
            theta.offset.pop(path, None)

    @torch.no_grad()
    def centre(self, theta: Theta) -> Theta:
        """The same Q with every weight moved by its offset onto the very code it has, half a step from any other: scales may
        change a little without changing a code, and a code changes when the evidence for it adds up."""
        self.freeze(theta)
        centred = theta.clone()
        for module in self._modules():
            if isinstance(module, QuantLinear) and self.scheme.quantizes_weights:
                centred.offset[module.block.path(module.name)] = module.centred_offset(theta)
        return centred

    def release(self) -> None:
        """Give the memory back; the policy cannot speak any more."""
        for module in self._modules():
            module.release()
        self.model.to("meta")

    def folded(self) -> Iterator[tuple[str, FoldedLinear | FoldedNorm]]:
        """Every folded piece with its name relative to the decoder, block by block, as the exporter wants them. Of an attached
        theta one piece at a time, which nobody keeps."""
        for module in self._modules():
            piece = module.folded
            if piece is None:
                assert module.live is not None
                piece = module.fold(module.live)
            yield module.block.path(module.name), piece

    def encode(self, inputs: Mapping[str, Tensor], modality: Tensor, ordinal: int = 0) -> EncodedPrompt:
        return self.encode_many([inputs], [modality], [ordinal])[0]

    def encode_many(
        self, inputs: Sequence[Mapping[str, Tensor]], modalities: Sequence[Tensor], ordinals: Sequence[int]
    ) -> list[EncodedPrompt]:
        with self.speaking("D"):
            return encode_many(self.model, self.structure, inputs, modalities, ordinals)

    def embed(self, ids: Tensor) -> Tensor:
        return self.structure.embedding(ids)  # type: ignore[no-any-return]

    def cache(self, batch: int, slots: int) -> KVCache:
        return KVCache(self.structure, batch, slots, self.dtype, self.device)

    def run(
        self,
        tokens: Tokens,
        cache: Cache | None = None,
        observe: Callable[[int, Tensor], None] | None = None,
        checkpointed: bool = False,
    ) -> Tensor:
        return run_blocks(self.structure, tokens, cache, observe, checkpointed)

    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self.structure, hidden)

    def _wrap(self) -> None:
        for block in self.structure.blocks:
            for name in LINEARS:
                linear = block.child(name)
                assert isinstance(linear, nn.Linear)
                block.replace(name, QuantLinear(linear, block, name, self.scheme, self.storage, self.switch))
            for name in NORMS:
                block.replace(name, QuantNorm(block.child(name), block, name, self.storage, self.switch))

    def _modules(self) -> Iterator[QuantLinear | QuantNorm]:
        for block in self.structure.blocks:
            for name in (*NORMS, *LINEARS):
                module = block.child(name)
                assert isinstance(module, QuantLinear | QuantNorm)
                yield module


def load_policy(
    model: str | Path | Source,
    scheme: Scheme | str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
) -> Policy:
    """A checkpoint as D and Q in one, not yet given a theta."""
    source = model if isinstance(model, Source) else find_source(model)
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    device = choose_device(device) if isinstance(device, str) else device
    dtype = choose_dtype(dtype, device) if isinstance(dtype, str) else dtype
    policy = Policy(load_model(source, dtype, device), scheme, storage=source.storage(), eos=source.eos())
    _check_groups(policy)
    return policy


def _check_groups(policy: Policy) -> None:
    size = policy.scheme.group_size
    for block in policy.structure.blocks if size else ():
        for name in ("q_proj", "o_proj", "down_proj"):
            columns = block.child(name).in_features
            if columns % size:  # type: ignore[operator]
                raise OnPTQError(
                    f"{block.path(name)} has {columns} input columns, which groups of {size} do not divide"
                )
