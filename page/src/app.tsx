/** The whole page: what the reader looks at, in the link; what it shows, from top to bottom. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { copy } from "./clipboard";
import { Comparison } from "./comparison";
import type { Page } from "./contract";
import { type CellName, examplesOf, type Filters, NO_FILTERS, type Sort, select } from "./examples";
import { Explorer } from "./explorer";
import { Header } from "./header";
import { Help } from "./help";
import { listenToKeys } from "./keys";
import { Overview } from "./overview";
import { Plots } from "./plots";
import { visible } from "./text";
import { nextTheme, restoreTheme } from "./theme";
import { Tooltip } from "./tooltip";
import { readHash, type View, writeHash } from "./view";

export function App({ page }: { page: Page }) {
  const names = page.candidates.map((one) => one.name);
  const [view, setView] = useState<View>(() => readHash(location.hash, page));
  const [theme, setTheme] = useState(restoreTheme);
  const [help, setHelp] = useState(false);
  const [said, setSaid] = useState("");
  const explorer = useRef<HTMLElement>(null);

  const candidate = page.candidates.find((one) => one.name === view.candidate) ?? page.candidates[0];
  const examples = useMemo(() => (candidate ? examplesOf(page, candidate) : []), [page, candidate]);
  const list = useMemo(() => select(examples, view.filters, view.sort), [examples, view.filters, view.sort]);
  const current = examples.find((one) => one.key === view.example) ?? list[0] ?? null;

  const change = (part: Partial<View>) => setView((before) => ({ ...before, ...part }));
  const filter = (part: Partial<Filters>) =>
    setView((before) => ({ ...before, example: null, token: null, filters: { ...before.filters, ...part } }));
  const showCell = (cell: CellName) => {
    setView((before) => ({ ...before, example: null, token: null, filters: { ...NO_FILTERS, cell } }));
    explorer.current?.scrollIntoView({ block: "start" });
  };
  const step = (by: number) => {
    const at = list.findIndex((one) => one.key === current?.key);
    const next = list[Math.min(Math.max(at + by, 0), list.length - 1)];
    if (next) change({ example: next.key, token: null });
  };
  const copyLink = () => {
    writeNow(view);
    copy(location.href).then((done) => setSaid(done ? "Link copied." : "The link is in the address bar."));
  };

  useEffect(() => {
    const later = setTimeout(() => writeNow(view), 200);
    return () => clearTimeout(later);
  }, [view]);
  useEffect(() => {
    const restore = () => setView(readHash(location.hash, page));
    addEventListener("hashchange", restore);
    return () => removeEventListener("hashchange", restore);
  }, [page]);
  useEffect(() => {
    const later = setTimeout(() => setSaid(""), 3000);
    return () => clearTimeout(later);
  }, [said]);

  const stepCandidate = (by: number) => {
    const at = names.indexOf(candidate?.name ?? "");
    const next = names[(at + by + names.length) % names.length];
    if (next !== undefined) change({ candidate: next, token: null });
  };
  useEffect(() =>
    listenToKeys({
      j: () => step(1),
      k: () => step(-1),
      "[": () => stepCandidate(-1),
      "]": () => stepCandidate(1),
      "?": () => setHelp(true),
      t: () => setTheme(nextTheme),
      c: copyLink,
    }),
  );

  if (!candidate) return <main class="failed">This page compares nothing: it has no quantized model.</main>;
  return (
    <>
      <button type="button" class="skip" onClick={() => jump(explorer.current)}>
        Skip to the examples
      </button>
      <Header
        page={page}
        candidate={candidate}
        theme={theme}
        onCandidate={(name) => change({ candidate: name, token: null })}
        onTheme={() => setTheme(nextTheme)}
        onHelp={() => setHelp(true)}
        onCopy={copyLink}
      />
      <main>
        <Overview page={page} candidate={candidate} theme={theme} cell={view.filters.cell} onCell={showCell} />
        {page.candidates.filter((one) => !one.aside).length > 1 && (
          <Comparison
            page={page}
            current={candidate}
            onCandidate={(name) => change({ candidate: name, token: null })}
          />
        )}
        <Explorer
          area={explorer}
          page={page}
          candidate={candidate}
          examples={examples}
          list={list}
          current={current}
          token={view.token}
          filters={view.filters}
          sort={view.sort}
          onFilter={filter}
          onSort={(sort: Sort) => change({ sort, example: null, token: null })}
          onExample={(key) => change({ example: key, token: null })}
          onToken={(token) => change({ token, example: current?.key ?? null })}
        />
        <Plots page={page} candidate={candidate} theme={theme} />
      </main>
      <footer>
        <p>{visible(page.origin)}</p>
        {page.notes.map((note) => (
          <p key={note}>{visible(note)}</p>
        ))}
        <p>
          Written by OnPTQ {page.version}. The page holds everything it shows and asks the network for nothing.{" "}
          <button type="button" class="link" onClick={() => setHelp(true)}>
            Keys, words, licences
          </button>
        </p>
      </footer>
      {help && <Help onClose={() => setHelp(false)} />}
      <Tooltip />
      <div class="said" role="status">
        {said}
      </div>
    </>
  );
}

function writeNow(view: View): void {
  try {
    history.replaceState(null, "", writeHash(view));
  } catch {
    // A sandboxed frame has no address to write to.
  }
}

function jump(to: HTMLElement | null): void {
  to?.scrollIntoView();
  to?.focus();
}
