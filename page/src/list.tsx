/** The list of examples; only the rows in sight exist. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { CELL_WORDS, CHANGE_WORDS, type Example } from "./examples";
import { number } from "./format";
import { visible } from "./text";

const ROW = 74;
const SPARE = 6; // rows above and below those in sight

interface Given {
  list: Example[];
  current: Example | null;
  onExample: (key: string) => void;
}

export function List({ list, current, onExample }: Given) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const at = current ? list.indexOf(current) : -1;

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const watch = new ResizeObserver(() => setHeight(element.clientHeight));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const element = box.current;
    if (!element || at < 0) return;
    if (at * ROW < element.scrollTop) element.scrollTop = at * ROW;
    else if ((at + 1) * ROW > element.scrollTop + element.clientHeight) {
      element.scrollTop = (at + 1) * ROW - element.clientHeight;
    }
  }, [at, list]);

  const go = (to: number) => {
    const next = list[Math.min(Math.max(to, 0), list.length - 1)];
    if (next) onExample(next.key);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / ROW) - 1);
    const moves: Record<string, number> = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: list.length - 1,
    };
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
  };

  const from = Math.max(0, Math.floor(top / ROW) - SPARE);
  const until = Math.min(list.length, Math.ceil((top + height) / ROW) + SPARE);
  const seen = at >= from && at < until;
  return (
    <div
      ref={box}
      class="list"
      role="listbox"
      tabIndex={0}
      aria-label="Examples"
      aria-activedescendant={seen ? `row-${at}` : undefined}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      onKeyDown={onKeyDown}
    >
      <div class="runway" role="presentation" style={{ height: `${list.length * ROW}px` }}>
        {list.slice(from, until).map((one, offset) => (
          <Row
            key={one.key}
            one={one}
            at={from + offset}
            of={list.length}
            chosen={one === current}
            onExample={onExample}
          />
        ))}
      </div>
    </div>
  );
}

interface RowGiven {
  one: Example;
  at: number;
  of: number;
  chosen: boolean;
  onExample: (key: string) => void;
}

function Row({ one, at, of, chosen, onExample }: RowGiven) {
  const facts: string[] = [one.question.id];
  if (one.kinds[2] > 0) facts.push(`${one.kinds[2]} ${one.kinds[2] === 1 ? "mismatch" : "mismatches"}`);
  if (one.fork !== null) facts.push(`fork ${one.fork + 1}`);
  facts.push(...one.question.kinds.filter((kind) => kind !== "text"));
  if (!one.question.id.startsWith(`${one.question.task}/`)) facts.push(one.question.task);
  const told = visible(facts.filter(Boolean).join(" · "));
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: the list handles the keys of its rows
    // biome-ignore lint/a11y/useFocusableInteractive: the list has the focus and names the active row
    <div
      id={`row-${at}`}
      class="row"
      role="option"
      aria-selected={chosen}
      aria-setsize={of}
      aria-posinset={at + 1}
      style={{ top: `${at * ROW}px`, height: `${ROW}px` }}
      onClick={() => onExample(one.key)}
    >
      <span class="line">{one.line}</span>
      <span class="sub">
        <Badge one={one} />
        {one.risk !== null && <span class="risk">risk {number(one.risk)}</span>}
      </span>
      <span class="sub facts" title={told}>
        {told}
      </span>
    </div>
  );
}

/** What became of the answer, in a word with a colour and a sign of its own. */
export function Badge({ one }: { one: Example }) {
  if (one.change === null) return <span class="badge none">no answer</span>;
  if (one.cell === "right_wrong" || one.cell === "wrong_right") {
    return <span class={`badge ${one.cell}`}>{CELL_WORDS[one.cell]}</span>;
  }
  return <span class={`badge ${one.change}`}>{CHANGE_WORDS[one.change]}</span>;
}
