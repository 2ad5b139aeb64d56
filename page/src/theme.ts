/** Light, dark, or as the system has it; remembered where the browser allows it. */

export type Theme = "system" | "light" | "dark";

const KEY = "onptq-theme";
const ORDER: Theme[] = ["system", "light", "dark"];

export function restoreTheme(): Theme {
  let kept: string | null = null;
  try {
    kept = localStorage.getItem(KEY);
  } catch {
    // Storage may be forbidden; the system's theme is as good.
  }
  return wear(ORDER.find((one) => one === kept) ?? "system");
}

/** The theme after this one, put on and remembered. */
export function nextTheme(theme: Theme): Theme {
  const next = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length] as Theme;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // As above.
  }
  return wear(next);
}

function wear(theme: Theme): Theme {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  return theme;
}
