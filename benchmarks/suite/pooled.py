"""One test over all pairs of a model and a scheme, beside the counts of what each pair tells by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.suite.cells import difference, title
from onptq.evaluate.report import row

NOTE = (
    "OnPTQ minus the other method, pooled: the mean over the pairs, in how many it is higher and lower, and two-sided p-values "
    "of the exact sign test and of Wilcoxon's signed-rank test. Pairs share prompts, items and models, so these p-values are "
    "nominal: smaller than they would be of independent pairs."
)


@dataclass(frozen=True)
class Pooled:
    """Differences of many pairs as one; pairs without any count in the mean alone."""

    mean: float
    higher: int
    lower: int
    sign_p: float
    signed_rank_p: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Pooled:
        from scipy.stats import binomtest, wilcoxon

        higher, lower = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
        if not higher + lower:
            return cls(0.0, 0, 0, 1.0, 1.0)
        sign = binomtest(higher, higher + lower, 0.5).pvalue
        ranks = wilcoxon([one for one in differences if one]).pvalue
        return cls(fmean(differences), higher, lower, float(sign), float(ranks))


def pool(units: Sequence[tuple[Any, Any]], measure: str) -> dict[str, Pooled]:
    """By method, the differences in a measure over the pairs of a benchmark and a scheme."""
    differences: dict[str, list[float]] = {}
    for _, scheme in units:
        for ours, others in scheme["differences"].items():
            if "#" in ours:
                continue  # of a further seed
            for other, by_measure in others.items():
                value = by_measure.get(measure, {}).get("value")
                if value is not None:
                    differences.setdefault(scheme["rows"][other]["label"], []).append(value)
    return {label: Pooled.of(each) for label, each in differences.items()}


def pooled_rows(units: Sequence[tuple[Any, Any]], measure: str, labels: Mapping[str, Any]) -> Iterator[str]:
    """The table of a measure; nothing where it was not measured."""
    pooled = pool(units, measure)
    if not pooled:
        return
    header = [f"{title(measure, labels)}, onptq minus", "mean", "higher / lower", "sign test p", "signed-rank p"]
    yield from ("", row(header), "|---" * len(header) + "|")
    for label, one in pooled.items():
        mean = difference({"value": one.mean, "low": None}, labels[measure])
        yield row([label, mean, f"{one.higher} / {one.lower}", _p(one.sign_p), _p(one.signed_rank_p)])


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else f"{value:.0e}"
