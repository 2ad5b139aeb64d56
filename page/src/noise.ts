/** The noise floor of a rate: the same rate between the quantized model and itself, computed in another way. */

import type { Candidate, Page } from "./contract";
import { measured } from "./format";

export const NOT_MEASURED = "not measured";

/** The noise floor as text, or that it was not measured; null where the measure is no rate. */
export function noiseOf(page: Page, candidate: Candidate, name: string): string | null {
  const measure = page.measures[name];
  if (measure?.unit !== "%" || (measure.noise === "" && measure.less_is_better === null)) return null;
  const value = candidate.figures[measure.noise]?.value ?? null;
  if (value === null) return NOT_MEASURED;
  return `${measure.noise_at_most && value > 0 ? "≤ " : ""}${measured(value, "%")}`;
}
