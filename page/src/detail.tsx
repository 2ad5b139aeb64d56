/** Everything about one example: the question, both answers, and a token's decision. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { Answers } from "./answers";
import type { Candidate, Page } from "./contract";
import { type Example, examplesOf, startOf, tokensOf } from "./examples";
import { Inspector } from "./inspector";
import { listenToKeys } from "./keys";
import { Badge } from "./list";
import { QuestionView } from "./question";
import { scaleOf } from "./scale";
import { visible } from "./text";

interface Given {
  page: Page;
  candidate: Candidate;
  one: Example;
  token: number | null;
  onToken: (token: number) => void;
}

export function Detail({ page, candidate, one, token, onToken }: Given) {
  const states = one.response?.states ?? null;
  const most = states ? states.kind.length - 1 : 0;
  const at = Math.min(token ?? startOf(one), most);
  const scale = useMemo(() => scaleOf(candidate), [candidate]);

  useEffect(() => {
    if (!states) return;
    const step = (by: number) => onToken(Math.min(Math.max(at + by, 0), most));
    const marked = (by: number) => {
      for (let i = at + by; i >= 0 && i <= most; i += by) if (states.kind[i] !== 0) return onToken(i);
    };
    const riskiest = () => onToken(states.risk.indexOf(Math.max(...states.risk)));
    return listenToKeys({
      ArrowRight: () => step(1),
      ArrowLeft: () => step(-1),
      n: () => marked(1),
      p: () => marked(-1),
      f: () => one.fork !== null && onToken(Math.min(one.fork, most)),
      r: riskiest,
    });
  });

  return (
    <article class="detail" aria-label={`Example ${visible(one.question.id)}`}>
      <header>
        <h3>{visible(one.question.id)}</h3>
        <Badge one={one} />
        <span class="muted">
          {visible(one.question.task)}
          {one.item === null ? "" : ", graded"}
        </span>
      </header>
      <QuestionView key={one.key} page={page} question={one.question} />
      <Answers page={page} one={one} states={states} at={at} scale={scale} onToken={onToken} />
      {states && (
        <Inspector
          page={page}
          states={states}
          tokens={tokensOf(one)}
          at={at}
          aside={candidate.aside}
          selects={candidate.selects}
          onToken={onToken}
        />
      )}
      {!candidate.aside && <Others key={`others ${one.key}`} page={page} candidate={candidate} one={one} />}
    </article>
  );
}

/** What the other candidates answered. */
function Others({ page, candidate, one }: { page: Page; candidate: Candidate; one: Example }) {
  const [open, setOpen] = useState(false);
  const others = page.candidates.filter((other) => other !== candidate && !other.aside);
  if (others.length === 0) return null;
  return (
    <details class="others" onToggle={(event) => setOpen((event.currentTarget as HTMLDetailsElement).open)}>
      <summary>What the other candidates answer</summary>
      {open && (
        <dl>
          {others.map((other) => {
            const theirs = examplesOf({ ...page, ...only(page, one) }, { ...other, ...onlyOf(other, one) })[0];
            return (
              <div key={other.name}>
                <dt>
                  {visible(other.title)} {theirs && <Badge one={theirs} />}
                </dt>
                <dd dir="auto">{theirs?.answer ? visible(theirs.answer.text) : "–"}</dd>
              </div>
            );
          })}
        </dl>
      )}
    </details>
  );
}

function only(page: Page, one: Example): Pick<Page, "prompts" | "items"> {
  return { prompts: at(page.prompts, one.prompt), items: at(page.items, one.item) };
}

function onlyOf(other: Candidate, one: Example): Pick<Candidate, "responses" | "answers" | "flips"> {
  return { flips: null, responses: at(other.responses, one.prompt), answers: at(other.answers, one.item) };
}

function at<T>(list: T[], place: number | null): T[] {
  return place === null ? [] : list.slice(place, place + 1);
}
