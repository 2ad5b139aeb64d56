/** What a page shows, as plain data. The same types as `src/onptq/page/contract.py`, which says what they mean. */

export const FORMAT = 1;

export type Kind = 0 | 1 | 2; // agree, near miss, mismatch
export type Change = "same" | "reworded" | "clear" | "content";

export interface Figure {
  value: number | null;
  low: number | null;
  high: number | null;
}

export interface Measure {
  name: string;
  unit: string;
  less_is_better: boolean | null;
  noise: string;
  noise_at_most: boolean;
}

export interface Media {
  kind: "image" | "audio";
  name: string;
  src: string | null;
  note: string;
}

export interface MessagePart {
  text: string;
  media: number | null;
}

export interface Turn {
  role: string;
  parts: MessagePart[];
}

export interface Answer {
  text: string;
  tokens: number[] | null;
  finished: boolean | null;
  right: boolean | null;
  score: number | null;
}

export interface Question {
  id: string;
  task: string;
  kinds: string[];
  turns: Turn[];
  dense: Answer;
  reference: string | null;
}

export interface Top {
  dense: [number, number][];
  quantized: [number, number][];
}

export interface Futures {
  reference: number[];
  competitor: number[];
  apart: number[];
  continued_by: "D" | "Q";
}

export interface States {
  reference: number[];
  competitor: number[];
  quantized: number[];
  margin_dense: number[];
  margin_quant: number[];
  erosion: number[];
  js: number[];
  kl: number[];
  kind: Kind[];
  consequence: (number | null)[];
  risk: number[];
  weight: number[];
  critical: boolean[];
  top: (Top | null)[];
  futures: (Futures | null)[];
  became: (Kind | null)[][] | null;
}

export interface Response {
  answer: Answer;
  change: Change;
  fork: number | null;
  states: States | null;
}

export interface Cell {
  count: number;
  percent: Figure;
  items: number[];
}

export interface Flips {
  right_right: Cell;
  right_wrong: Cell;
  wrong_right: Cell;
  wrong_wrong: Cell;
}

export interface Served {
  server: string;
  gpu: string;
  computes: string;
  command: string;
  note: string; // on its kernels
}

export interface Plot {
  id: string;
  title: string;
  caption: string;
  spec: Record<string, unknown>;
}

export interface Candidate {
  name: string;
  title: string;
  how: string;
  verdict: string;
  figures: Record<string, Figure>;
  scheme: string | null;
  size_bytes: number | null;
  served: Served[];
  flips: Flips | null;
  answers: (Answer | null)[];
  responses: (Response | null)[];
  plots: Plot[];
  aside: boolean;
  selects: boolean;
}

export interface Page {
  title: string;
  dense: string;
  origin: string;
  candidates: Candidate[];
  prompts: Question[];
  items: Question[];
  media: Media[];
  tokens: Record<string, string>;
  measures: Record<string, Measure>;
  plots: Plot[];
  notes: string[];
  dense_bytes: number | null;
  version: string;
  format: number;
}
