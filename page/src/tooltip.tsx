/** Words that explain themselves when pointed at or focused. */

import { useEffect, useState } from "preact/hooks";
import { TERMS, type Term } from "./terms";

/** A word of the glossary; `children` where it is written otherwise. */
export function Word({ term, children }: { term: Term; children?: preact.ComponentChildren }) {
  return (
    <button type="button" class="word" data-term={term} aria-label={`${plain(children) ?? term}: ${TERMS[term]}`}>
      {children ?? term}
    </button>
  );
}

function plain(children: preact.ComponentChildren): string | null {
  return typeof children === "string" ? children : null;
}

interface Shown {
  term: Term;
  left: number;
  top: number;
  above: boolean;
}

/** The one explanation on the screen. */
export function Tooltip() {
  const [shown, setShown] = useState<Shown | null>(null);
  useEffect(() => {
    const at = (word: HTMLElement | null): Shown | null => {
      if (!word) return null;
      const box = word.getBoundingClientRect();
      const above = box.bottom + 120 > innerHeight;
      const left = Math.max(8, Math.min(box.left, innerWidth - 328));
      return { term: word.dataset.term as Term, left, top: above ? box.top - 6 : box.bottom + 6, above };
    };
    const wordAt = (target: EventTarget | null) =>
      target instanceof Element ? target.closest<HTMLElement>("[data-term]") : null;
    const show = (event: Event) => setShown(at(wordAt(event.target)));
    const hide = () => setShown(null);
    const scrolled = () => setShown((before) => before && at(wordAt(document.activeElement)));
    const close = (event: KeyboardEvent) => event.key === "Escape" && hide();
    document.addEventListener("pointerover", show);
    document.addEventListener("focusin", show);
    document.addEventListener("keydown", close);
    addEventListener("scroll", scrolled, { passive: true, capture: true });
    return () => {
      document.removeEventListener("pointerover", show);
      document.removeEventListener("focusin", show);
      document.removeEventListener("keydown", close);
      removeEventListener("scroll", scrolled, { capture: true });
    };
  }, []);
  if (!shown) return null;
  const style = {
    left: `${shown.left}px`,
    top: `${shown.top}px`,
    transform: shown.above ? "translateY(-100%)" : "none",
  };
  return (
    <div class="tooltip" role="tooltip" style={style}>
      <b>{shown.term}</b> {TERMS[shown.term]}
    </div>
  );
}
