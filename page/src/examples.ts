/** Prompts and graded items of one candidate as one list, with what they are filtered and sorted by. */

import type { Answer, Candidate, Change, Flips, Page, Question, Response } from "./contract";
import { visible } from "./text";

export type CellName = keyof Flips;
export const CELLS: CellName[] = ["right_right", "right_wrong", "wrong_right", "wrong_wrong"];
export const CELL_WORDS: Record<CellName, string> = {
  right_right: "right in both",
  right_wrong: "turned wrong",
  wrong_right: "turned right",
  wrong_wrong: "wrong in both",
};
export const CHANGES: Change[] = ["same", "reworded", "clear", "content"];
export const CHANGE_WORDS: Record<Change, string> = {
  same: "same",
  reworded: "reworded",
  clear: "clear change",
  content: "says something else",
};
export const KIND_WORDS = ["agree", "near miss", "mismatch"] as const;

export interface Example {
  key: string;
  prompt: number | null; // its number among the prompts
  item: number | null; // its number among the items
  question: Question;
  dense: Answer;
  answer: Answer | null;
  response: Response | null;
  change: Change | null;
  cell: CellName | null;
  risk: number | null; // the highest of its states
  fork: number | null;
  kinds: [number, number, number]; // how many states agree, are near misses, are mismatches
  worst: number;
  line: string;
  haystack: string;
}

export interface Filters {
  query: string;
  set: "all" | "prompts" | "items";
  task: string;
  holds: string;
  change: "" | Change;
  cell: "" | CellName;
  states: "" | "mismatch" | "near miss" | "critical";
  risk: string; // the least, as a number
}

export const NO_FILTERS: Filters = {
  query: "",
  set: "all",
  task: "",
  holds: "",
  change: "",
  cell: "",
  states: "",
  risk: "",
};

export const SORTS = {
  worst: "worst first",
  risk: "highest risk",
  kind: "most mismatches",
  fork: "earliest fork",
  task: "by task",
  id: "as given",
} as const;
export type Sort = keyof typeof SORTS;

/** Every prompt that was answered, then every item; a prompt and an item of one id are one example. */
export function examplesOf(page: Page, candidate: Candidate): Example[] {
  const cells = cellsOf(candidate);
  const items = new Map(page.items.map((question, at) => [question.id, at]));
  const joined = new Set<number>();
  const prompts = page.prompts.map((question, at) => {
    const item = items.get(question.id) ?? null;
    if (item !== null) joined.add(item);
    return example(page, candidate, at, item, cells);
  });
  const rest = [...page.items.keys()].filter((at) => !joined.has(at));
  const all = [...prompts, ...rest.map((at) => example(page, candidate, null, at, cells))];
  return distinct(all.filter((one) => one.answer !== null || (!candidate.aside && isKept(one.dense))));
}

/** Whether anybody kept the answer, be it an empty one. */
export function isKept(answer: Answer): boolean {
  return answer.text !== "" || answer.tokens !== null || answer.score !== null;
}

/** The examples with keys that lead to one example each, should an id occur twice. */
function distinct(examples: Example[]): Example[] {
  const seen = new Set<string>();
  for (const one of examples) {
    if (seen.has(one.key)) one.key += `~${one.prompt ?? one.item}`;
    seen.add(one.key);
  }
  return examples;
}

function cellsOf(candidate: Candidate): Map<number, CellName> {
  const cells = new Map<number, CellName>();
  for (const name of CELLS) for (const item of candidate.flips?.[name].items ?? []) cells.set(item, name);
  return cells;
}

function example(
  page: Page,
  candidate: Candidate,
  prompt: number | null,
  item: number | null,
  cells: Map<number, CellName>,
): Example {
  const asked = prompt === null ? null : (page.prompts[prompt] ?? null);
  const graded = item === null ? null : (page.items[item] ?? null);
  const question = (asked ?? graded) as Question;
  const response = prompt === null ? null : (candidate.responses[prompt] ?? null);
  const mark = item === null ? null : (candidate.answers[item] ?? null);
  const dense = withGrade(question.dense, graded?.dense ?? null);
  const answer = response ? withGrade(response.answer, mark) : mark;
  const cell = (item === null ? null : cells.get(item)) ?? cellOf(dense, answer);
  const change = worse(response?.change ?? null, mark && graded ? changeOf(graded.dense, mark) : null);
  const kinds: [number, number, number] = [0, 0, 0];
  for (const kind of response?.states?.kind ?? []) kinds[kind]++;
  const names = question.turns.flatMap((turn) => turn.parts.map((part) => mediaName(page, part.media)));
  const words = question.turns.flatMap((turn) => turn.parts.map((part) => part.text));
  const haystack = [question.id, question.task, ...words, ...names, dense.text, answer?.text, question.reference];
  return {
    key: `${prompt === null ? "item" : "prompt"}:${question.id}`,
    prompt,
    item,
    question: { ...question, reference: question.reference ?? graded?.reference ?? null },
    dense,
    answer,
    response,
    change,
    cell,
    risk: response?.states ? Math.max(0, ...response.states.risk) : null,
    fork: response?.fork ?? null,
    kinds,
    worst: worstOf(change, cell),
    line: lineOf(question),
    haystack: haystack.join("\n").toLowerCase(),
  };
}

