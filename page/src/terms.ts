/** The words of the page in a sentence or two; the glossary of the documentation has them all. */

export const TERMS = {
  state: "A prompt with the first tokens of an answer. Each state predicts one token.",
  mismatch: "A state where the dense and the quantized model choose different next tokens, after the same beginning.",
  "near miss":
    "A state where both models choose the same token, but the quantized model has lost so much of the margin that little is missing for another one.",
  "first fork":
    "The first token at which the quantized answer leaves the dense answer. From there on the two have different futures.",
  margin: "How much higher the dense model's token scores than its strongest competitor, in logits.",
  erosion: "How much of the dense model's margin the quantized model has lost, in logits. Negative: it gained.",
  consequence:
    "How far apart the dense model sees the two futures that begin with the one and with the other token. Small: they soon come together again. In comparisons the two tokens themselves count as one step, wholly apart (0.693).",
  risk: "Erosion, raised by consequence, plus divergence. High where a decision is close to turning, and where turning it matters.",
  critical: "One of the riskiest states of a round. Recipes that weight states by risk learn from these alone.",
  weight: "How much this state counts in calibration; the weights of all critical states follow their risk.",
  JS: "How far the two models' next-token probabilities lie apart (Jensen-Shannon divergence, in nats; 0 is equal, 0.693 the most).",
  KL: "How much the quantized model's next-token probabilities lose of the dense model's (Kullback-Leibler divergence, in nats).",
  "noise floor":
    "The same rate between the quantized model and itself: cached decoding beside one forward over the whole answer, which sum in another order. A rate near it means nothing. ≤: at most that; ?: not measured. On the dense path it is the dense model's own.",
  "near tie": "A state where the dense model itself hardly prefers one token: its margin is below 0.25 logits.",
  "clear mismatch": "A mismatch that is no near tie: the dense model did prefer its token.",
  CWM: "Consequence-weighted mismatch: the consequences of all mismatches over the number of all states.",
  flip: "An answer that turns from right to wrong, or from wrong to right, against the dense model.",
  reworded: "An answer with other tokens than the dense model's.",
  clear:
    "A reworded answer that leaves the dense one where the dense model clearly preferred its own token, not at a near tie.",
  content: "What an answer says or scores, not how it is worded.",
  loop: "An answer without an end that repeats itself.",
  interval: "Where the true figure probably lies, given how few examples it comes from.",
} as const;

export type Term = keyof typeof TERMS;

const OF_MEASURE: Record<string, Term> = {
  mismatch: "mismatch",
  dense_path_mismatch: "mismatch",
  clear: "clear mismatch",
  near_tie: "near tie",
  kl: "KL",
  js: "JS",
  erosion: "erosion",
  critical_erosion: "erosion",
  critical_flips: "flip",
  first_fork: "first fork",
  forked: "first fork",
  cwm: "CWM",
  flips: "flip",
  changed: "reworded",
  reworded: "reworded",
  content_worse: "content",
  content_better: "content",
  loops: "loop",
};

/** The term that explains a measure, if there is one. */
export function termOf(measure: string): Term | null {
  return OF_MEASURE[measure] ?? (measure.startsWith("kl_") ? "KL" : measure.startsWith("js_") ? "JS" : null);
}
