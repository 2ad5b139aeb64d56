"""The run's configuration: typed, frozen, unknown fields refused, with presets light, default, best, risk, paper and zoo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from onptq.errors import OnPTQError, did_you_mean
from onptq.overrides import Overrides, explain, override, with_implied
from onptq.plain_yaml import parse_yaml, read_yaml, to_yaml
from onptq.registry import LOSS_TERMS, METHODS, SELECTION_RULES, Registry
from onptq.schemes import NAMED, Scheme

# Figures of an update's log lines, whose names no added loss term may have.
LOGGED = ("anchor", "hidden", "pair", "response", "loss", "step", "round", "gradient", "holdout", "rollback")
PRESETS = ("light", "default", "best", "risk", "paper", "zoo")

# The methods that calibrate in rounds, and what each name says about other fields. Base methods are the others.
CYCLES: Mapping[str, Mapping[str, Any]] = {
    "onptq": {},
    "static": {"calibrate.gamma": 0.0},  # the control: the same steps on the anchor alone
    "uniform": {"select.rule": "all"},  # every on-policy state, all with the same weight
    "offpolicy": {"follow.policy": "dense"},  # the same objective on the dense model's own rollouts
}


def implied(method: str) -> Mapping[str, Any]:
    """The fields that a method's name decides; a recipe that says otherwise contradicts itself."""
    if method in METHODS:
        return {"rounds": 0, "init": method}
    return CYCLES.get(method, {})


def method_names() -> list[str]:
    """Every method that can be quantized with and compared."""
    return [*CYCLES, *METHODS]


_inside_recipe: ContextVar[bool] = ContextVar("inside_recipe", default=False)


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a valid number")
    return value


# YAML 1.1 reads 1e-3 as text, so numbers may also come as text; true and false are never numbers.
Real = Annotated[float, BeforeValidator(_refuse_bool)]
# And it reads off as false.
Detail = Annotated[Literal["off", "light", "full"], BeforeValidator(lambda value: "off" if value is False else value)]


class Config(BaseModel):
    """Shared rules: frozen, no unknown fields, finite numbers, and errors a user can read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Fields that came after runs were recorded, with the value that changes nothing. A recipe that does not use them reads as it
    # did before they existed, so that those runs can be continued.
    LATER: ClassVar[Mapping[str, Any]] = {}

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {name: value for name, value in data.items() if name not in self.LATER or value != self.LATER[name]}

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if _inside_recipe.get():  # the recipe itself explains, so that errors of all sections are shown together
            return handler(data)
        token = _inside_recipe.set(True)
        try:
            return handler(data)
        except ValidationError as error:
            raise OnPTQError(explain(error, cls, Recipe)) from None
        finally:
            _inside_recipe.reset(token)


def _registered(name: str, registry: Registry[Any]) -> str:
    """The name, if it is registered."""
    try:
        registry.check(name)
    except OnPTQError as error:
        raise ValueError(str(error)) from None
    return name


class DataConfig(Config):
    """Data: the numbers of calibration and held-out prompts."""

    LATER: ClassVar[Mapping[str, Any]] = {"init_prompts": 512, "special_tokens": "refuse", "expand": False}

    prompts: StrictInt = Field(default=512, ge=1, description="calibration prompts, drawn of the manifest")
    holdout: StrictInt = Field(default=64, ge=0, description="held-out prompts that choose the best iterate")
    holdout_share: Real = Field(
        default=0.125,
        ge=0,
        le=0.5,
        description="largest share of the manifest held out when it has no spare prompts beyond `prompts`",
    )
    expand: StrictBool = Field(
        default=False,
        description="where the manifest has fewer prompts than wanted, add questions about their images",
    )
    init_prompts: StrictInt = Field(
        default=512, ge=1, description="most calibration prompts that the base method sees; rounds see all"
    )
    special_tokens: Literal["refuse", "keep"] = Field(
        default="refuse", description="prompts whose text contains special tokens; keep makes control tokens of them"
    )


class FollowConfig(Config):
    """Follow: the quantized model's own rollouts."""

    LATER: ClassVar[Mapping[str, Any]] = {
        "policy": "quantized",
        "sampling": "greedy",
        "responses": 1,
        "engine": "own",
    }

    max_tokens: StrictInt = Field(default=128, ge=1, description="T: most response tokens per prompt")
    policy: Literal["quantized", "dense"] = Field(
        default="quantized", description="whose rollouts are the states; dense is the control offpolicy"
    )
    sampling: Literal["greedy", "model"] = Field(
        default="greedy",
        description="how tokens are chosen; model samples as its generation config says",
    )
    responses: StrictInt = Field(default=1, ge=1, description="responses to each prompt; more than one wants sampling")
    engine: Literal["own", "vllm"] = Field(
        default="own", description="who writes the rollouts: this package, or vLLM with the kernels that will serve"
    )

    @model_validator(mode="after")
    def _check_responses(self) -> Self:
        if self.responses > 1 and self.sampling == "greedy":
            raise ValueError(
                "greedy responses to one prompt are all the same; more than one wants follow.sampling=model"
            )
        if self.engine == "vllm" and self.policy == "dense":
            raise ValueError(
                "vllm writes rollouts of the quantized model; those of the dense one want follow.engine=own"
            )
        return self


