/** What the reader looks at, and the link that leads there again. */

import type { Page } from "./contract";
import { CELLS, CHANGES, type Filters, firstSet, NO_FILTERS, SORTS, type Sort } from "./examples";

export interface View {
  candidate: string;
  example: string | null; // null: the first of the list
  token: number | null; // null: where the answers part
  filters: Filters;
  sort: Sort;
}

const FIELDS = ["query", "task", "holds", "change", "cell", "states", "risk"] as const;
const ALLOWED: Partial<Record<(typeof FIELDS)[number], readonly string[]>> = {
  change: CHANGES,
  cell: CELLS,
  states: ["mismatch", "near miss", "critical"],
};

const SETS = ["all", "prompts", "items"] as const;

/** The view that a hash names; what it does not name or names wrongly is as on a page just opened. */
export function readHash(hash: string, page: Page): View {
  const candidates = page.candidates.map((one) => one.name);
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  const candidate = found.get("candidate") ?? "";
  const filters: Record<string, string> = { ...NO_FILTERS };
  for (const field of FIELDS) {
    const value = found.get(field) ?? "";
    if (value !== "" && (ALLOWED[field]?.includes(value) ?? true)) filters[field] = value;
  }
  if (!Number.isFinite(Number(filters.risk))) {
    filters.risk = "";
  }
  const example = found.get("example");
  const set = SETS.find((one) => one === found.get("set"));
  filters.set = set ?? (example?.startsWith("item:") ? "all" : firstSet(page));
  const sort = found.get("sort") ?? "";
  const token = Number.parseInt(found.get("token") ?? "", 10);
  return {
    candidate: candidates.includes(candidate) ? candidate : (candidates[0] ?? ""),
    example,
    token: token >= 0 ? token : null,
    filters: filters as unknown as Filters,
    sort: Object.hasOwn(SORTS, sort) ? (sort as Sort) : "worst",
  };
}

/** The hash of a view, without what goes without saying. */
export function writeHash(view: View): string {
  const said = new URLSearchParams({ candidate: view.candidate, set: view.filters.set });
  if (view.example !== null) said.set("example", view.example);
  if (view.token !== null) said.set("token", String(view.token));
  for (const field of FIELDS) if (view.filters[field] !== "") said.set(field, view.filters[field]);
  if (view.sort !== "worst") said.set("sort", view.sort);
  return `#${said}`;
}
