/** The scale of risk: five steps, the same for all answers of a candidate. */

import type { Candidate } from "./contract";

export const STEPS = 5;

/** The bounds between the steps above none: quantiles of all risks that are not zero. */
export function scaleOf(candidate: Candidate): number[] {
  const risks: number[] = [];
  for (const response of candidate.responses) {
    for (const risk of response?.states?.risk ?? []) if (risk > 0) risks.push(risk);
  }
  if (risks.length === 0) return [];
  risks.sort((a, b) => a - b);
  return [0.5, 0.75, 0.9, 0.97].map((share) => risks[Math.floor(share * (risks.length - 1))] as number);
}

/** The step of a risk: 0 for none, then from 1 to `STEPS`. */
export function stepOf(risk: number, scale: number[]): number {
  if (!(risk > 0)) return 0;
  let step = 1;
  for (const bound of scale) if (risk > bound) step++;
  return step;
}