class BranchConfig(Config):
    """Branch: both tokens of an eroded decision are forced and continued."""

    horizon: StrictInt = Field(default=4, ge=1, description="H: states compared along the two forced branches")
    eos_as_max: StrictBool = Field(
        default=False, description="ablation: a forced end-of-sequence counts as the largest consequence, not as none"
    )
    count_forced: StrictBool = Field(
        default=False, description="the forced tokens count as one more state, at which the futures differ wholly"
    )

    policy: Literal["quantized", "dense"] = Field(
        default="quantized",
        description="which model continues the forced tokens; dense measures the dense future alone",
    )

    LATER: ClassVar[Mapping[str, Any]] = {"count_forced": False, "policy": "quantized"}


class RiskConfig(Config):
    """Risk: erosion_weight * e_t * (1 + lambda_b * A_t) + eta * j_t."""

    divergence: Literal["js", "kl"] = Field(default="js", description="divergence of both j_t and A_t")
    erosion_weight: Real = Field(default=1.0, ge=0, description="weight of the erosion term e_t; 0 removes it")
    branch_weight: Real = Field(default=1.0, ge=0, description="lambda_b: weight of the branch consequence A_t")
    divergence_weight: Real = Field(default=1.0, ge=0, description="eta: weight of the divergence j_t")
    near_miss_tol: Real = Field(default=0.0, ge=0, description="erosion up to this is no near miss (logits)")


class SelectConfig(Config):
    """Select: the critical set and its weights."""

    rule: str = Field(default="risk", description="which states become critical: by risk, or one of the ablations")
    budget: StrictInt = Field(default=8192, ge=1, description="K_c: size of the critical set")
    per_prompt: StrictInt | None = Field(
        default=None, ge=1, description="k states of every prompt instead of a global top K_c"
    )
    weights: Literal["risk", "uniform"] = Field(default="risk", description="w: proportional to risk, or all equal")

    @field_validator("rule")
    @classmethod
    def _check_rule(cls, name: str) -> str:
        return _registered(name, SELECTION_RULES)


