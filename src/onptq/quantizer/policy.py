"""D and Q in one: a single set of weights, wrapped so that it computes as the dense or as the quantized policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from onptq.errors import OnPTQError
from onptq.models.language_model import LanguageModel, Side
from onptq.models.sharding import Part, ShardedBlocks
from onptq.models.structure import Block, find_structure
from onptq.quantizer.caches import QuantCache, check_cache
from onptq.quantizer.folded import Folded
from onptq.quantizer.mix import check_mix
from onptq.quantizer.modules import Keep, Live, QuantFollower, QuantLinear, QuantNorm, Switch
from onptq.quantizer.proof import prove
from onptq.quantizer.theta import Free, LinearTheta, Settled, Theta
from onptq.ranks import Ranks
from onptq.schemes import Scheme


class Policy(LanguageModel):
    """pi_D and pi_Q over the same weights; `speaking` chooses one of them for a with-block."""

    def __init__(
        self, model: nn.Module, scheme: Scheme, *, storage: torch.dtype | None = None, eos: Sequence[int] = ()
    ) -> None:
        structure, self.unfolded = prove(find_structure(model))  # unfolded: a sentence on every pair that does not fold
        super().__init__(model, eos, structure=structure)
        self.scheme, self.switch = scheme, Switch()
        self.storage = storage or self.dtype
        check_cache(self.structure, scheme)
        check_mix(scheme, [block.path(name) for block in self.structure.blocks for name in block.linears])
        self.wrapped = tuple(self._wrap())
        self._parts: dict[str, Part] = {}  # of settled codes, by path, where blocks are sharded

    @property
    def generation(self) -> tuple[int, int]:
        """The identity of the present Q.

        It differs after every attach, freeze or release, and after every step of an optimizer on an attached theta."""
        state = self.wrapped[0].state
        return self.switch.generation, state.theta.version if isinstance(state, Live) else 0

    @contextmanager
    def speaking(self, side: Side) -> Iterator[None]:
        before, self.switch.quantized = self.switch.quantized, side == "Q"
        try:
            yield
        finally:
            self.switch.quantized = before

    @cached_property
    def linears(self) -> Mapping[str, QuantLinear]:
        """Its linears by path."""
        return {module.path: module for module in self._linears()}

    def scheme_of(self, block: Block, pair: str) -> Scheme:
        """The scheme of the linears that read a pair's input: servers multiply them as one, so they share it."""
        return self.scheme.of(block.path(block.consumers(pair)[0]))

    def shard(self, ranks: Ranks, device: torch.device, *, offloaded: bool = False) -> None:
        """Split the blocks over the ranks, and move everything else of the model to the device."""
        inside = {module for block in self.structure.blocks for module in block.module.modules()}
        self.sharded = ShardedBlocks(self.structure.blocks, ranks, device, offloaded=offloaded)
        for module in self.model.modules():
            if module not in inside:
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(device, copy=True)  # no page of a file stays
                for name, buffer in [*module.named_buffers(recurse=False)]:
                    setattr(module, name, buffer.to(device))
        for linear in self._linears():
            if linear.tensor_scale is not None:
                linear.tensor_scale = linear.tensor_scale.to(device)
        self.device = device

    def gathered(self, block: Block) -> AbstractContextManager[None]:
        """A context in which the block's weights can be read, also where they are sharded."""
        return nullcontext() if self.sharded is None else self.sharded.gathered(block.index)

    def gathered_blocks(self, blocks: Collection[int] | None = None) -> Iterator[Block]:
        """Every block in turn, or those alone; until the next one its weights can be read."""
        for block in self.structure.blocks:
            if blocks is None or block.index in blocks:
                with self.gathered(block):
                    yield block

    # What changes Q: attach, freeze, release, and lent until it ends.

    def attach(self, theta: Theta) -> None:
        """Q becomes differentiable in theta: weights are fake-quantized in every forward."""
        for module in self.wrapped:
            module.attach(theta)

    def freeze(self, theta: Theta, *, keep: Keep = "codes") -> None:
        """Q becomes what will be deployed: integer codes, scales and folded gains.

        `keep` is the form of its weights between forwards: codes alone, floats as well (faster), or codes that are
        multiplied as integers, which takes a scheme of integers with one scale per row."""
        if keep == "integers" and not self.scheme.multiplies_integers:
            raise OnPTQError(
                f"{self.scheme} is no single product of integers; expected integer weights, one scale per row, and "
                "integer activations"
            )
        for module in self._gathered():
            module.freeze(theta, keep)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which Q may be given any theta; afterwards Q is what it was before."""
        before = [module.state for module in self.wrapped]
        try:
            yield
        finally:
            for module, state in zip(self.wrapped, before, strict=True):
                module.become(state)  # type: ignore[arg-type]

    @contextmanager
    def raised(self, theta: Theta, paths: Sequence[str], scheme: Scheme) -> Iterator[None]:
        """A context in which some linears of Q under theta have another scheme, at full range."""
        modules = [self.linears[path] for path in paths]
        before = [(module.state, module.scheme) for module in modules]
        free = {
            module.path: Free(torch.zeros(scheme.scale_shape(*module.weight.shape), device=self.device))
            for module in modules
        }
        changed = Theta(theta.smoothing, theta.linears | free, theta.inputs, theta.caches)
        for module in modules:
            module.use(scheme)
            module.freeze(changed, keep="floats")
        try:
            yield
        finally:
            for module, (state, own) in zip(modules, before, strict=True):
                module.use(own)
                module.become(state)

    def release(self) -> None:
        """Give the memory back; the policy cannot compute any more."""
        for module in self.wrapped:
            module.become(None)
        self.model.to("meta")

    # What leaves Q as it is.

    @torch.no_grad()
    def settle(self, theta: Theta) -> Theta:
        """The theta of the same Q with its codes settled: smoothing and ratios then scale it and round nothing."""
        if not self.scheme.quantizes_weights:
            return theta.clone()
        smoothing = {key: u.detach().clone() for key, u in theta.smoothing.items()}
        linears = ((module.path, module.settle(theta)) for module in self._gathered_linears())
        return Theta(smoothing, self._split(linears), **theta.cloned_scales())

    def load(self, path: Path) -> Theta:
        """A stored theta for all processes; its settled codes are split as the blocks are."""
        return self.split(Theta.load(path, self.device, self.resting))

    def split(self, theta: Theta) -> Theta:
        """The theta with its settled codes split as the blocks are. Every process calls this."""
        if self.sharded is None or not theta.settled:
            return theta
        return Theta(theta.smoothing, self._split(theta.linears.items()), theta.inputs, theta.caches)

    def whole(self, theta: Theta) -> Theta:
        """The theta with whole codes, on the host where they are split."""
        if not self._parts:
            return theta
        linears = dict(theta.linears)
        for module in self._gathered_linears():
            if isinstance(linear := linears[module.path], Settled):
                linears[module.path] = Settled(linear.ratio, linear.levels.to("cpu", copy=True), linear.scale)
        return Theta(theta.smoothing, linears, theta.inputs, theta.caches)

    @property
    def resting(self) -> torch.device | None:
        """Where settled codes are until they are split; None where blocks and codes are whole."""
        return None if self.sharded is None else torch.device("cpu")

    def settle_block(self, theta: Theta, block: Block) -> None:
        """Settle the codes of one block, in place."""
        if self.scheme.quantizes_weights:
            with self.gathered(block):
                for module in self._linears():
                    if module.block is block:
                        theta.linears[module.path] = settled = module.settle(theta)
                        if isinstance(settled, Settled) and self.resting is not None:
                            settled.levels = settled.levels.to(self.resting)

    @torch.no_grad()
    def centre(self, theta: Theta) -> Theta:
        """The theta of the same Q with an offset that moves every weight to the middle of its code.

        It is then half a scale from any other code: scales may change a little without changing a code, and a code
        changes when the evidence for it adds up."""
        centred = theta.clone()
        for module in self._gathered_linears() if self.scheme.quantizes_weights else ():
            centred.linears[module.path] = module.centre(theta)
        return centred

    def drop_floats(self) -> None:
        """Free the floats of a frozen Q's weights; the next forward makes them again."""
        for module in self._linears():
            module.drop_floats()

    def folded(self, blocks: Collection[int] | None = None) -> Iterator[tuple[str, Folded]]:
        """The folded pieces with their names relative to the decoder, block by block, of all blocks or of those."""
        for module in self._gathered(blocks):
            yield module.path, module.folded()

    def _split(self, linears: Iterable[tuple[str, LinearTheta]]) -> dict[str, LinearTheta]:
        """The linears with their settled codes as parts. All thetas of a run have the same codes, so they share them."""
        if self.sharded is None:
            return dict(linears)
        split, parts = dict[str, LinearTheta](), dict[str, Part]()
        for path, linear in linears:
            split[path] = linear
            if isinstance(linear, Settled):
                new, old = self.sharded.part(linear.levels), self._parts.get(path)
                parts[path] = part = old if old is not None and torch.equal(old.own, new.own) else new
                split[path] = Settled(linear.ratio, part.whole, linear.scale)
        if parts:
            self._parts = parts
            self.sharded.carry(
                [
                    [parts[path] for path in map(block.path, block.linears) if path in parts]
                    for block in self.structure.blocks
                ]
            )
        return split

    def _linears(self) -> Iterator[QuantLinear]:
        return (module for module in self.wrapped if isinstance(module, QuantLinear))

    def _gathered(
        self, blocks: Collection[int] | None = None
    ) -> Iterator[QuantLinear | QuantNorm | QuantFollower | QuantCache]:
        """The wrapped modules of all blocks or of those, block by block, each with its weight."""
        for block in self.gathered_blocks(blocks):
            yield from (module for module in self.wrapped if module.block is block)

    def _gathered_linears(self) -> Iterator[QuantLinear]:
        return (module for module in self._gathered() if isinstance(module, QuantLinear))

    def _wrap(self) -> Iterator[QuantLinear | QuantNorm | QuantFollower | QuantCache]:
        for block in self.structure.blocks:
            for name in block.norms:
                norm = QuantNorm(block.child(name), block, name, self.storage, self.switch)
                block.replace(name, norm)
                yield norm
            for name in (name for pair in block.producers for name in block.followers(pair)):
                follower = QuantFollower(block.child(name), block, name, self.storage, self.switch)
                block.replace(name, follower)
                yield follower
            for name in block.linears:
                linear = block.child(name)
                assert isinstance(linear, nn.Linear)
                wrapped = QuantLinear(linear, block, name, self.scheme.of(block.path(name)), self.storage, self.switch)
                block.replace(name, wrapped)
                yield wrapped
            if self.scheme.quantizes_cache and "o_proj" in block.linears:
                yield QuantCache(block, self.scheme, self.storage, self.switch)
