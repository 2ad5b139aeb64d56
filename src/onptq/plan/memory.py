"""How many bytes each phase holds, term by term. A term stands for tensors that are alive together at the phase's peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onptq.cycle.branch import ROW_TOKENS, TREE_TOKENS
from onptq.cycle.compare import LOGIT_BYTES
from onptq.engine.budget import Held
from onptq.methods import ROUNDING
from onptq.methods.search import SAMPLE_TOKENS
from onptq.pipeline import SHARE_OF_FREE, keep_of_q
from onptq.plan.parts import Shapes
from onptq.plan.work import Work
from onptq.recipe import Recipe
from onptq.schemes import Scheme

WIDE = 4  # bytes of a float32: theta, smoothed weights, errors and logits, whatever the compute dtype
THETA_COPIES = 7  # learned, its start, gradient, two moments, the best so far, what a round hands on
OFFSET_COPIES = 6  # learned, its start, gradient, two moments, the best so far; where it was given any, those too
UNLEARNED_COPIES = 4  # where codes are free: as given, beside the learned scales, the best, what is handed on
DECIDE_COPIES = 8  # [states, V]: two logits, two log-softmaxes, their middle, and three on the way to a sum
LOSS_COPIES = 12  # the same with what backward needs
FOLD_COPIES = 4  # of a weight on its way to codes: smoothed, scaled, clamped, rounded

Terms = dict[str, int]


@dataclass(frozen=True)
class Kept:
    """What the run decides to hold between steps, from what is free once the model is loaded."""

    prefixes: int  # bytes, for calibration and held-out prompts each
    targets: int
    weights: Held  # of Q

    @classmethod
    def of(cls, free: int, floats: int, codes: int, recipe: Recipe, on_gpu: bool) -> Kept:
        cache = recipe.compute.cache_gib
        budget = int(SHARE_OF_FREE * free) if cache is None else int(cache * 2**30)
        return cls(budget // 2, budget // 2, keep_of_q(free, cache, floats, codes, recipe, on_gpu))


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that computes, by phase and term."""

    shapes: Shapes
    work: Work
    scheme: Scheme
    compute: int  # bytes of a number in the compute dtype
    storage: int  # in the checkpoint
    kept: Kept
    kernels: bool = False  # on a GPU weights go through kernels, which keep nothing of their size but what they give

    def phases(self) -> Mapping[str, Terms]:
        phases = {"Load": self.load(), "Encode": self.encode(), "Initialize": self.initialize()}
        if self.work.recipe.rounds:
            phases |= {"Follow": self.follow(), "Compare": self.compare()}
            phases |= {"Branch": self.branch()} if self.work.candidates else {}
            phases |= {"Calibrate": self.calibrate()}
        return phases | {"Export": self.export(), "Verify": self.verify()}

    @property
    def weights(self) -> int:
        return self.shapes.loaded * self.compute

    @property
    def prompts(self) -> int:
        """Every encoded prompt, and once more padded into batches; DeepStack's features likewise."""
        shapes, work = self.shapes, self.work
        tokens = 2 * work.prompt_tokens + shapes.deepstack * (work.media_tokens + work.prompt_tokens)
        return work.every * tokens * shapes.hidden * self.compute

    @property
    def token_cache(self) -> int:
        """Keys and values of one token in every block."""
        return 2 * self.shapes.layers * self.shapes.kv * self.compute

    @property
    def settled(self) -> bool:
        return self.work.recipe.settles

    def prefixes(self, sides: int) -> int:
        """Kept caches of `sides` policies, for calibration and held-out prompts, each within its budget."""
        each = (count * self.work.length * self.token_cache * sides for count in (self.work.prompts, self.work.holdout))
        return sum(min(self.kept.prefixes, size) for size in each)

    def quantized(self) -> Terms:
        """Q as it is deployed: codes and steps, and its weights as floats where they are kept between forwards. Or nothing of it
        but what one linear is made of."""
        shapes = self.shapes
        if self.kept.weights == "nothing":
            return {"weights made anew": self.making()}
        # Without zero points theta's settled codes are the deployed ones.
        theirs = self.settled and self.scheme.symmetric
        terms = {"int8 codes": (0 if theirs else shapes.linears) + shapes.steps * self.storage}
        if self.kept.weights == "integers":
            return terms
        floats = shapes.linears if self.kept.weights == "floats" else 2 * shapes.largest
        return terms | {"dequantized weights": floats * self.compute}

    def activations(self, tokens: int, keys: int, quantized: bool = True) -> int:
        """The widest moment of a block without gradients, for `tokens` that see `keys` each."""
        shapes, c = self.shapes, self.compute
        mlp = (4 if quantized and self.scheme.quantizes_activations else 3) * shapes.ffn + 2 * shapes.hidden
        attention = 4 * shapes.query + 2 * shapes.kv + 3 * shapes.hidden
        masks = keys * (1 + c)
        return tokens * (c * max(mlp, attention) + 2 * WIDE * shapes.hidden + masks)

    def logits(self, states: int, models: int, copies: int) -> int:
        """Chunks of [states, V] in float32; a chunk of `models` models takes at most LOGIT_BYTES."""
        rows = min(states, max(1, LOGIT_BYTES // (WIDE * models * self.shapes.vocabulary)))
        return rows * self.shapes.vocabulary * WIDE * copies

    def load(self) -> Terms:
        return {"weights": self.weights}

    def encode(self) -> Terms:
        shapes, work = self.shapes, self.work
        patches = work.media_tokens * shapes.patches
        width = 16 * int((max(shapes.vision, shapes.audio) / (12 * 32)) ** 0.5)  # of a tower of 32 layers of 12 w^2
        return self.load() | {"prompts": self.prompts, "tower activations": patches * width * self.compute}

    def initialize(self) -> Terms:
        shapes, work, c = self.shapes, self.work, self.compute
        if work.recipe.init == "rtn" or not work.prompts:
            return self.resident() | {"folding": self.folding()}
        answered = work.answered
        rows = max(1, min(work.prompts, work.batch_tokens // answered))
        rollouts = {
            "prefix caches": work.prompts * answered * self.token_cache,
            "activations": self.activations(rows * work.prompt_tokens, work.prompt_tokens, quantized=False),
        }
        widths = 2 * shapes.hidden + shapes.query + shapes.ffn
        sampled = {
            "answered prompts": work.prompts * answered * shapes.hidden * c,
            # Twice: prompt by prompt, and joined.
            "sampled inputs": 2 * min(SAMPLE_TOKENS, work.prompts * answered) * widths * shapes.layers * c,
        }
        if work.start_rounds:
            return self.resident() | max(rollouts, sampled, self.rounding(), key=_total)
        return self.resident() | self.start() | max(rollouts, sampled, key=_total)

    def rounding(self) -> Terms:
        """The last block of a start that learns how weights round: it has its offsets beside the best, and their gradients."""
        shapes, work, c = self.shapes, self.work, self.compute
        every, tokens = work.prompts * work.answered, work.start_rows * work.answered
        # Zero points are added to offsets, which makes another of these.
        smoothed = 0 if self.kernels else shapes.block * (WIDE if self.scheme.symmetric else 2 * WIDE)
        return self.start() | {
            "answered prompts": every * shapes.hidden * c,
            # D's and Q's, each with its mask.
            "two streams": 2 * every * (shapes.hidden * c + work.answered),
            "offsets of a block": 2 * shapes.block * WIDE,
            "weights in the graph": smoothed + shapes.block * c + self.making(),
            "activations in the graph": self.graph_activations(tokens, work.answered),
            "residual streams and errors": tokens * shapes.hidden * (c + 3 * WIDE),
        }

    def folding(self) -> int:
        return self.shapes.largest * (FOLD_COPIES * WIDE + self.compute)

    def making(self) -> int:
        """What lives beside a weight while theta makes it, or its gradient: of kernels the gradient alone."""
        return self.shapes.largest * self.compute if self.kernels else self.folding()

    def follow(self) -> Terms:
        work, shapes = self.work, self.shapes
        following = {
            **self.resident(),
            **self.quantized(),
            **self.per_weight(),
            "prefix caches": self.prefixes(2 if work.banks > 1 else 1),
            "activations": self.activations(work.rows * work.prompt_tokens, work.prompt_tokens),
            "logits": work.rows * shapes.vocabulary * WIDE,
        }
        if not self.settled or self.start():
            return following
        codes = {"int8 codes": self.quantized()["int8 codes"]}
        settling = self.resident() | codes | self.per_weight()  # before the first round
        return max(following, settling, key=_total)

    def compare(self) -> Terms:
        work = self.work
        states = work.rows * work.response_tokens
        prefill = self.activations(work.rows * work.prompt_tokens, work.prompt_tokens, quantized=False)
        deciding = self.logits(states, 2, DECIDE_COPIES)
        return {
            **self.resident(),
            **self.quantized(),
            **self.per_weight(),
            "prefix caches": self.prefixes(2),
            **({"activations": prefill} if prefill > deciding else {"logits": deciding}),
        }

    def branch(self) -> Terms:
        work, shapes, horizon = self.work, self.shapes, self.work.recipe.branch.horizon
        codes = work.recipe.calibrate.codes
        forks = -(-work.candidates // max(1, work.prompts))
        share = max(1, min(TREE_TOKENS // work.rows, ROW_TOKENS) // (2 * horizon))
        tokens = 2 * min(forks, share) * horizon  # in one row
        keys = work.length + tokens
        joined = (
            2 * work.rows * keys * (shapes.kv + shapes.query) * self.compute
        )  # prefix and tree, once per query head
        return {
            **self.resident(),
            **self.quantized(),
            # In the first round Q is still the start; held-out prompts are followed and compared at the end too.
            **(self.per_weight() if work.recipe.rounds > 1 or codes != "learned" else self.start()),
            "prefix caches": self.prefixes(2),
            "tree caches": work.rows * tokens * self.token_cache + joined,
            "activations": self.activations(work.rows * tokens, keys, quantized=False),
            "logits": self.logits(work.rows * tokens // 2, 2, DECIDE_COPIES),
        }

    def calibrate(self) -> Terms:
        work, shapes, calibrate = self.work, self.shapes, self.work.recipe.calibrate
        length = work.length if work.decisions or work.holdout else work.prompt_tokens
        tokens = work.micro_batch * length
        target = work.every * length * shapes.layers * shapes.hidden * self.compute
        alive = 1 if calibrate.checkpointing else shapes.layers
        states = -(-work.decisions * work.micro_batch // max(1, work.prompts))
        terms = {
            **self.resident(),
            "answered prompts": work.every * length * shapes.hidden * self.compute,
            "prefix caches": self.prefixes(1),
            "dense targets": min(self.kept.targets, target),
            "theta and optimizer": (shapes.smoothing + shapes.steps) * WIDE * THETA_COPIES,
            "residual streams and errors": shapes.layers * tokens * shapes.hidden * (self.compute + WIDE),
            "weights in the graph": alive * self.live_weights() + self.making(),
            "activations in the graph": alive * self.graph_activations(tokens, length),
            "logits": self.logits(states, 4, LOSS_COPIES),
        }
        given = work.recipe.rounds > 1 or bool(self.start())
        return terms | self.per_weight(OFFSET_COPIES + given, UNLEARNED_COPIES)

    def per_weight(self, learned: int = 1, unlearned: int = 1) -> Terms:
        """Of theta what has an entry for every weight, so many times; settled codes are shared."""
        linears = self.shapes.linears
        if self.settled:
            return {"settled codes": linears * (1 if self.scheme.symmetric else 2)}
        if self.work.recipe.calibrate.codes == "learned":
            return {"rounding offsets": linears * WIDE * learned}
        return {"rounding offsets": linears * WIDE * unlearned} if self.start() else {}

    def start(self) -> Terms:
        """Of theta^(0) what has an entry for every weight, where its method chooses codes."""
        if not self.work.prompts or self.work.recipe.init not in ROUNDING:
            return {}
        return self.per_weight() if self.settled else {"offsets of the start": self.shapes.linears * WIDE}

    def live_weights(self) -> int:
        """What backward keeps of a block's weights: smoothed and its magnitude in float32, as a float32 copy where they
        are not one already, and rounded in the compute dtype; of kernels what is rounded alone. Of settled codes, their product
        with steps, and the codes where these are of groups."""
        if self.settled:
            return self.shapes.block * self.compute * (2 if self.scheme.group_size else 1)
        if self.kernels:
            return self.shapes.block * self.compute
        return self.shapes.block * ((2 if self.compute == WIDE else 3) * WIDE + self.compute)

    def graph_activations(self, tokens: int, keys: int) -> int:
        """What backward keeps of one block's inputs: each linear's, its magnitudes and its rounded form."""
        shapes = self.shapes
        each = 2 if self.scheme.quantizes_activations else 1
        linears = each * (5 * shapes.hidden + shapes.query + shapes.ffn)
        between = 8 * shapes.hidden + 6 * shapes.query + 4 * shapes.ffn
        return tokens * (self.compute * (linears + between) + WIDE * 4 * shapes.hidden + keys * (1 + self.compute))

    def export(self) -> Terms:
        rounds = self.work.recipe.rounds
        held = {"prefix caches": self.prefixes(2 if rounds else 0)}
        return {
            **self.resident(),
            **({"weight being folded": self.folding()} if self.kept.weights == "nothing" else self.quantized()),
            **(self.per_weight() if rounds else self.start()),
            **held,
        }

    def verify(self) -> Terms:
        """The logits of a short and of a calibration prompt; then the run's model is let go and the checkpoint loaded."""
        packed = self.shapes.linears * self.scheme.weight_bits // 8
        logits = {"logits": 2 * self.work.prompt_tokens * self.shapes.vocabulary * WIDE}
        return max(self.export() | logits, {"weights": self.weights, "packed weights": packed} | logits, key=_total)

    def resident(self) -> Terms:
        return {"weights": self.weights, "prompts": self.prompts}


def _total(terms: Terms) -> int:
    return sum(terms.values())
