"""Bytes that each phase of a run holds at its peak: bounds from the shapes, in a few terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from onptq import methods
from onptq.cycle.compare import LOGIT_BYTES
from onptq.engine.budget import WHOLE, Budgets
from onptq.models.sharding import Layout
from onptq.plan.parts import Shapes
from onptq.plan.work import Work
from onptq.schemes import Scheme

WIDE = 4  # bytes of a float32
# Float32 results that a chain of elementwise operations holds at once, of a weight being rounded or of logits being
# compared. Measured on a CPU and on an H200.
TEMPORARIES = 4
THETAS = 3  # alive in an update: the one it began with, the present one, the best
ADAM = 3  # numbers beside each learned one: gradient and two moments

Terms = dict[str, int]


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that computes, by phase and term."""

    shapes: Shapes
    work: Work
    scheme: Scheme
    compute: int  # bytes of a number in the compute dtype
    budgets: Budgets
    on_gpu: bool = False
    converted: int = 0  # bytes of files that are read into another dtype on the host
    layout: Layout = "whole"

    def phases(self) -> Mapping[str, Terms]:
        """The peak of every phase that the recipe has, in the order of the run."""
        peaks = {
            "Load": self.load(),
            "Encode": self.encode(),
            "Initialize": self.initialize(),
            **dict.fromkeys(("Follow", "Compare"), self.rollouts()),
            "Branch": self.branch(),
            "Calibrate": self.calibrate(),
            "Export": self.folding(),
            "Verify": self.verify(),
        }
        return {name: peaks[name] for name in self.work.phases}

    @property
    def blocks(self) -> int:
        """The decoder's linears in the compute dtype."""
        return self.shapes.linears * self.compute

    @property
    def whole(self) -> int:
        """The model in the compute dtype."""
        return self.shapes.loaded * self.compute

    @property
    def weights(self) -> int:
        """What one process holds of the model on its device: all, or everything but the blocks and its part of these."""
        if self.layout == "whole":
            return self.whole
        part = 0 if self.layout == "offloaded" and self.on_gpu else ceil(self.blocks / self.work.gpus)
        return self.whole - self.blocks + part

    @property
    def made_whole(self) -> Terms:
        """Blocks that are whole for a moment, where a process has parts."""
        return {} if self.layout == "whole" else {"gathered blocks": WHOLE * self.shapes.block * self.compute}

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel rounds weights and leaves no intermediate results."""
        return self.on_gpu and self.scheme.weight_floats is None

    @property
    def packed(self) -> int:
        """The decoder's linears in the output."""
        return self.shapes.linears * self.scheme.weight_bits // 8

    @property
    def made(self) -> int:
        """Q's weight that a forward makes, beside the one before."""
        return 2 * self.shapes.largest * self.compute

    @property
    def init_rounds(self) -> bool:
        """Whether theta^(0) has an entry for every weight."""
        return bool(self.work.prompts) and methods.accepts(self.work.recipe.init, "settled")

    @property
    def settled(self) -> int:
        """What one process holds of settled codes: all, or its part and those of the gathered blocks."""
        each = 1 if self.scheme.symmetric else 2
        if self.layout == "whole":
            return each * self.shapes.linears
        part = 0 if self.layout == "offloaded" and self.on_gpu else ceil(self.shapes.linears / self.work.gpus)
        return each * (part + WHOLE * self.shapes.block)

    def theta(self, copies: int = 1, updates: int = 1) -> Terms:
        """Theta's entries for every weight after so many updates: settled codes, which thetas share, or offsets."""
        codes = self.work.recipe.calibrate.codes
        if self.work.recipe.settles:
            return {"theta's codes": self.settled}
        offsets = self.init_rounds or (self.work.banks and updates and codes == "learned")
        return {"rounding offsets": self.shapes.linears * WIDE * copies} if offsets else {}

    @property
    def whole_theta(self) -> Terms:
        """Theta as files have it, and the host of the first process until its codes are split."""
        return replace(self, layout="whole").theta()

    @property
    def files(self) -> int:
        """Thetas that the run writes beside the checkpoint: the init and one of every round."""
        recipe, scheme = self.work.recipe, self.scheme
        in_halves = (
            recipe.settles and scheme.symmetric and scheme.weight_bits <= 4 and not scheme.weight_floats
        )  # 2 a byte
        scales = (1 + recipe.settles) * WIDE * self.shapes.scales
        return (1 + recipe.rounds) * (scales + _total(self.whole_theta) // (1 + in_halves))

    def resident(self) -> Terms:
        """The model, encoded prompts within their budget, and one batch of them; DeepStack's features likewise."""
        shapes, work, budget = self.shapes, self.work, self.budgets.prompts
        token = shapes.hidden * self.compute
        prompts = work.every * (work.prompt_tokens + shapes.deepstack * work.media_tokens) * token
        held = prompts if budget is None else min(budget, prompts)
        batch = work.rows * work.prompt_tokens * (1 + shapes.deepstack) * token
        return {"weights": self.weights, **self.made_whole, "prompts": held + batch}

    def deployed(self, updates: int = 1) -> Terms:
        """Q with its theta after so many updates. Without zero points, settled codes are theta's own."""
        linears, keep, recipe = self.shapes.linears, self.budgets.keep, self.work.recipe
        shared = keep == "nothing" or (recipe.settles and self.scheme.symmetric)
        floats = self.compute * linears if keep == "floats" else 0 if keep == "integers" else self.made
        codes = {"Q's codes": 0 if shared else linears, "Q's weights": floats, "rounding": self.rounded()}
        return self.resident() | self.theta(updates=updates) | codes

    def prefixes(self, sides: int) -> Terms:
        """Cached keys and values of `sides` policies: calibration and held-out prompts, each within the budget."""
        work = self.work
        own = (ceil(count * work.share(work.batches(count))) for count in (work.followed, work.holdout))
        each = (sides * self.cached(count, work.length) for count in own)
        budget = self.budgets.prefixes
        return {"prefix caches": sum(size if budget is None else min(budget, size) for size in each)}

    def cached(self, rows: int, length: int) -> int:
        """Keys and values of so many sequences, their states, and those that they go back to."""
        token = 2 * self.shapes.attending * self.shapes.kv * self.compute
        return rows * (length * token + 2 * WIDE * self.shapes.recurrent)

    def activations(self, tokens: int, keys: int) -> int:
        """The widest moment of a block, in its MLP or its attention, for `tokens` that see `keys` each."""
        shapes = self.shapes
        widths = max(4 * shapes.ffn, 4 * shapes.query + 2 * shapes.kv) + 2 * shapes.hidden
        return tokens * (self.compute * widths + 2 * WIDE * shapes.hidden + keys * (1 + self.compute))

    def rounded(self) -> int:
        """One weight on its way to codes."""
        return self.shapes.largest * (self.compute if self.by_kernel else TEMPORARIES * WIDE)

    def graph(self, tokens: int, keys: int, blocks: int, settled: bool) -> Terms:
        """The graph of a backward pass of `blocks`: rounded weights, without a kernel also what they were made of, and
        the inputs of every operation, those of linears rounded too."""
        shapes, linear = self.shapes, 2 if self.scheme.quantizes_activations else 1
        weight = self.compute * (2 if settled and self.scheme.group_size else 1)
        weight += 0 if settled or self.by_kernel else 2 * WIDE
        widths = (5 * linear + 8) * shapes.hidden + (linear + 6) * shapes.query + (linear + 4) * shapes.ffn
        widths += 2 * shapes.kv if self.scheme.quantizes_cache else 0
        token = self.compute * widths + 4 * WIDE * shapes.hidden + keys * (1 + self.compute)
        return {
            "weights in the graph": blocks * shapes.block * weight + self.rounded(),
            "activations in the graph": blocks * tokens * token,
        }

    def logits(self, states: int) -> int:
        """Logits of both models, in chunks."""
        return TEMPORARIES * min(LOGIT_BYTES, 2 * states * self.shapes.vocabulary * WIDE)

    def load(self) -> Terms:
        files = {} if self.on_gpu else {"files being read": self.converted}
        if self.layout != "whole" and not self.on_gpu:
            return {"weights": self.whole} | files  # pages of the files, which are let go once a process has its parts
        return {"weights": self.weights} | self.made_whole | files

    def encode(self) -> Terms:
        shapes, work = self.shapes, self.work
        width = 16 * int((max(shapes.vision, shapes.audio) / (12 * 32)) ** 0.5)  # of a tower of 32 layers of 12 w^2
        return self.resident() | {"activations": work.media_tokens * shapes.patches * width * self.compute}

    def initialize(self) -> Terms:
        """Rollouts of D, then block by block; where rounding is learned, a block's offsets and hidden states."""
        shapes, work, length = self.shapes, self.work, self.work.answered
        every, tokens = work.init_prompts * length, work.start_rows * length
        rows = max(1, min(work.init_prompts, work.recipe.compute.batch_tokens // length))
        following = {
            "prefix caches": self.cached(rows, length),
            "activations": self.activations(rows * work.prompt_tokens, work.prompt_tokens),
        }
        learning = {
            **(self.theta() if self.init_rounds else {}),
            **self.graph(tokens, length, 1, settled=False),
            "offsets of a block": 2 * shapes.block * WIDE,  # with the best so far or the gradient
            "hidden states": (3 * every * self.compute + tokens * (self.compute + 3 * WIDE)) * shapes.hidden,
        }
        options: list[Terms] = [{} if work.recipe.init == "rtn" else following]
        return self.resident() | max([*options, *([learning] if work.start_rounds else [])], key=_total)

    def rollouts(self) -> Terms:
        """Batches of prompts through Q and D. At the end the held-out ones go through RTN, with theta still there."""
        work, rtn = self.work, {}
        if work.holdout and work.recipe.method != "rtn" and self.budgets.keep != "nothing":
            rtn = {"Q's codes": self.shapes.linears}
        return self.deployed() | rtn | self.prefixes(2) | self.forwards()

    def branch(self) -> Terms:
        return self.deployed(self.work.banks - 1) | self.prefixes(2) | self.forwards()

    def forwards(self) -> Terms:
        """A batch of prompts, or the logits of its states."""
        work = self.work
        batch = self.activations(work.rows * work.prompt_tokens, work.prompt_tokens)
        logits = self.logits(work.rows * work.response_tokens)
        return {"activations": batch} if batch > logits else {"logits": logits}

    def calibrate(self) -> Terms:
        work, shapes, calibrate = self.work, self.shapes, self.work.recipe.calibrate
        targeted = ceil(work.target_share * work.followed) + ceil(work.dealt(work.holdout) * work.holdout)
        hidden = targeted * work.length * shapes.hidden * self.compute
        budget, targets = self.budgets.targets, shapes.layers * hidden
        tokens = work.micro_batch * work.longest
        blocks = 1 if calibrate.checkpointing else shapes.layers
        return {
            **self.resident(),
            **self.theta(THETAS + (ADAM if calibrate.codes == "learned" else 0)),
            **self.prefixes(1),
            **self.graph(tokens, work.longest, blocks, work.recipe.settles),
            "answered prompts": tokens * shapes.hidden * self.compute,
            "dense targets": targets if budget is None else min(budget, targets),
            "hidden states": shapes.layers * tokens * shapes.hidden * (self.compute + WIDE),
            "logits": self.logits(-(-work.decisions * work.micro_batch // max(1, work.followed))),
        }

    def folding(self) -> Terms:
        """Q's codes without the floats that its forwards make of them."""
        return self.deployed() | {"Q's weights": 0} | self.prefixes(2)

    def verify(self) -> Terms:
        """The logits of two prompts under the run's model, then under the checkpoint, which is loaded in its place."""
        logits = {"logits": 2 * self.work.prompt_tokens * self.shapes.vocabulary * WIDE}
        weights = {"Q's weights": self.made, "rounding": self.rounded()}
        attached = self.resident() | self.theta() | self.prefixes(2) | weights
        if self.layout != "whole":  # it is loaded again only where it fits whole
            return attached | logits
        reloaded = self.load() | {"packed weights": self.packed}
        return max(attached, reloaded, key=_total) | logits


def _total(terms: Terms) -> int:
    return sum(terms.values())
