/** Something wide that scrolls by itself, so that the page does not; reached by keyboard too. */

import type { ComponentChildren } from "preact";

export function Scrolls({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrolling area has to be reached by keyboard
    <section class="scrolls" tabIndex={0} aria-label={label}>
      {children}
    </section>
  );
}
