/** One decision: what both models would have said next, by how much, and what would have become of it. */

import type { Futures, Kind, Page, States, Top } from "./contract";
import { KIND_WORDS } from "./examples";
import { number, percent } from "./format";
import type { Term } from "./terms";
import { label } from "./text";
import { Word } from "./tooltip";

interface Given {
  page: Page;
  states: States;
  tokens: number[] | null;
  at: number;
  aside: boolean; // whether these are states of a round
  selects: boolean; // whether its update learns from critical states
  onToken: (token: number) => void;
}

const KIND_CLASS = ["agree", "near-miss", "mismatch"] as const;

export function Inspector({ page, states, tokens, at, aside, selects, onToken }: Given) {
  const kind = states.kind[at] ?? 0;
  const top = states.top[at] ?? null;
  const futures = states.futures[at] ?? null;
  const name = (id: number | undefined) => (id === undefined ? "–" : label(page.tokens[id] ?? `#${id}`));
  const reference = states.reference[at];
  const quantized = states.quantized[at];
  return (
    <section class="inspector" aria-label="The chosen token">
      <header>
        <h4>
          Token {at + 1} <span class="muted">of {states.kind.length}</span> <code>{name(tokens?.[at])}</code>
        </h4>
        <span class={`kind ${KIND_CLASS[kind]}`}>{KIND_WORDS[kind]}</span>
        {selects && <Selection critical={states.critical[at] ?? false} weight={states.weight[at]} />}
        <span class="steps">
          <button type="button" disabled={at === 0} onClick={() => onToken(at - 1)} aria-label="Previous token">
            ←
          </button>
          <button
            type="button"
            disabled={at >= states.kind.length - 1}
            onClick={() => onToken(at + 1)}
            aria-label="Next token"
          >
            →
          </button>
        </span>
      </header>
      <p class="plainly" role="status">
        {kind === 2 ? (
          <>
            Here the dense model says <code class="d">{name(reference)}</code>
            {share(top, "dense", reference)}, the quantized model <code class="q">{name(quantized)}</code>
            {share(top, "quantized", quantized)}.
          </>
        ) : (
          <>
            Both models say <code>{name(reference)}</code>; the strongest other token is{" "}
            <code>{name(states.competitor[at])}</code>.
          </>
        )}
      </p>
      <div class="two">
        {top ? (
          <Bars top={top} name={name} />
        ) : (
          <p class="muted">
            {aside ? (
              "The ten likeliest tokens are there for the riskiest states of a round."
            ) : (
              <>
                The ten likeliest tokens of this state are not there: run with <code>--set report.detail=full</code>.
              </>
            )}
          </p>
        )}
        <Numbers states={states} at={at} />
      </div>
      {futures && <FuturesView futures={futures} name={name} />}
      {states.became && <Became later={states.became[at] ?? []} />}
    </section>
  );
}

function Selection({ critical, weight }: { critical: boolean; weight: number | undefined }) {
  if (!critical) return <span class="kind">not selected</span>;
  return <span class="kind is-critical">selected, weight {number(weight)}</span>;
}

function share(top: Top | null, whose: keyof Top, id: number | undefined): string {
  const found = top?.[whose].find(([token]) => token === id);
  return found ? ` (${percent(found[1])} %)` : "";
}

type Name = (id: number | undefined) => string;

