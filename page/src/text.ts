/** Text of models and users, made safe to look at: nothing in it stays invisible or turns the line around. */

// Control characters except newline and tab, direction marks and overrides, tags, and what takes no room.
const HIDDEN =
  // biome-ignore lint/suspicious/noControlCharactersInRegex: these are the characters to be shown
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;

/** Text with every hidden character replaced by a symbol for it. */
export function visible(text: string): string {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, symbol);
}

function symbol(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\u27e8${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** A token as a label: its spaces and line breaks are signs, and an empty one says so. */
export function label(text: string): string {
  if (text === "") return "\u2205";
  if (/^(?:\u200c|\u200d|[\ufe00-\ufe0f])+$/.test(text)) return symbol(text);
  return visible(text).replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
}

/** The first characters of a text in one line. */
export function oneLine(text: string, most = 160): string {
  const line = visible(text).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}\u2026` : line;
}

/** Where two texts part: how many characters they share, cut back to the last space before it. */
export function common(left: string, right: string): number {
  const most = Math.min(left.length, right.length);
  let at = 0;
  while (at < most && left[at] === right[at]) at++;
  if (at === left.length && at === right.length) return at;
  while (at > 0 && !/\s/.test(left[at - 1] ?? "")) at--;
  return at;
}
