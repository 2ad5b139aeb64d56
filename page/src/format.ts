/** Numbers as people read them. */

import type { Figure } from "./contract";

/** How many decimals a number of this size deserves; a rate in percent needs fewer. */
export function decimals(value: number, unit = ""): number {
  const size = Math.abs(value);
  if (unit === "%") return size >= 1 || size === 0 ? 1 : 2;
  if (size >= 100 || value === 0) return 0;
  if (size >= 10) return 1;
  if (size >= 1) return 2;
  if (size >= 0.1) return 3;
  return 4;
}

/** The number with three digits or so; a dash where there is none. */
export function number(value: number | null | undefined, digits?: number): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  if (digits === undefined && value !== 0 && Math.abs(value) < 0.0001) return value.toExponential(1);
  return value.toFixed(digits ?? decimals(value)).replace("-", "\u2212");
}

/** A figure in its unit. */
export function measured(value: number | null, unit: string): string {
  return number(value, value === null ? 0 : decimals(value, unit));
}

/** The interval of a figure, in brackets, with the decimals of its value; empty where it has none. */
export function interval(figure: Figure, unit: string): string {
  if (figure.low === null || figure.high === null) return "";
  const digits = decimals(figure.value ?? figure.high, unit);
  return `[${number(figure.low, digits)}, ${number(figure.high, digits)}]`;
}

/** A probability in percent. */
export function percent(share: number): string {
  if (share > 0 && share < 0.0005) return "<0.1";
  return (100 * share).toFixed(1);
}

export function bytes(size: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let rest = size;
  while (rest >= 1000 && at < units.length - 1) {
    rest /= 1000;
    at++;
  }
  return `${rest >= 100 || at === 0 ? rest.toFixed(0) : rest.toFixed(1)} ${units[at]}`;
}