/** Both models' likeliest tokens as pairs of bars. */
function Bars({ top, name }: { top: Top; name: Name }) {
  const dense = new Map(top.dense);
  const quantized = new Map(top.quantized);
  const most = (id: number) => Math.max(dense.get(id) ?? 0, quantized.get(id) ?? 0);
  const ids = [...new Set([...dense.keys(), ...quantized.keys()])].sort((a, b) => most(b) - most(a));
  const scale = ids.length > 0 ? most(ids[0] as number) : 1;
  const width = (share: number | undefined) => ({ width: `${(100 * (share ?? 0)) / scale}%` });
  return (
    <table class="bars">
      <caption class="hidden">Probability of the next token in percent, by both models</caption>
      <thead>
        <tr>
          <th scope="col">Next token</th>
          <td />
          <th scope="col" class="n">
            <span class="key d">dense %</span>
          </th>
          <th scope="col" class="n">
            <span class="key q">quant. %</span>
          </th>
        </tr>
      </thead>
      <tbody>
        {ids.map((id) => (
          <tr key={id}>
            <th scope="row">
              <code>{name(id)}</code>
            </th>
            <td>
              <span class="bar d" style={width(dense.get(id))} />
              <span class="bar q" style={width(quantized.get(id))} />
            </td>
            <Share value={dense.get(id)} best={id === top.dense[0]?.[0]} whose="d" />
            <Share value={quantized.get(id)} best={id === top.quantized[0]?.[0]} whose="q" />
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Share({ value, best, whose }: { value: number | undefined; best: boolean; whose: "d" | "q" }) {
  return (
    <td class={`n ${whose} ${best ? "best" : ""}`}>
      {value === undefined ? <small>not in ten</small> : percent(value)}
    </td>
  );
}

function Numbers({ states, at }: { states: States; at: number }) {
  const rows: [Term, string, number | null | undefined][] = [
    ["margin", "margin, dense", states.margin_dense[at]],
    ["margin", "margin, quantized", states.margin_quant[at]],
    ["erosion", "erosion", states.erosion[at]],
    ["consequence", "consequence", states.consequence[at]],
    ["risk", "risk", states.risk[at]],
    ["JS", "JS", states.js[at]],
    ["KL", "KL", states.kl[at]],
  ];
  return (
    <dl class="numbers">
      {rows.map(([term, words, value]) => (
        <div key={words}>
          <dt>
            <Word term={term}>{words}</Word>
          </dt>
          <dd>{value === null ? "not branched" : number(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** The two continuations step by step, with how far the dense model sees them apart. */
function FuturesView({ futures, name }: { futures: Futures; name: Name }) {
  const steps = Math.max(futures.reference.length, futures.competitor.length, futures.apart.length);
  const most = Math.max(0.05, ...futures.apart);
  return (
    <div class="futures">
      <h5>
        Two futures{" "}
        <span class="muted">continued by the {futures.continued_by === "D" ? "dense" : "quantized"} model</span>
      </h5>
      <ol>
        {Array.from({ length: steps }, (_, step) => {
          const apart = apartAt(futures, step);
          return (
            <li key={step}>
              <code class="d">{name(futures.reference[step])}</code>
              <span class="apart" title={`Apart by ${number(apart)}`}>
                <span class="fill" style={{ height: `${(100 * (apart ?? 0)) / most}%` }} />
              </span>
              <small>{number(apart, 2)}</small>
              <code class="q">{name(futures.competitor[step])}</code>
            </li>
          );
        })}
      </ol>
      <p class="hint">
        Above the future of the dense model's token, below that of its competitor; between them how far the dense
        model's probabilities lie apart behind both, where neither has ended.
      </p>
    </div>
  );
}

/** How far both are apart behind a step; null where one of them has ended, which the data have as 0. */
function apartAt(futures: Futures, step: number): number | null {
  const last = Math.min(futures.reference.length, futures.competitor.length) - 1;
  const apart = futures.apart[step] ?? null;
  return apart === 0 && step >= last ? null : apart;
}

/** What became of the decision in later rounds. */
function Became({ later }: { later: (Kind | null)[] }) {
  return (
    <p class="became">
      What became of it:{" "}
      {later.map((kind, at) => (
        <span key={at}>
          {at === 0 ? "one round later" : `${at + 1} rounds later`}{" "}
          {kind === null ? (
            <span class="kind">not visited</span>
          ) : (
            <span class={`kind ${KIND_CLASS[kind]}`}>{KIND_WORDS[kind]}</span>
          )}
        </span>
      ))}
    </p>
  );
}
