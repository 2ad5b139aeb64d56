/** Keys, words and licences. */

import { Dialog } from "./dialog";
import { KEYS } from "./keys";
import { TERMS } from "./terms";

export function Help({ onClose }: { onClose: () => void }) {
  const licences = document.getElementById("licences")?.textContent?.trim() ?? "";
  return (
    <Dialog title="Help" onClose={onClose}>
      <h3>Keys</h3>
      <dl class="keys">
        {KEYS.map(([key, does]) => (
          <div key={key}>
            <dt>
              {key.split(", ").map((one) => (
                <kbd key={one}>{one}</kbd>
              ))}
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
      <h3>Words</h3>
      <dl class="words">
        {Object.entries(TERMS).map(([term, meaning]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
      <details>
        <summary>Licences of the software in this page</summary>
        {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a scrolling area has to be reached by keyboard */}
        <pre tabIndex={0}>{licences}</pre>
      </details>
    </Dialog>
  );
}
