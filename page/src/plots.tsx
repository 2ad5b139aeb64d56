/** Pictures, drawn when they come into sight. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Candidate, Page, Plot } from "./contract";
import { visible } from "./text";
import type { Theme } from "./theme";
import { draw } from "./vega";

export function Plots({ page, candidate, theme }: { page: Page; candidate: Candidate; theme: Theme }) {
  const plots = [...page.plots.slice(1), ...candidate.plots];
  if (plots.length === 0) return null;
  return (
    <section class="plots" aria-labelledby="plots-title">
      <h2 id="plots-title">Plots</h2>
      <div class="grid">
        {plots.map((plot) => (
          <PlotFigure key={`${candidate.name} ${plot.id}`} plot={plot} theme={theme} />
        ))}
      </div>
    </section>
  );
}

interface Shown {
  plot: Plot;
  theme: Theme;
  chosen?: string; // the candidate to mark in a picture of all
}

export function PlotFigure({ plot, theme, chosen = "" }: Shown) {
  const place = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState(false);
  const [failed, setFailed] = useState("");
  const dark = useDark(theme);

  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const watch = new IntersectionObserver((found) => found.some((one) => one.isIntersecting) && setSeen(true), {
      rootMargin: "300px",
    });
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    let erase: (() => void) | null = null;
    const show = () => {
      if (erase !== null) return;
      try {
        erase = draw(element, plot.spec, chosen);
        setFailed("");
      } catch (error) {
        setFailed(String(error));
      }
    };
    if (seen) show();
    addEventListener("beforeprint", show); // what is drawn after this event is not printed
    return () => {
      removeEventListener("beforeprint", show);
      erase?.();
    };
  }, [seen, plot, dark, chosen]);

  return (
    <figure class="plot">
      <h3>{visible(plot.title)}</h3>
      <div class="drawing" role="img" aria-label={visible(`${plot.title}. ${plot.caption}`)} data-drawn={seen}>
        <div ref={place} aria-hidden="true" />
      </div>
      {failed && <p class="none">This plot cannot be drawn: {visible(failed)}</p>}
      <figcaption>{visible(plot.caption)}</figcaption>
    </figure>
  );
}

function useDark(theme: Theme): boolean {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [system, setSystem] = useState(query.matches);
  useEffect(() => {
    const listen = () => setSystem(query.matches);
    query.addEventListener("change", listen);
    return () => query.removeEventListener("change", listen);
  }, []);
  return theme === "system" ? system : theme === "dark";
}
