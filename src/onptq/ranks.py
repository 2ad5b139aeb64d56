"""The processes of one job: `torchrun --nproc-per-node N` starts N that share the work on the prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from onptq.errors import OnPTQError, RaisedElsewhereError
from onptq.heartbeat import Heartbeat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
TOGETHER = 2**20  # tensors with fewer elements are summed as one
PATIENCE = timedelta(days=7)  # the others wait while one initializes; torchrun ends them all if one of them dies
JOINED = count()  # times that this process has joined
TEXT, ARRAY = "$text", "$array"  # in a message: its JSON, and in that the name of an array


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are. Every method but `shares` is a collective: all ranks call it in the same order.

    What travels is plain: None, numbers, text, lists, mappings and numpy arrays. Tuples arrive as lists."""

    rank: int = 0
    size: int = 1
    # What a rank does until all are here, and as it leaves.
    waiting: list[Callable[[], None]] = field(default_factory=list, compare=False)
    leaving: Callable[[], None] = field(default=lambda: None, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        import torch

        self._wait()
        own = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all(torch.tensor([len(own)]))]
        messages = self._all(torch.nn.functional.pad(own, (0, max(sizes) - len(own))))
        return [unpack(each[:size].numpy().tobytes()) for each, size in zip(messages, sizes, strict=True)]

    def lead(self, work: Callable[[], T]) -> T:
        """What the first rank computes; an error of it ends all ranks."""
        if self.size == 1:
            return work()
        value, error = None, None
        if self.is_first:
            try:
                value = work()
            except OnPTQError as raised:
                error = raised
        sent, message = self.gather([value, None if error is None else str(error)])[0]
        if error is not None:
            raise error
        if message is not None:
            raise RaisedElsewhereError(message)
        return value if self.is_first else sent  # type: ignore[no-any-return, return-value]

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """`work()` on the first rank, None on the others, which wait; an error of it ends all ranks."""
        done: list[T] = []
        self.lead(lambda: done.append(work()))
        return done[0] if done else None

    def after_first(self, work: Callable[[], T]) -> T:
        """`work()` on every rank, on the others once it has ended without an error on the first."""
        done = self.first_alone(lambda: [work()])
        return done[0] if done is not None else work()

    def each(self, work: Callable[[], T]) -> list[T]:
        """What every rank computes, in their order; an error of any ends all."""
        value, error = None, None
        try:
            value = work()
        except OnPTQError as raised:
            if self.size == 1:
                raise
            error = raised
        results = self.gather([value, None if error is None else str(error)])
        if error is not None:
            raise error
        if (message := next((message for _, message in results if message is not None), None)) is not None:
            raise RaisedElsewhereError(message)
        return [value for value, _ in results]

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def leave(self) -> None:
        """End the group of the ranks: from here on each works alone."""
        import torch.distributed as dist

        self.waiting.clear()
        self.leaving()
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; small ones travel together."""
        if self.size == 1:
            return
        import torch

        self._wait()
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() < TOGETHER:
                small.setdefault(tensor.dtype, []).append(tensor)
            else:
                self._sum(tensor)
        for each in small.values():
            joined = torch.cat([tensor.flatten() for tensor in each])
            self._sum(joined)
            for tensor, total in zip(each, joined.split([tensor.numel() for tensor in each]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def join_(self, whole: Tensor, own: Tensor) -> None:
        """Put the equal parts of all ranks into `whole`, in their order."""
        import torch.distributed as dist

        if self.size == 1:
            whole.copy_(own)
        else:
            with self.explained():
                dist.all_gather_into_tensor(whole, own)

    def shares(self, values: Sequence[T], most: int) -> list[T]:
        """The values of this rank: `most` of them at a time go to the ranks in turn, or fewer so that all get some."""
        together = max(1, min(most, -(-len(values) // self.size)))
        starts = range(self.rank * together, len(values), self.size * together)
        return [value for start in starts for value in values[start : start + together]]

    def exchange(self, number: int) -> list[int]:
        """The numbers of all ranks, which neither wait for anything else nor know what the others do."""
        import torch

        return [int(each) for each in self._all(torch.tensor([number]))]

    def _wait(self) -> None:
        for take_part in self.waiting:
            take_part()

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of the host, of every rank."""
        import torch
        import torch.distributed as dist

        each = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.explained():
            dist.all_gather(each, tensor)
        return each

    def _sum(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        with self.explained():
            dist.all_reduce(tensor)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which the loss of another process is an error that the first two ranks show: one of them is left."""
        try:
            yield
        except RuntimeError as error:
            shown = OnPTQError if self.rank < 2 else RaisedElsewhereError
            reason = str(error).splitlines()[0].partition(". ")[0]
            raise shown(
                f"another process of this job has ended: its own message says why; the same command, with any number of "
                f"processes, continues the run ({reason})"
            ) from error


ALONE = Ranks()


@contextmanager
def join(device: str = "auto") -> Iterator[Ranks]:
    """The ranks that torchrun started this process among; without torchrun this process alone.

    Where `device` is a GPU, each takes one of its own."""
    size = started()
    if size == 1:
        try:
            yield ALONE
        finally:
            ALONE.leave()  # the group of one that sharding makes
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(own_gpu(torch.cuda.device_count()))
    backend, (store, rank, _) = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", next(rendezvous("env://", timeout=PATIENCE))
    # torchrun's store still has the addresses of groups and processes that have ended. Machines count restarts apart.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ["GROUP_WORLD_SIZE"] == "1" else "0"
    store = PrefixStore(f"onptq/{attempt}/{next(JOINED)}", store)
    heartbeat = Heartbeat(store, rank, size)
    dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=size)
    heartbeat.start()
    ranks = Ranks(rank, size, leaving=heartbeat.stop)
    yield ranks
    if dist.is_initialized():  # and not after an error: the others may be waiting for this rank
        ranks.leave()


def started() -> int:
    """The number of processes that torchrun started, on all machines; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first() -> bool:
    """Whether this process is alone, or the first that torchrun started."""
    return started() == 1 or os.environ["RANK"] == "0"


def on_this_machine() -> int:
    """The number of processes that torchrun started on this machine, which share its memory."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if started() > 1 else 1


def own_gpu(gpus: int) -> int:
    """The number of this process's GPU, of those of this machine."""
    own, processes = int(os.environ["LOCAL_RANK"]), on_this_machine()
    if processes > gpus:
        shown = OnPTQError if own == 0 else RaisedElsewhereError
        raise shown(
            f"torchrun started {processes} processes on a machine with {gpus} GPU{'s' if gpus > 1 else ''}: expected "
            f"--nproc-per-node {gpus} or fewer"
        )
    return own


def pack(value: Any) -> bytes:
    """A plain value as a safetensors file: its JSON, and its arrays."""
    import numpy as np
    from safetensors.numpy import save

    arrays: dict[str, Any] = {}

    def place(array: Any) -> dict[str, str]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} is not plain data")
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(array)
        return {ARRAY: name}

    text = json.dumps(value, default=place).encode()
    message: bytes = save({TEXT: np.frombuffer(text, np.uint8), **arrays})
    return message


def unpack(message: bytes) -> Any:
    """The value that was packed."""
    from safetensors.numpy import load

    arrays = load(message)
    return json.loads(arrays.pop(TEXT).tobytes(), object_hook=lambda one: arrays[one[ARRAY]] if ARRAY in one else one)