class CalibrateConfig(Config):
    """Calibrate: anchor loss + gamma * loss of the critical states, over the foldable parameters theta."""

    gamma: Real = Field(default=1.0, ge=0, description="gamma: weight of the critical states beside the anchor")
    anchor: Real = Field(default=1.0, ge=0, description="weight of the anchor on the prompt; 0 removes it")
    hidden: Real = Field(default=0.0, ge=0, description="weight of the hidden-state error; 0 removes it")
    pair: Real = Field(default=0.0, ge=0, description="weight of the pair-margin Huber loss; 0 removes it")
    pair_matched: StrictBool = Field(
        default=False,
        description="scale that weight so that the loss begins as strong as with equal weights for all states",
    )
    response: Real = Field(default=10.0, ge=0, description="weight of the response KL; 0 removes it")
    terms: dict[str, Real] = Field(
        default_factory=dict, description="weights of registered loss terms on critical states, by name"
    )
    response_over: Literal["critical", "visited"] = Field(
        default="visited", description="states of the response KL: the critical ones by weight, or all visited"
    )
    consequence: Real = Field(
        default=0.0,
        ge=0,
        description="response KL over visited states: weight 1 + consequence * A_t; 0 is a plain mean",
    )
    normalize: Literal["energy", "none"] = Field(
        default="energy", description="divide each block's error by its dense energy; none is the paper's literal loss"
    )
    modality_balanced: StrictBool = Field(
        default=False, description="anchor: every modality counts alike, however many tokens it has"
    )
    epochs: StrictInt = Field(default=4, ge=1, description="passes over the calibration prompts per round")
    batch: StrictInt = Field(default=8, ge=1, description="prompts per optimizer step")
    micro_batch: StrictInt = Field(default=8, ge=1, description="prompts per forward, at most `batch`")
    lr_smoothing: Real = Field(default=1e-3, ge=0, description="learning rate of the log-smoothing vectors")
    lr_step: Real = Field(default=1e-3, ge=0, description="learning rate of the per-row step ratios")
    lr_rounding: Real = Field(default=1e-2, ge=0, description="learning rate of the rounding offsets, in steps")
    codes: Literal["free", "settled", "learned"] = Field(
        default="settled",
        description="free: codes follow the scaled weights; settled: the init's stay; learned: by rounding offsets",
    )
    keep: Literal["best", "last"] = Field(default="best", description="iterate to keep; best is by held-out prompts")
    evaluations: StrictInt = Field(default=4, ge=1, description="held-out evaluations per round")
    rollback: Real | None = Field(
        default=None,
        ge=0,
        description="a held-out score worse than the best by more than this share goes back to the best; null never does",
    )
    checkpointing: StrictBool = Field(default=True, description="recompute activations in backward to save memory")

    LATER: ClassVar[Mapping[str, Any]] = {"pair_matched": False, "terms": {}, "consequence": 0.0, "rollback": None}

    @model_validator(mode="after")
    def _check_rollback(self) -> Self:
        if self.rollback is not None and self.keep == "last":
            raise OnPTQError("calibrate.rollback goes by held-out prompts, which calibrate.keep=last does not look at")
        return self

    @field_validator("terms")
    @classmethod
    def _check_terms(cls, terms: dict[str, float]) -> dict[str, float]:
        for name, weight in terms.items():
            if name in LOGGED:
                raise ValueError(f"{name} is the name of another figure of the log; a loss term needs one of its own")
            _registered(name, LOSS_TERMS)
            if weight < 0:
                raise ValueError(f"the weight of {name} should be 0 or more, got {weight}")
        return terms


class ComputeConfig(Config):
    """Compute: device, dtype and memory."""

    LATER: ClassVar[Mapping[str, Any]] = {"shard": "auto"}

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="compute type; auto is float32 on a CPU and bfloat16 on a GPU"
    )
    batch_tokens: StrictInt = Field(default=16384, ge=1, description="padded tokens per forward")
    cache_gib: Real | None = Field(
        default=None, ge=0, description="memory for cached prefixes in GiB; null is a share of what is free"
    )
    integers: StrictBool = Field(
        default=True,
        description="on a GPU Q's rollouts multiply int8 codes where it rounds activations; false simulates",
    )
    shard: Literal["auto", "never", "always", "offload"] = Field(
        default="auto",
        description="split the decoder over the processes (FSDP2), or over their hosts; auto where it does not fit whole",
    )


class ReportConfig(Config):
    """Report: the details of single states that are written."""

    LATER: ClassVar[Mapping[str, Any]] = {"detail": "light"}

    detail: Detail = Field(
        default="light",
        description="states with the likeliest tokens of both models: mismatches and near misses, all (full), or none (off)",
    )