/** An answer to a prompt with the grade that the item of the same id got. */
function withGrade(answer: Answer, graded: Answer | null): Answer {
  if (graded === null) return answer;
  return { ...answer, right: answer.right ?? graded.right, score: answer.score ?? graded.score };
}

function mediaName(page: Page, media: number | null): string {
  return media === null ? "" : (page.media[media]?.name ?? "");
}

function cellOf(dense: Answer, answer: Answer | null): CellName | null {
  if (dense.right === null || answer === null || answer.right === null) return null;
  return `${dense.right ? "right" : "wrong"}_${answer.right ? "right" : "wrong"}`;
}

function changeOf(dense: Answer, answer: Answer): Change {
  if (dense.right !== answer.right || dense.score !== answer.score) return "content";
  return dense.text === answer.text ? "same" : "reworded";
}

function worse(one: Change | null, other: Change | null): Change | null {
  if (one === null || other === null) return one ?? other;
  return CHANGES.indexOf(one) > CHANGES.indexOf(other) ? one : other;
}

/** How bad a change is: turned wrong, other content, turned right, clear, reworded, none. */
function worstOf(change: Change | null, cell: CellName | null): number {
  if (change === null) return -1;
  if (cell === "right_wrong") return 5;
  if (cell === "wrong_right") return 3;
  return { same: 0, reworded: 1, clear: 2, content: 4 }[change];
}

/** What the question says in the end, or its id where it is nothing but pictures or sound. */
function lineOf(question: Question): string {
  for (const turn of question.turns.toReversed()) {
    const text = turn.parts
      .map((part) => part.text)
      .join(" ")
      .trim();
    if (text !== "") return visible(text.length > 240 ? `${text.slice(0, 240)}…` : text).replace(/\s+/g, " ");
  }
  return question.id;
}

export function select(examples: Example[], filters: Filters, sort: Sort): Example[] {
  const words = filters.query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = examples.filter(
    (one) =>
      (filters.set === "all" || (filters.set === "items" ? one.item : one.prompt) !== null) &&
      (filters.task === "" || one.question.task === filters.task) &&
      (filters.holds === "" || one.question.kinds.includes(filters.holds)) &&
      (filters.change === "" || one.change === filters.change) &&
      (filters.cell === "" || one.cell === filters.cell) &&
      (filters.states === "" || holds(one, filters.states)) &&
      (filters.risk === "" || (one.risk ?? -1) >= Number(filters.risk)) &&
      words.every((word) => one.haystack.includes(word)),
  );
  const order = ORDERS[sort];
  return order === null ? found : found.sort(order);
}

function holds(one: Example, states: Filters["states"]): boolean {
  if (states === "mismatch") return one.kinds[2] > 0;
  if (states === "near miss") return one.kinds[1] > 0;
  return one.response?.states?.critical.includes(true) ?? false;
}

const byRisk = (a: Example, b: Example) => (b.risk ?? -1) - (a.risk ?? -1);
const byWorst = (a: Example, b: Example) => b.worst - a.worst || byRisk(a, b);
const ORDERS: Record<Sort, ((a: Example, b: Example) => number) | null> = {
  worst: byWorst,
  risk: byRisk,
  kind: (a, b) => b.kinds[2] - a.kinds[2] || b.kinds[1] - a.kinds[1] || byRisk(a, b),
  fork: (a, b) => (a.fork ?? Infinity) - (b.fork ?? Infinity) || byRisk(a, b),
  task: (a, b) => a.question.task.localeCompare(b.question.task) || byWorst(a, b),
  id: null,
};

/** The set to show first: prompts, where their tokens can be looked at. */
export function firstSet(page: Page): Filters["set"] {
  const deep = page.candidates.some((one) => one.responses.some((response) => response?.states));
  return deep && page.items.length > 0 ? "prompts" : "all";
}

/** The tokens of the quantized answer: as it has them, or as its states decide. */
export function tokensOf(one: Example): number[] | null {
  return one.response?.answer.tokens ?? one.response?.states?.quantized ?? null;
}

/** The token to look at first: where the answers part, or else the riskiest. */
export function startOf(one: Example): number {
  const states = one.response?.states;
  if (!states) return 0;
  if (one.fork !== null && one.fork < states.kind.length) return one.fork;
  let best = 0;
  for (let i = 1; i < states.risk.length; i++) if ((states.risk[i] ?? 0) > (states.risk[best] ?? 0)) best = i;
  return best;
}
