/** All candidates side by side. */

import { useState } from "preact/hooks";
import type { Candidate, Page } from "./contract";
import { MeasureName, measuresOf, telling, unitOf } from "./figures";
import { bytes, interval, measured } from "./format";
import { NOT_MEASURED, noiseOf } from "./noise";
import { Scrolls } from "./scrolls";
import { visible } from "./text";

interface Given {
  page: Page;
  current: Candidate;
  onCandidate: (name: string) => void;
}

export function Comparison({ page, current, onCandidate }: Given) {
  const [whole, setWhole] = useState(false);
  const beside = page.candidates.filter((one) => !one.aside);
  const every = measuresOf(page, beside);
  const most = telling(every);
  const names = whole ? every : most;
  const sized = beside.some((one) => one.size_bytes !== null);
  return (
    <section class="comparison" aria-labelledby="comparison-title">
      <h2 id="comparison-title">Candidates side by side</h2>
      <Scrolls label="Table of candidates">
        <table>
          <thead>
            <tr>
              <th scope="col">Candidate</th>
              {sized && <th scope="col">Size</th>}
              {names.map((name) => (
                <th scope="col" key={name}>
                  <MeasureName page={page} name={name} />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {beside.map((one) => (
              <tr key={one.name} class={one === current ? "current" : ""}>
                <th scope="row">
                  <button
                    type="button"
                    class="link"
                    aria-pressed={one === current}
                    onClick={() => onCandidate(one.name)}
                  >
                    {visible(one.title)}
                  </button>
                </th>
                {sized && <td class="n">{one.size_bytes === null ? "–" : bytes(one.size_bytes)}</td>}
                {names.map((name) => (
                  <Cell key={name} page={page} candidate={one} name={name} />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Scrolls>
      {most.length < every.length && (
        <button type="button" class="link" aria-expanded={whole} onClick={() => setWhole(!whole)}>
          {whole ? "Fewer figures" : `All ${every.length} figures`}
        </button>
      )}
    </section>
  );
}

function Cell({ page, candidate, name }: { page: Page; candidate: Candidate; name: string }) {
  const figure = candidate.figures[name];
  const noise = noiseOf(page, candidate, name);
  if (!figure) return <td class="n none">–</td>;
  const unit = unitOf(page, name);
  return (
    <td class="n">
      {measured(figure.value, unit)}
      <small>{interval(figure, unit)}</small>
      {noise !== null && <small class="noise">{noise === NOT_MEASURED ? "noise ?" : `noise ${noise}`}</small>}
    </td>
  );
}