class Recipe(Config):
    """Everything that decides a run's result, besides the model and the prompts."""

    LATER: ClassVar[Mapping[str, Any]] = {"report": {}}

    scheme: str = Field(
        default="W4A8", description=f"number format: W4A16, W8A8, W4A8, W4A6, any WbAb, -gN, -asym, {', '.join(NAMED)}"
    )
    method: str = Field(
        default="onptq",
        description="onptq; static, uniform or offpolicy, its controls; or a base method alone",
    )
    init: str = Field(default="search+signround", description="theta^(0): the base method that calibration starts from")
    init_steps: StrictInt | None = Field(
        default=None, ge=1, description="steps per block, where the base method takes steps; null is as many as it says"
    )
    rounds: StrictInt = Field(default=1, ge=0, description="R: rounds of Follow, Compare, Branch, Calibrate")
    refresh: StrictBool = Field(default=True, description="take new rollouts each round, not those of the first")
    seed: StrictInt = Field(default=0, ge=0, lt=2**43, description="orders prompts and draws the random selection")
    data: DataConfig = DataConfig()
    follow: FollowConfig = FollowConfig()
    branch: BranchConfig = BranchConfig()
    risk: RiskConfig = RiskConfig()
    select: SelectConfig = SelectConfig()
    calibrate: CalibrateConfig = CalibrateConfig()
    compute: ComputeConfig = ComputeConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _check_largest_consequence(self) -> Self:
        counted = [name for name in ("eos_as_max", "count_forced") if getattr(self.branch, name)]
        if counted and self.risk.divergence != "js":
            raise OnPTQError(
                f"branch.{counted[0]} needs the largest divergence there is, and {self.risk.divergence} has none; expected "
                "risk.divergence=js"
            )
        return self

    @property
    def settles(self) -> bool:
        """Whether rounds work on codes that no longer follow the weights."""
        return bool(self.rounds) and self.calibrate.codes == "settled"

    @property
    def branches(self) -> bool:
        """Whether anything depends on the consequence of a decision."""
        by_consequence = bool(self.calibrate.gamma and self.calibrate.consequence)
        return by_consequence or (self.selects and self.select.rule != "all")

    @property
    def selects(self) -> bool:
        """Whether an update learns from critical states by their weights; otherwise from every visited state alike."""
        calibrate = self.calibrate
        weighted = calibrate.hidden or calibrate.pair or calibrate.terms or calibrate.response_over == "critical"
        return bool(calibrate.gamma and weighted)

    @property
    def multiplies_integers(self) -> bool:
        """Whether a frozen Q may multiply its codes as integers."""
        return self.compute.integers and Scheme.parse(self.scheme).multiplies_integers

    @model_validator(mode="before")
    @classmethod
    def _apply_method(cls, data: Any) -> Any:
        return with_implied(data, implied) if isinstance(data, Mapping) else data

    @property
    def needs_prompts(self) -> bool:
        """Whether anything is made from prompts: plain rounding is not."""
        return bool(self.rounds) or self.init != "rtn"

    @field_validator("method")
    @classmethod
    def _check_method(cls, name: str) -> str:
        if name not in method_names():
            hint = did_you_mean(name, method_names())
            raise ValueError(f"unknown method{hint}; expected one of {', '.join(method_names())}")
        return name

    @field_validator("init")
    @classmethod
    def _check_init(cls, name: str) -> str:
        return _registered(name, METHODS)

    @field_validator("scheme")
    @classmethod
    def _normalise_scheme(cls, text: str) -> str:
        try:
            return str(Scheme.parse(text))
        except OnPTQError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def preset(cls, name: str = "default", overrides: Overrides = ()) -> Recipe:
        """A named preset, changed by `overrides`: a mapping (nested or dotted), or texts such as "branch.horizon=8"."""
        if name not in PRESETS:
            raise OnPTQError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; valid: {', '.join(PRESETS)}")
        text = resources.files("onptq").joinpath("presets", f"{name}.yaml").read_text(encoding="utf-8")
        return cls.model_validate(override(parse_yaml(text), overrides, implied))

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Overrides = ()) -> Recipe:
        """A recipe file, or the `recipe.yaml` of a run, changed by `overrides` as in `preset`.

        A file that names a `preset` has the preset's fields, but for its own.
        """
        data = read_yaml(Path(path), "the recipe")
        if not isinstance(data, Mapping):
            raise OnPTQError(f"the recipe {path} must be a YAML mapping of fields, got {type(data).__name__}")
        if isinstance(data.get("recipe"), Mapping):  # a run's record: the recipe beside versions and hashes
            data = data["recipe"]
        if "preset" in data:
            own = {name: value for name, value in data.items() if name != "preset"}
            return cls.preset(data["preset"], override(own, overrides, implied))
        return cls.model_validate(override(data, overrides, implied))

    def with_overrides(self, overrides: Overrides) -> Recipe:
        """A changed copy, validated like any other recipe."""
        return type(self).model_validate(override(self.model_dump(), overrides, implied))

    def to_yaml(self, *, comments: bool = False) -> str:
        """Every field with its value, and with `comments` what it means."""
        if comments:
            return "\n".join(_commented(self)) + "\n"
        return to_yaml(self.model_dump())


def _commented(config: Config, indent: str = "") -> Iterator[str]:
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            yield f"{indent}{name}:  # {type(value).__doc__}"
            yield from _commented(value, indent + "  ")
        else:
            inline = isinstance(value, Mapping)  # so that the comment is on the value's line
            shown = to_yaml(value, default_flow_style=True, width=10**6) if inline else None
            line = indent + (f"{name}: {shown}" if shown else to_yaml({name: value})).strip()
            yield f"{line:<28} # {field.description}"
