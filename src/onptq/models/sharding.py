"""The blocks of a decoder, split over the processes of a job by FSDP2: each is whole only while some process uses it.

Processes use blocks at different times: answers end early, caches hit, the first one initializes alone. But a block becomes
whole only where all of them take part. So a process that needs one asks for it, and all of them take turns: in each, they
exchange what they ask for, and gather the one block that all of them choose by the same rule. A process that waits for the
others takes part in their turns until all of them wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional

from onptq.errors import OnPTQError
from onptq.models.structure import Block
from onptq.ranks import Ranks

Layout = Literal["whole", "sharded", "offloaded"]  # of the blocks: on every device, split over devices, or over hosts
Step = Callable[..., tuple[Tensor, ...]]  # a block, of the residual stream and what it borrows
WAITING = -1  # what a process asks for that needs no block


class Request(NamedTuple):
    """A block that is asked for, on the way forward or back through the decoder."""

    block: int
    back: bool = False

    @property
    def number(self) -> int:
        return 2 * self.block + self.back

    @classmethod
    def of(cls, number: int) -> Request:
        return cls(number // 2, bool(number % 2))


def choose(requests: Iterable[Request], last: Request) -> Request:
    """The request that is served next after `last`: the one that goes on with its pass, else the first of the passes
    forward, else the first of those back. So processes that begin a pass in turns go through it together."""
    asked = set(requests)
    following = Request(last.block + (-1 if last.back else 1), last.back)
    if following in asked:
        return following
    forward = [request for request in asked if not request.back]
    return min(forward) if forward else max(asked)


class Part:
    """This process's part of a tensor that nobody writes to. `whole` has no memory unless its block is gathered."""

    def __init__(self, tensor: Tensor, ranks: Ranks, device: torch.device, *, offloaded: bool) -> None:
        flat = tensor.flatten()
        size = -(-len(flat) // ranks.size)
        piece = flat[ranks.rank * size : (ranks.rank + 1) * size]
        self.own = functional.pad(piece, (0, size - len(piece))).to("cpu" if offloaded else device, copy=True)
        self._ranks = ranks
        self._joined = torch.empty(ranks.size * size, dtype=flat.dtype, device=device)
        self.whole = self._joined[: len(flat)].view(tensor.shape)
        self.release()

    def gather(self) -> None:
        """Give `whole` its values; they count as no write."""
        self._joined.untyped_storage().resize_(self._joined.nbytes)
        own = self.own.to(self._joined.device, non_blocking=True)
        with torch.no_grad(), _unsafe_preserve_version_counter(self._joined):
            self._ranks.join_(self._joined, own)

    def release(self) -> None:
        self._joined.untyped_storage().resize_(0)


class Shard(nn.Module):
    """A block for FSDP2, whose hooks are those of this module: it is never called, so they gather nothing by themselves."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


class ShardedBlocks:
    """Blocks of which every process holds one of equal parts, on the device or, `offloaded`, in the host's memory."""

    def __init__(self, blocks: Sequence[Block], ranks: Ranks, device: torch.device, *, offloaded: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self.ranks, self.offloaded = ranks, offloaded
        _require_group(ranks, device)
        mesh = init_device_mesh(device.type, (ranks.size,))
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloaded else OffloadPolicy()
        self._shards: list[Any] = []
        for block in blocks:
            shard = Shard(block.module)
            with ranks.explained():
                fully_shard(shard, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
            self._shards.append(shard)
            self._gather_in_calls(block)
        self._parts: list[list[Part]] = [[] for _ in blocks]  # gathered with their blocks
        self._device = device
        self._users = [0] * len(blocks)  # of this process, one inside the other
        self._last = Request(-1)
        if ranks.size > 1:
            ranks.waiting.append(self.take_part)

    @property
    def local_bytes(self) -> int:
        """The bytes of this process's parts."""
        own = sum(part.own.nbytes for parts in self._parts for part in parts)
        return own + sum(int(p.to_local().nbytes) for shard in self._shards for p in shard.parameters())

    def part(self, tensor: Tensor) -> Part:
        """This process's part of a tensor that all have."""
        return Part(tensor, self.ranks, self._device, offloaded=self.offloaded)

    def carry(self, parts: Sequence[list[Part]]) -> None:
        """Gather these parts, a list for each block, with their blocks from now on. Every process calls this."""
        self.ranks.meet()  # no process is between two turns of the others
        self._parts = list(parts)

    @contextmanager
    def gathered(self, block: int, *, back: bool = False) -> Iterator[None]:
        """A context in which the block is whole."""
        self._take(Request(block, back))
        try:
            yield
        finally:
            self._give_back(block)

    def take_part(self) -> None:
        """Take part in the turns of the other processes until all of them wait."""
        while self._turn(WAITING) is not None:
            pass

    def _take(self, request: Request) -> None:
        if not self._users[request.block]:
            while True:
                served = self._turn(request.number)
                if served is not None and served.block == request.block:
                    break
        self._users[request.block] += 1

    def _give_back(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._release(block)

    def _release(self, block: int) -> None:
        self._shards[block].reshard()
        for part in self._parts[block]:
            part.release()

    def _turn(self, asked: int) -> Request | None:
        """The request that all processes serve now, None where no process has one. What was `asked` for stays whole."""
        numbers = self.ranks.exchange(asked) if self.ranks.size > 1 else [asked]
        requests = [Request.of(number) for number in numbers if number != WAITING]
        if not requests:
            self._last = Request(-1)
            return None
        self._last = served = choose(requests, self._last)
        shard = self._shards[served.block]
        if self._users[served.block]:
            self._release(served.block)  # it is whole here, and the others need this process's part
        with self.ranks.explained():
            try:
                shard.unshard()
                for part in self._parts[served.block]:
                    part.gather()
            except (
                torch.OutOfMemoryError
            ) as error:  # the others are in the middle of it, so nothing smaller can be tried
                raise OnPTQError(
                    f"layers.{served.block} does not fit into memory as a whole: expected a lower compute.cache_gib or "
                    "compute.batch_tokens, or a device with more memory"
                ) from error
        if not self._users[served.block] and (asked == WAITING or Request.of(asked).block != served.block):
            self._release(served.block)
        return served

    def _gather_in_calls(self, block: Block) -> None:
        """Make the block whole for every call of it, by whichever code."""

        def before(*_: object) -> None:
            self._take(Request(block.index))

        def after(*_: object) -> None:
            if self._users[block.index]:  # not after an error in `before`
                self._give_back(block.index)

        block.module.register_forward_pre_hook(before, prepend=True)
        block.module.register_forward_hook(after, always_call=True)


class _Recomputed(torch.autograd.Function):
    """A function of tensors that keeps them alone, and is run again for its gradients."""

    @staticmethod
    def forward(ctx: Any, step: Step, around: Callable[[], AbstractContextManager[None]], *given: Tensor) -> Any:
        ctx.step, ctx.around = step, around
        ctx.save_for_backward(*given)
        return step(*given)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with ctx.around():
            with torch.enable_grad():
                made = ctx.step(*given)
            torch.autograd.backward(made, gradients)
        return None, None, *(tensor.grad for tensor in given)


def recomputed(step: Step, around: Callable[[], AbstractContextManager[None]], *given: Tensor) -> tuple[Tensor, ...]:
    """`step(*given)`, run again in the backward pass, `around` the second run and its gradients. No graph is built before."""
    return _Recomputed.apply(step, around, *given)  # type: ignore[no-untyped-call, no-any-return]


def _require_group(ranks: Ranks, device: torch.device) -> None:
    """FSDP2 wants a group of processes, also of one."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if ranks.size == 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
