/** Keys that work wherever the reader is, except where text is typed. */

export const KEYS: [string, string][] = [
  ["j, k", "next, previous example"],
  ["→, ←", "next, previous token"],
  ["↓, ↑", "token in the line below, above (when the answer has the focus); next, previous example (in the list)"],
  ["n, p", "next, previous mismatch or near miss"],
  ["f", "first fork"],
  ["r", "riskiest token"],
  ["], [", "next, previous candidate"],
  ["/", "search"],
  ["c", "copy a link to what is shown"],
  ["t", "theme: as the system, light, dark"],
  ["?", "this help"],
  ["Esc", "close"],
];

/** Listens until the returned function is called. */
export function listenToKeys(actions: Record<string, () => void>): () => void {
  const listen = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]") || typing(event.target)) return;
    const action = actions[event.key];
    if (!action || (event.key.startsWith("Arrow") && scrolling(event.target))) return;
    event.preventDefault();
    action();
  };
  document.addEventListener("keydown", listen);
  return () => document.removeEventListener("keydown", listen);
}

function typing(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest("input, select, textarea, audio") !== null;
}

function scrolling(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest(".scrolls") !== null;
}
