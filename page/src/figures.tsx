/** Figures with their intervals, and the noise floor beside every rate. */

import type { Candidate, Figure, Page } from "./contract";
import { interval, measured } from "./format";
import { NOT_MEASURED, noiseOf } from "./noise";
import { termOf } from "./terms";
import { visible } from "./text";
import { Word } from "./tooltip";

const SHOWN_AT_ONCE = 9;
const FIRST = [
  "average",
  "flips",
  "mismatch",
  "clear",
  "kl",
  "changed",
  "reworded",
  "content_worse",
  "cwm",
  "first_fork",
];

/** The measures that say most: those to show where there is no room for all. */
export function telling(names: string[]): string[] {
  const most = names.filter((name) => FIRST.includes(name));
  return most.length > 2 ? most : names.slice(0, SHOWN_AT_ONCE);
}

/** The measures that the candidates have, the most telling first, as the page orders the others. */
export function measuresOf(page: Page, candidates: Candidate[]): string[] {
  const known = Object.keys(page.measures);
  const found = new Set(candidates.flatMap((one) => Object.keys(one.figures)));
  const ordered = [...FIRST, ...known, ...found].filter((name) => found.has(name) && !name.startsWith("noise"));
  return [...new Set(ordered)];
}

/** A measure's name, with its explanation where there is one, its unit, and which way is better. */
export function MeasureName({ page, name }: { page: Page; name: string }) {
  const measure = page.measures[name];
  const term = termOf(name);
  const text = visible(measure?.name ?? name);
  return (
    <>
      {term ? <Word term={term}>{text}</Word> : text}
      {measure?.unit && <small>&nbsp;{visible(measure.unit)}</small>}
      {measure && measure.less_is_better !== null && (
        <small class="better">
          <span aria-hidden="true">{measure.less_is_better ? "\u00a0↓" : "\u00a0↑"}</span>
          <span class="hidden">{measure.less_is_better ? ", less is better" : ", more is better"}</span>
        </small>
      )}
    </>
  );
}

/** The unit of a measure. */
export function unitOf(page: Page, name: string): string {
  return page.measures[name]?.unit ?? "";
}

export function KeyFigures({ page, candidate }: { page: Page; candidate: Candidate }) {
  const names = measuresOf(page, [candidate]);
  if (names.length === 0) return null;
  const rest = names.slice(SHOWN_AT_ONCE);
  return (
    <div class="figures">
      <h3>Figures</h3>
      <FigureTable page={page} candidate={candidate} names={names.slice(0, SHOWN_AT_ONCE)} />
      {rest.length > 0 && (
        <details>
          <summary>{rest.length} more</summary>
          <FigureTable page={page} candidate={candidate} names={rest} />
        </details>
      )}
    </div>
  );
}

function FigureTable({ page, candidate, names }: { page: Page; candidate: Candidate; names: string[] }) {
  const noises = names.map((name) => noiseOf(page, candidate, name));
  const noisy = noises.some((one) => one !== null);
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">
            <span class="hidden">measure</span>
          </th>
          <th scope="col">
            <span class="hidden">value</span>
          </th>
          <th scope="col">
            <Word term="interval" />
          </th>
          {noisy && (
            <th scope="col">
              <Word term="noise floor">noise</Word>
            </th>
          )}
        </tr>
      </thead>
      <tbody>
        {names.map((name, at) => {
          const figure = candidate.figures[name] as Figure;
          return (
            <tr key={name}>
              <th scope="row">
                <MeasureName page={page} name={name} />
              </th>
              <td class="n">{measured(figure.value, unitOf(page, name))}</td>
              <td class="between">{interval(figure, unitOf(page, name))}</td>
              {noisy && <td class={noises[at] === NOT_MEASURED ? "noise none" : "noise"}>{noises[at] ?? ""}</td>}
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}
