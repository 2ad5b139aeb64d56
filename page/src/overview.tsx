/** The first screen: what became of the answers. */

import type { Candidate, Page, Served } from "./contract";
import type { CellName } from "./examples";
import { KeyFigures } from "./figures";
import { FlipTable } from "./flips";
import { bytes, measured } from "./format";
import { noiseOf } from "./noise";
import { PlotFigure } from "./plots";
import { Scrolls } from "./scrolls";
import { label, visible } from "./text";
import type { Theme } from "./theme";

interface Given {
  page: Page;
  candidate: Candidate;
  theme: Theme;
  cell: CellName | "";
  onCell: (cell: CellName) => void;
}

export function Overview({ page, candidate, theme, cell, onCell }: Given) {
  const picture = page.plots[0];
  return (
    <section class="overview" aria-label="Verdict">
      <div class="verdict">
        <h2>{visible(candidate.title)}</h2>
        <p class="how">{visible(candidate.how)}</p>
        <p class="sentence">{visible(candidate.verdict)}</p>
        <Facts page={page} candidate={candidate} />
      </div>
      <div class="first">
        {candidate.flips && (
          <FlipTable
            flips={candidate.flips}
            noise={noiseOf(page, candidate, "flips")}
            items={page.items.length}
            chosen={cell}
            onCell={onCell}
          />
        )}
        <KeyFigures page={page} candidate={candidate} />
        {picture && <PlotFigure plot={picture} theme={theme} chosen={visible(candidate.title)} />}
      </div>
      {candidate.served.length > 0 && <ServedTable served={candidate.served} />}
    </section>
  );
}

function Facts({ page, candidate }: { page: Page; candidate: Candidate }) {
  const size = candidate.size_bytes;
  const whole = page.dense_bytes;
  const prompts = candidate.responses.filter((one) => one !== null).length;
  const seconds = candidate.figures.seconds?.value ?? null;
  const peak = candidate.figures.peak?.value ?? null;
  return (
    <p class="facts">
      {candidate.scheme && (
        <span>
          Scheme <b>{visible(candidate.scheme)}</b>
        </span>
      )}
      {size !== null && (
        <span>
          Size <b>{bytes(size)}</b>
          {whole ? ` of ${bytes(whole)} (${((100 * size) / whole).toFixed(0)} %)` : ""}
        </span>
      )}
      {seconds !== null && (
        <span>
          Made in <b>{measured(seconds, "s")} s</b>
          {peak !== null && ` with ${bytes(1e9 * peak)} of memory at most`}
        </span>
      )}
      <span>
        Against <b>{visible(page.dense)}</b>
      </span>
      {prompts > 0 && (
        <span>
          <b>{prompts}</b> prompts
        </span>
      )}
      {page.items.length > 0 && candidate.answers.length > 0 && (
        <span>
          <b>{page.items.length}</b> graded items
        </span>
      )}
    </p>
  );
}

/** What servers make of the checkpoint: those that serve it as it is, and on demand the others. */
function ServedTable({ served }: { served: Served[] }) {
  const asIs = served.filter((one) => one.command !== "");
  const others = served.filter((one) => one.command === "");
  return (
    <div class="served">
      <h3>What servers compute</h3>
      {asIs.length > 0 && <ServedRows served={asIs} />}
      {others.length > 0 && asIs.length === 0 && <ServedRows served={others} />}
      {others.length > 0 && asIs.length > 0 && (
        <details>
          <summary>{others.length} more: other servers, and without the option</summary>
          <ServedRows served={others} />
        </details>
      )}
      <Kernels served={served} />
    </div>
  );
}

/** What is known of the kernels, each note once. */
function Kernels({ served }: { served: Served[] }) {
  const notes = new Map<string, string[]>();
  for (const { server, gpu, note } of served)
    if (note) notes.set(note, [...(notes.get(note) ?? []), `${server}, ${gpu}`]);
  if (notes.size === 0) return null;
  return (
    <details class="kernels">
      <summary>Which kernels</summary>
      <ul>
        {[...notes].map(([note, where]) => (
          <li key={note}>
            {visible(where.join("; "))}: {visible(note)}
          </li>
        ))}
      </ul>
    </details>
  );
}

function ServedRows({ served }: { served: Served[] }) {
  const commands = served.some((one) => one.command !== "");
  return (
    <Scrolls label="What servers compute">
      <table>
        <thead>
          <tr>
            <th scope="col">Server</th>
            <th scope="col">GPU</th>
            <th scope="col">Computes</th>
            {commands && <th scope="col">Command</th>}
          </tr>
        </thead>
        <tbody>
          {served.map((one, at) => (
            <tr key={at}>
              <th scope="row">{visible(one.server)}</th>
              <td>{visible(one.gpu)}</td>
              <td>{visible(one.computes)}</td>
              {commands && <td>{one.command && <code title={label(one.command)}>{visible(one.command)}</code>}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </Scrolls>
  );
}
