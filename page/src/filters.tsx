/** Search, filters and order of the list. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import {
  CELL_WORDS,
  CELLS,
  CHANGE_WORDS,
  CHANGES,
  type Example,
  type Filters,
  NO_FILTERS,
  SORTS,
  type Sort,
} from "./examples";
import { number } from "./format";
import { listenToKeys } from "./keys";
import { visible } from "./text";

interface Given {
  examples: Example[];
  shown: number;
  filters: Filters;
  sort: Sort;
  onFilter: (part: Partial<Filters>) => void;
  onSort: (sort: Sort) => void;
}

type Choice = [value: string, words: string];

export function FilterBar({ examples, shown, filters, sort, onFilter, onSort }: Given) {
  const search = useRef<HTMLInputElement>(null);
  useEffect(() => listenToKeys({ "/": () => search.current?.focus() }), []);
  const choices = useMemo(() => choicesOf(examples), [examples]);
  const sets = useMemo(() => setsOf(examples), [examples]);
  const filtered = Object.entries(filters).some(([field, value]) => value !== (field === "set" ? "all" : ""));
  return (
    <div class="filters">
      <input
        ref={search}
        type="search"
        placeholder="Search questions and answers"
        aria-label="Search questions and answers"
        value={filters.query}
        onInput={(event) => onFilter({ query: event.currentTarget.value })}
        onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()}
      />
      {sets.length > 1 && (
        <div class="sets">
          {sets.map(({ set, words, count }) => (
            <button type="button" key={set} aria-pressed={filters.set === set} onClick={() => onFilter({ set })}>
              {words} <small>{count}</small>
            </button>
          ))}
        </div>
      )}
      <div class="choices">
        {choices.map(({ field, name, of }) => (
          <Choose
            key={field}
            name={name}
            all={name}
            of={of}
            value={filters[field]}
            onChoice={(value) => onFilter({ [field]: value })}
          />
        ))}
        <Choose name="Order" of={Object.entries(SORTS)} value={sort} onChoice={(value) => onSort(value as Sort)} />
      </div>
      <p class="count" role="status">
        {shown === examples.length ? `${shown} examples` : `${shown} of ${examples.length} examples`}
        {filtered && (
          <button type="button" class="link" onClick={() => onFilter(NO_FILTERS)}>
            show all
          </button>
        )}
      </p>
    </div>
  );
}

interface Chosen {
  name: string;
  all?: string;
  of: Choice[];
  value: string;
  onChoice: (value: string) => void;
}

function Choose({ name, all, of, value, onChoice }: Chosen) {
  return (
    <select
      aria-label={name}
      class={all !== undefined && value !== "" ? "set" : ""}
      value={value}
      onChange={(event) => onChoice(event.currentTarget.value)}
    >
      {all !== undefined && <option value="">{all}: all</option>}
      {of.map(([one, words]) => (
        <option key={one} value={one}>
          {all !== undefined && one === value ? `${all}: ${words}` : words}
        </option>
      ))}
    </select>
  );
}

/** Prompts, graded items and both, where there are both. */
function setsOf(examples: Example[]): { set: Filters["set"]; words: string; count: number }[] {
  const items = examples.filter((one) => one.item !== null).length;
  const prompts = examples.filter((one) => one.prompt !== null).length;
  if (items === 0 || prompts === 0) return [];
  return [
    { set: "prompts", words: "Prompts", count: prompts },
    { set: "items", words: "Graded", count: items },
    { set: "all", words: "All", count: examples.length },
  ];
}

/** The risks that half, a quarter and a tenth of the examples with any reach. */
function risksOf(examples: Example[]): Choice[] {
  const risks = examples.flatMap((one) => (one.risk ? [one.risk] : [])).sort((a, b) => a - b);
  const bounds = [0.5, 0.75, 0.9].map((share) => risks[Math.floor(share * risks.length)] ?? 0);
  return [...new Set(bounds)].filter((one) => one > 0).map((one) => [String(one), `${number(one)} or more`]);
}

/** The filters that tell these examples apart. */
function choicesOf(examples: Example[]): { field: keyof Filters; name: string; of: Choice[] }[] {
  const has = (test: (one: Example) => boolean) => examples.some(test);
  const values = (of: (one: Example) => string[]) => [...new Set(examples.flatMap(of))].sort();
  const words = (all: string[]): Choice[] => all.map((one) => [one, visible(one)]);
  const all: { field: keyof Filters; name: string; of: Choice[] }[] = [
    { field: "task", name: "Task", of: words(values((one) => [one.question.task])) },
    { field: "holds", name: "Input", of: words(values((one) => one.question.kinds)) },
    {
      field: "change",
      name: "Change",
      of: CHANGES.filter((change) => has((one) => one.change === change)).map((one) => [one, CHANGE_WORDS[one]]),
    },
    {
      field: "cell",
      name: "Graded",
      of: CELLS.filter((cell) => has((one) => one.cell === cell)).map((one) => [one, CELL_WORDS[one]]),
    },
    {
      field: "states",
      name: "Tokens",
      of: has((one) => one.response?.states !== undefined && one.response.states !== null)
        ? [
            ["mismatch", "with a mismatch"],
            ["near miss", "with a near miss"],
            ["critical", "with a critical state"],
          ]
        : [],
    },
  ];
  all.push({ field: "risk", name: "Risk", of: risksOf(examples) });
  return all.filter(({ field, of }) => of.length > 1 || (field === "states" && of.length > 0));
}
