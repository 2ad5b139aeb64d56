/** The bar at the top: what this is, which candidate, how it looks. */

import type { Candidate, Page } from "./contract";
import { visible } from "./text";
import type { Theme } from "./theme";

interface Given {
  page: Page;
  candidate: Candidate;
  theme: Theme;
  onCandidate: (name: string) => void;
  onTheme: () => void;
  onHelp: () => void;
  onCopy: () => void;
}

const THEME_SIGN: Record<Theme, string> = { system: "auto", light: "light", dark: "dark" };

export function Header({ page, candidate, theme, onCandidate, onTheme, onHelp, onCopy }: Given) {
  const aside = page.candidates.filter((one) => one.aside);
  const choice = (one: Candidate) => (
    <option key={one.name} value={one.name}>
      {visible(one.title)}
    </option>
  );
  return (
    <header class="topbar">
      <h1 title={visible(page.title)}>{visible(page.title)}</h1>
      {page.candidates.length > 1 && (
        <select
          class="candidates"
          aria-label="Candidate"
          value={candidate.name}
          onChange={(event) => onCandidate(event.currentTarget.value)}
        >
          {page.candidates.filter((one) => !one.aside).map(choice)}
          {aside.length > 0 && <optgroup label="Calibration prompts">{aside.map(choice)}</optgroup>}
        </select>
      )}
      <div class="tools">
        <button type="button" onClick={onCopy} aria-label="Copy link" title="Copy a link to what is shown (c)">
          Copy<span class="wide"> link</span>
        </button>
        <button type="button" onClick={onTheme} title="Theme: as the system, light, dark (t)">
          <span class="wide">Theme: </span>
          {THEME_SIGN[theme]}
        </button>
        <button type="button" onClick={onHelp} title="Keys and words (?)" aria-label="Help">
          ?
        </button>
      </div>
    </header>
  );
}
