/** Both answers side by side, with the place where they part. */

import type { Answer, Page, States } from "./contract";
import { type Example, isKept, tokensOf } from "./examples";
import { number } from "./format";
import { common, visible } from "./text";
import { Legend, Tokens } from "./tokens";
import { Word } from "./tooltip";

interface Given {
  page: Page;
  one: Example;
  states: States | null;
  at: number;
  scale: number[];
  onToken: (token: number) => void;
}

export function Answers({ page, one, states, at, scale, onToken }: Given) {
  const dense = one.dense;
  const quantized = one.answer;
  const parts = quantized ? partsOf(page, dense, quantized, one.fork) : null;
  const tokens = tokensOf(one);
  return (
    <div class="answers">
      <section class="answer dense" aria-label="Answer of the dense model">
        <h4>
          Dense <Grade answer={dense} />
        </h4>
        {isKept(dense) ? (
          <Prose parts={parts?.dense ?? [visible(dense.text), "", ""]} />
        ) : (
          <p class="prose none">
            The run has no answer of the dense model here. Up to the first fork both say the same.
          </p>
        )}
      </section>
      <section class="answer quantized" aria-label="Answer of the quantized model">
        <h4>
          Quantized {quantized && <Grade answer={quantized} />}
          {one.fork !== null && (
            <span class="muted">
              <Word term="first fork">first fork</Word> at token {one.fork + 1}
            </span>
          )}
        </h4>
        {states && quantized && tokens ? (
          <Tokens
            key={one.key}
            page={page}
            tokens={tokens}
            states={states}
            rest={after(page, quantized, tokens, states.kind.length)}
            fork={one.fork}
            at={at}
            scale={scale}
            onToken={onToken}
          />
        ) : (
          <Prose parts={parts?.quantized ?? ["–", "", ""]} />
        )}
      </section>
      {states && tokens && <Legend scale={scale} states={states} />}
    </div>
  );
}

function Grade({ answer }: { answer: Answer }) {
  return (
    <>
      {answer.right !== null && (
        <span class={`grade ${answer.right ? "right" : "wrong"}`}>{answer.right ? "✓ right" : "✗ wrong"}</span>
      )}
      {answer.right === null && answer.score !== null && <span class="grade">score {number(answer.score)}</span>}
      {answer.finished === false && <span class="grade">cut off</span>}
    </>
  );
}

type Parts = [before: string, parting: string, after: string];

function Prose({ parts: [before, parting, after] }: { parts: Parts }) {
  if (before + parting + after === "") return <p class="prose none">(empty)</p>;
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrolling area has to be reached by keyboard
    <p class="prose" dir="auto" tabIndex={0}>
      {parting === "" ? before : <span class="shared">{before}</span>}
      {parting !== "" && <mark>{parting}</mark>}
      {after}
    </p>
  );
}

/** Each answer cut at the fork: by tokens where they are known, else by words. */
function partsOf(
  page: Page,
  dense: Answer,
  quantized: Answer,
  fork: number | null,
): { dense: Parts; quantized: Parts } {
  if (fork !== null && dense.tokens && quantized.tokens) {
    return {
      dense: byTokens(page, dense, dense.tokens, fork),
      quantized: byTokens(page, quantized, quantized.tokens, fork),
    };
  }
  const left = visible(dense.text);
  const right = visible(quantized.text);
  const shared = left === right ? left.length : common(left, right);
  return { dense: byWords(left, shared), quantized: byWords(right, shared) };
}

/** The text before, at and after the fork; without the token that ends an answer, unless that is the fork. */
function byTokens(page: Page, answer: Answer, tokens: number[], fork: number): Parts {
  const [before, parting] = [written(page, tokens.slice(0, fork)), written(page, tokens.slice(fork, fork + 1))];
  return [visible(before), visible(parting), visible(after(page, answer, tokens, fork + 1))];
}

/** The text of an answer behind so many of its tokens. */
function after(page: Page, answer: Answer, tokens: number[], count: number): string {
  if (count >= tokens.length) return "";
  const before = written(page, tokens.slice(0, count));
  return answer.text.startsWith(before) ? answer.text.slice(before.length) : written(page, tokens.slice(count));
}

function written(page: Page, tokens: number[]): string {
  return tokens.map((id) => page.tokens[id] ?? "").join("");
}

function byWords(text: string, shared: number): Parts {
  const word = /^\S+/.exec(text.slice(shared))?.[0] ?? "";
  return [text.slice(0, shared), word, text.slice(shared + word.length)];
}
