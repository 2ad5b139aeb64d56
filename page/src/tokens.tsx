/** The quantized answer token by token, tinted by risk, its mismatches and near misses marked. */

import { Component } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { Page, States } from "./contract";
import { KIND_WORDS } from "./examples";
import { number } from "./format";
import { STEPS, stepOf } from "./scale";
import { label, visible } from "./text";
import { Word } from "./tooltip";

interface Given {
  page: Page;
  tokens: number[];
  states: States;
  rest: string; // the text behind the last state: two servers are compared up to the first fork
  fork: number | null;
  at: number;
  scale: number[];
  onToken: (token: number) => void;
}

export function Tokens({ page, tokens, states, rest, fork, at, scale, onToken }: Given) {
  const box = useRef<HTMLDivElement>(null);
  const first = useRef(true);
  useLayoutEffect(() => {
    const element = box.current;
    const token = element?.children[at] as HTMLElement | undefined;
    if (!element || !token) return;
    const top = token.offsetTop - element.offsetTop;
    if (top < element.scrollTop || top + token.offsetHeight > element.scrollTop + element.clientHeight) {
      element.scrollTop = top - element.clientHeight / 3;
    }
  }, [at, tokens]);
  useEffect(() => {
    if (!first.current) bring(box.current?.children[at]);
    first.current = false;
  }, [at]);

  const onKeyDown = (event: KeyboardEvent) => {
    const moves: Record<string, number> = {
      ArrowDown: below(box.current, at, 1),
      ArrowUp: below(box.current, at, -1),
      Home: 0,
      End: states.kind.length - 1,
    };
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    onToken(to);
  };
  const onClick = (event: MouseEvent) => {
    const token = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-at]") : null;
    if (token) onToken(Number(token.dataset.at));
  };
  return (
    <div
      ref={box}
      class="tokens"
      role="listbox"
      tabIndex={0}
      aria-label="Tokens of the quantized answer"
      aria-activedescendant={`token-${at}`}
      onKeyDown={onKeyDown}
      onClick={onClick}
    >
      {tokens.slice(0, states.kind.length).map((id, i) => (
        <Token
          key={i}
          i={i}
          text={page.tokens[id]}
          id={id}
          kind={states.kind[i] ?? 0}
          risk={states.risk[i] ?? 0}
          step={stepOf(states.risk[i] ?? 0, scale)}
          critical={states.critical[i] ?? false}
          fork={i === fork}
          chosen={i === at}
        />
      ))}
      {rest !== "" && (
        // biome-ignore lint/a11y/useFocusableInteractive: as a token, but nothing is known of it
        <span role="option" aria-disabled="true" aria-selected="false" title="Compared by its text alone">
          {visible(rest)}
        </span>
      )}
    </div>
  );
}

/** Moves the window no more than needed to have the element in sight. */
function bring(element: Element | undefined): void {
  const box = element?.getBoundingClientRect();
  if (box && (box.top < 60 || box.bottom > innerHeight)) element?.scrollIntoView({ block: "center" });
}

/** The token above or below this one: on the next line, nearest to its middle. */
function below(box: HTMLElement | null, at: number, by: 1 | -1): number {
  const tokens = box?.children;
  const here = tokens?.[at] as HTMLElement | undefined;
  if (!tokens || !here) return at;
  const middle = here.offsetLeft + here.offsetWidth / 2;
  let best = at;
  let nearest = Infinity;
  let line: number | null = null;
  for (let i = at + by; i >= 0 && i < tokens.length; i += by) {
    const token = tokens[i] as HTMLElement;
    if (Math.abs(token.offsetTop - here.offsetTop) < 4) continue;
    line ??= token.offsetTop;
    if (Math.abs(token.offsetTop - line) >= 4) break;
    const distance = Math.abs(token.offsetLeft + token.offsetWidth / 2 - middle);
    if (distance < nearest) {
      nearest = distance;
      best = i;
    }
  }
  return best;
}

interface One {
  i: number;
  id: number;
  text: string | undefined;
  kind: 0 | 1 | 2;
  risk: number;
  step: number;
  critical: boolean;
  fork: boolean;
  chosen: boolean;
}

const KIND_CLASS = ["", "near-miss", "mismatch"] as const;

/** One token; it is drawn again only when it is chosen or left. */
class Token extends Component<One> {
  override shouldComponentUpdate(next: One): boolean {
    const now = this.props;
    return next.chosen !== now.chosen || next.step !== now.step || next.id !== now.id || next.fork !== now.fork;
  }

  render({ i, id, text, kind, risk, step, critical, fork, chosen }: One) {
    const said = text === undefined ? `#${id}` : label(text);
    const facts = [`Token ${i + 1}: ${said}`, KIND_WORDS[kind], `risk ${number(risk)}`];
    if (critical) facts.push("critical");
    if (fork) facts.push("first fork");
    const classes = ["token", `step-${step}`, KIND_CLASS[kind], critical ? "critical" : "", fork ? "fork" : ""];
    return (
      // biome-ignore lint/a11y/useFocusableInteractive: the listbox has the focus and names the active token
      <span
        id={`token-${i}`}
        data-at={i}
        class={classes.filter(Boolean).join(" ")}
        role="option"
        aria-selected={chosen}
        aria-label={facts.join(", ")}
      >
        {text === undefined ? said : <Written text={text} />}
      </span>
    );
  }
}

/** The token's text where its spaces and line breaks can be seen, and still break the line. */
function Written({ text }: { text: string }) {
  const seen = visible(text);
  if (!/[ \n\t]|^$/.test(seen)) return <>{seen}</>;
  if (seen === "") return <>∅</>;
  return (
    <>
      {seen.split(/([ \n\t])/).map((piece, at) => {
        if (piece === " ") return <span key={at} class="space" children=" " />;
        if (piece === "\n") return <span key={at} class="sign" children={"↵\n"} />;
        if (piece === "\t") return <span key={at} class="sign" children={"⇥\t"} />;
        return piece;
      })}
    </>
  );
}

/** What tints and marks mean. */
export function Legend({ scale, states }: { scale: number[]; states: States }) {
  const names = ["none", `to ${number(scale[0])}`];
  for (let step = 1; step < scale.length; step++) names.push(`to ${number(scale[step])}`);
  if (scale.length > 0) names.push("more");
  return (
    <p class="legend">
      <span>
        <Word term="risk">risk</Word>
        {names.slice(0, STEPS + 1).map((name, step) => (
          <span key={name} class={`swatch token step-${step}`}>
            {name}
          </span>
        ))}
      </span>
      <span>
        <span class="swatch token mismatch">text</span> <Word term="mismatch">mismatch</Word>
      </span>
      <span>
        <span class="swatch token near-miss">text</span> <Word term="near miss">near miss</Word>
      </span>
      <span>
        <span class="swatch token fork">text</span> <Word term="first fork">first fork</Word>
      </span>
      {states.critical.includes(true) && (
        <span>
          <span class="swatch token critical">text</span> <Word term="critical">critical</Word>
        </span>
      )}
    </p>
  );
}
