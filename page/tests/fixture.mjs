/** Pages to test with: made up from a seed, written into the built asset just as Python does. */

import { readFileSync, writeFileSync } from "node:fs";
import { deflateSync, gzipSync } from "node:zlib";
import { ASSET } from "../build.mjs";

/** The asset with the page's data and title in it. */
export function fill(page) {
  const data = gzipSync(Buffer.from(JSON.stringify(page)), { level: 6 }).toString("base64");
  const title = page.title.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return readFileSync(ASSET, "utf8")
    .replace("@@PAGE-TITLE@@", () => title)
    .replace("@@PAGE-DATA@@", () => data);
}

export function write(page, file) {
  writeFileSync(file, fill(page));
  return file;
}

/** Numbers from 0 to 1, always the same ones. */
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const WORDS = [
  ..." the| a| red| blue| small| large| round| sign| car| street| corner| stands| waits| beside| line| says| stop| shop".split(
    "|",
  ),
  ..." reads| number| seven| left| right| of| in| on| and| but| white| yellow| triangle| circle| above| below|,|.|.\n|\n\n".split(
    "|",
  ),
  ..." picture| shows| two| three| people| table| menu| price| Euro| window| glass| behind| door| open| closed| nobody".split(
    "|",
  ),
  ..." Straße| élan|日本|語|🙂|\t|  |�|".split("|"),
];

const QUESTIONS = [
  "What does the sign at the corner say? Answer with the words on the sign alone, and nothing else.",
  "Describe the picture in two sentences.",
  "How many circles are left of the triangle?",
  "Read the total on the receipt.",
  "What colour is the star? Answer briefly.",
  "Is the shop open? Say how you know.",
  "What does the speaker ask for?",
  "Which of the three signs is the largest, and what is written on it?",
];

const TASKS = ["choice", "read", "answer", "caption"];

/**
 * A page of so many prompts with so many tokens each, so many graded items and candidates.
 * `light` leaves out what the models gave other tokens.
 */
export function page({ seed = 1, prompts = 24, tokens = 48, items = 60, candidates = 3, light = false } = {}) {
  const next = random(seed);
  const media = [picture("corner.png", next), sound("question.wav"), drawing("sign.svg"), leftOut()];
  const questions = Array.from({ length: prompts }, (_, at) =>
    question(next, `p${String(at).padStart(3, "0")}`, tokens, at),
  );
  const graded = Array.from({ length: items }, (_, at) => item(next, at));
  const all = [
    ["rtn", "RTN", "W4A8", 0.11],
    ["onptq", "OnPTQ", "W4A8", 0.03],
    ["awq", "AWQ", "W4A8-g128", 0.05],
    ["gptq", "GPTQ", "W3A8", 0.08],
  ].slice(0, candidates);
  const made = all.map(([name, title, scheme, rate], at) =>
    candidate(
      next,
      { name: `${name}:${scheme}`, title: `${title} ${scheme}`, scheme, rate, at, light },
      questions,
      graded,
    ),
  );
  return {
    title: "Qwen2.5-VL-7B-Instruct: what quantization changed",
    dense: "Qwen/Qwen2.5-VL-7B-Instruct",
    origin: `${prompts} prompts of mine.jsonl and ${items} graded items of the embedded tasks, greedy decoding in bfloat16.`,
    candidates: made,
    prompts: questions,
    items: graded,
    media,
    tokens: Object.fromEntries(WORDS.map((word, id) => [id, word])),
    measures: MEASURES,
    plots: [sizes(made), ...(made.length > 0 ? [percentiles(made)] : [])],
    notes: ["Intervals are at 95 %, from a bootstrap over prompts.", "The GPU was shared with another job."],
    dense_bytes: 16_600_000_000,
    version: "0.4.0",
    format: 1,
  };
}

const MEASURES = {
  average: { name: "average score", unit: "%", less_is_better: false },
  flips: { name: "flips", unit: "%", less_is_better: true, noise: "noise_graded", noise_at_most: true },
  changed: { name: "answers changed", unit: "%", less_is_better: true },
  mismatch: { name: "mismatch", unit: "%", less_is_better: true, noise: "noise" },
  noise: { name: "noise floor", unit: "%", less_is_better: null },
  clear: { name: "clear mismatch", unit: "%", less_is_better: true },
  kl: { name: "KL", unit: "", less_is_better: true },
  js: { name: "JS", unit: "", less_is_better: true },
  erosion: { name: "erosion", unit: "", less_is_better: true },
  first_fork: { name: "first fork", unit: "tokens", less_is_better: false },
  cwm: { name: "CWM", unit: "%", less_is_better: true },
  kl_p95: { name: "KL p95", unit: "", less_is_better: true },
  kl_p99: { name: "KL p99", unit: "", less_is_better: true },
};

for (const measure of Object.values(MEASURES)) {
  measure.noise ??= "";
  measure.noise_at_most ??= false;
}

const pick = (next, from) => from[Math.floor(next() * from.length)];
const answer = (text, more = {}) => ({ text, tokens: null, finished: null, right: null, score: null, ...more });
const textOf = (ids) => ids.map((id) => WORDS[id]).join("");
const figure = (value, spread) => ({ value, low: Math.max(0, value - spread), high: value + spread });
const rounded = (value, digits = 4) => Number(value.toFixed(digits));

function question(next, id, tokens, at) {
  const ids = Array.from({ length: tokens }, () => Math.floor(next() * WORDS.length));
  const heard = at % 8 === 6;
  const seen = !heard && at % 4 !== 3;
  const parts = [{ text: QUESTIONS[at % QUESTIONS.length], media: null }];
  if (heard) parts.unshift({ text: "", media: 1 });
  if (seen) parts.unshift({ text: "", media: at % 16 === 2 ? 3 : at % 2 === 0 ? 0 : 2 });
  const turns = [{ role: "user", parts }];
  if (at % 8 === 5) {
    turns.unshift(
      { role: "system", parts: [{ text: "You answer briefly.", media: null }] },
      { role: "user", parts: [{ text: "Good morning!", media: null }] },
      { role: "assistant", parts: [{ text: "Good morning. What can I do for you?", media: null }] },
    );
  }
  return {
    id,
    task: pick(next, ["mine", "captions"]),
    kinds: heard ? ["text", "audio"] : seen ? ["text", "image"] : ["text"],
    turns,
    dense: answer(textOf(ids), { tokens: ids, finished: next() < 0.9 }),
    reference: null,
  };
}

function item(next, at) {
  const task = TASKS[at % TASKS.length];
  const right = next() < 0.85;
  const text = right ? "yellow" : pick(next, ["red", "unanswerable"]);
  return {
    id: `${task}/${at}`,
    task,
    kinds: ["text", "image"],
    turns: [
      {
        role: "user",
        parts: [
          { text: "", media: at % 2 === 0 ? 0 : 2 },
          { text: QUESTIONS[at % QUESTIONS.length], media: null },
        ],
      },
    ],
    dense: answer(text, { right, score: right ? 1 : 0, finished: true }),
    reference: "yellow",
  };
}

function candidate(next, { name, title, scheme, rate, at, light }, questions, items) {
  const answers = items.map((one) => {
    const flip = next() < rate;
    const right = flip ? !one.dense.right : one.dense.right;
    return answer(flip ? pick(next, right ? ["yellow"] : ["unanswerable", "It is red."]) : one.dense.text, {
      right,
      score: right ? 1 : 0,
      finished: true,
    });
  });
  const responses = questions.map((one, index) => (index === 7 && at === 0 ? null : response(next, one, rate, light)));
  const there = responses.filter((one) => one !== null);
  const count = (change) => there.filter((one) => one.change === change).length;
  const flipped = flips(items, answers);
  return {
    name,
    title,
    how: `All 196 linears of the decoder in ${scheme}; init ${title.split(" ")[0]}, 3 rounds on 128 prompts. Towers and head stay in bfloat16.`,
    verdict: `Of ${there.length} answers ${there.length - count("same")} are worded differently, ${count("content")} differ in content; of ${items.length} graded answers ${flipped?.right_wrong.count ?? 0} turned wrong and ${flipped?.wrong_right.count ?? 0} turned right.`,
    figures: {
      average: figure(92 - 40 * rate, 1.6),
      flips: figure(100 * rate, 1.1),
      changed: figure(300 * rate, 2.2),
      mismatch: figure(80 * rate, 0.4),
      noise: figure(0.08, 0.03),
      noise_graded: figure(0.25, 0.2),
      clear: figure(31 * rate, 0.3),
      kl: figure(0.7 * rate, 0.0009),
      js: figure(0.2 * rate, 0.0002),
      erosion: figure(5 * rate, 0.02),
      first_fork: { value: 8 / (rate * 10), low: null, high: null },
      cwm: figure(6 * rate, 0.05),
      kl_p95: figure(2 * rate, 0.01),
      kl_p99: figure(9 * rate, 0.1),
      seconds: { value: 120, low: null, high: null },
      peak: { value: 31.5, low: null, high: null },
    },
    scheme,
    size_bytes: Math.round(5.6e9 + 1e8 * at),
    served: [
      {
        server: "vLLM 0.19",
        gpu: "H100, H200",
        computes: "4-bit weights, 8-bit activations in int8",
        command: "vllm serve qwen-w4a8 --linear-backend humming",
        note: "the option names the kernel",
      },
      { server: "transformers", gpu: "any", computes: "rounded weights in bfloat16", command: "", note: "simulation" },
    ],
    flips: flipped,
    answers,
    responses,
    plots: [risks(responses), forks(responses)],
    aside: false,
    selects: false,
  };
}

function flips(items, answers) {
  if (items.length === 0) return null;
  const cells = { right_right: [], right_wrong: [], wrong_right: [], wrong_wrong: [] };
  items.forEach((one, at) => {
    cells[`${one.dense.right ? "right" : "wrong"}_${answers[at].right ? "right" : "wrong"}`].push(at);
  });
  const cell = (list) => ({
    count: list.length,
    percent: figure((100 * list.length) / items.length, 3.1),
    items: list,
  });
  return Object.fromEntries(Object.entries(cells).map(([name, list]) => [name, cell(list)]));
}

function response(next, asked, rate, light) {
  const dense = asked.dense.tokens;
  const ids = [];
  let fork = null;
  const columns = {
    reference: [],
    competitor: [],
    quantized: [],
    margin_dense: [],
    margin_quant: [],
    erosion: [],
    js: [],
    kl: [],
    kind: [],
    consequence: [],
    risk: [],
    weight: [],
    critical: [],
    top: [],
    futures: [],
    became: [],
  };
  for (let t = 0; t < dense.length; t++) {
    const reference = fork === null ? dense[t] : Math.floor(next() * WORDS.length);
    let competitor = Math.floor(next() * WORDS.length);
    if (competitor === reference) competitor = (competitor + 1) % WORDS.length;
    const margin = -Math.log(1 - next()) * 2.5;
    const mismatch = next() < rate * 0.8;
    const near = !mismatch && next() < rate * 1.5;
    const erosion = mismatch ? margin + next() * 0.6 : near ? margin * 0.8 : (next() - 0.45) * 0.3;
    const js = mismatch ? 0.05 + next() * 0.2 : near ? 0.02 + next() * 0.05 : next() * 0.004;
    const candidate = mismatch || near;
    const consequence = candidate && next() < 0.8 ? next() * 0.5 : null;
    const risk = candidate ? erosion * (1 + (consequence ?? 0)) + js : 0;
    const kind = mismatch ? 2 : near ? 1 : 0;
    const quantized = mismatch ? competitor : reference;
    if (mismatch && fork === null) fork = t;
    ids.push(quantized);
    columns.reference.push(reference);
    columns.competitor.push(competitor);
    columns.quantized.push(quantized);
    columns.margin_dense.push(rounded(margin));
    columns.margin_quant.push(rounded(margin - erosion));
    columns.erosion.push(rounded(erosion));
    columns.js.push(rounded(js, 5));
    columns.kl.push(rounded(js * 3.1, 5));
    columns.kind.push(kind);
    columns.consequence.push(consequence === null ? null : rounded(consequence));
    columns.risk.push(rounded(risk));
    columns.weight.push(candidate && risk > 0.5 ? rounded(risk / 40, 5) : 0);
    columns.critical.push(candidate && risk > 0.5);
    columns.top.push(light && !candidate ? null : topOf(next, reference, competitor, margin, margin - erosion));
    columns.futures.push(consequence === null ? null : futuresOf(next, reference, competitor, consequence));
    columns.became.push(candidate ? [pick(next, [0, 0, 0, 1, null]), pick(next, [0, 0, 2])] : [0, 0]);
  }
  const change = fork === null ? "same" : pick(next, ["reworded", "reworded", "clear", "clear", "content"]);
  return { answer: answer(textOf(ids), { tokens: ids, finished: next() < 0.9 }), change, fork, states: columns };
}

function topOf(next, reference, competitor, dense, quantized) {
  const others = [];
  while (others.length < 9) {
    const id = Math.floor(next() * WORDS.length);
    if (id !== reference && id !== competitor && !others.includes(id)) others.push(id);
  }
  const logits = others.map((_, at) => -4 - at * 0.4);
  const chances = (margin, ids) => {
    const all = [margin / 2, -margin / 2, ...logits.slice(0, 8)];
    const whole = all.reduce((sum, one) => sum + Math.exp(one), 0) * 1.05;
    return ids.map((id, at) => [id, rounded(Math.exp(all[at]) / whole, 5)]).sort((a, b) => b[1] - a[1]);
  };
  return {
    dense: chances(dense, [reference, competitor, ...others.slice(0, 8)]),
    quantized: chances(quantized, [reference, competitor, ...others.slice(1, 9)]),
  };
}

function futuresOf(next, reference, competitor, consequence) {
  const steps = 8;
  const path = (first) => [first, ...Array.from({ length: steps - 1 }, () => Math.floor(next() * WORDS.length))];
  const apart = Array.from({ length: steps }, (_, at) =>
    rounded(consequence * (0.4 + 1.2 * next()) * Math.exp(-at / 6)),
  );
  return { reference: path(reference), competitor: path(competitor), apart, continued_by: next() < 0.8 ? "D" : "Q" };
}

// Plots

function sizes(candidates) {
  const values = candidates.map((one) => ({
    candidate: one.title,
    GB: one.size_bytes / 1e9,
    KL: one.figures.kl.value,
  }));
  return {
    id: "size-damage",
    title: "Size against damage",
    caption: "Size of each candidate in GB against its mean KL; lower left is better.",
    spec: {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json",
      width: 400,
      height: 240,
      data: { values },
      encoding: {
        x: { field: "GB", type: "quantitative", scale: { zero: false, padding: 20 } },
        y: { field: "KL", type: "quantitative", scale: { type: "log", padding: 12 } },
      },
      layer: [
        {
          mark: { type: "point", filled: true, size: 90 },
          encoding: {
            color: { field: "candidate", type: "nominal", legend: null },
            tooltip: [{ field: "candidate" }, { field: "GB" }, { field: "KL" }],
          },
        },
        { mark: { type: "text", dx: 9, align: "left" }, encoding: { text: { field: "candidate" } } },
      ],
    },
  };
}

function percentiles(candidates) {
  const values = candidates.flatMap((one) =>
    [50, 90, 95, 99].map((share, at) => ({
      candidate: one.title,
      share: `p${share}`,
      KL: one.figures.kl.value * 4 ** at * 0.3,
    })),
  );
  return {
    id: "kl-percentiles",
    title: "KL percentiles",
    caption: "How large the KL of a state is at the median, and in the worst tenth, twentieth and hundredth.",
    spec: {
      data: { values },
      height: 220,
      mark: { type: "line", point: true },
      encoding: {
        x: { field: "share", type: "ordinal", title: "percentile" },
        y: { field: "KL", type: "quantitative", scale: { type: "log" } },
        color: { field: "candidate", type: "nominal" },
        tooltip: [{ field: "candidate" }, { field: "share" }, { field: "KL" }],
      },
    },
  };
}

function risks(responses) {
  const all = responses.flatMap((one) => one?.states.risk ?? []).sort((a, b) => b - a);
  const whole = all.reduce((sum, one) => sum + one, 0) || 1;
  let sum = 0;
  const values = all.slice(0, 400).map((risk, at) => {
    sum += risk;
    return { states: (100 * (at + 1)) / all.length, share: (100 * sum) / whole };
  });
  return {
    id: "risk",
    title: "Where the risk sits",
    caption: "The share of all risk that the riskiest states hold.",
    spec: {
      data: { values },
      height: 220,
      mark: { type: "area", line: true, opacity: 0.25 },
      encoding: {
        x: { field: "states", type: "quantitative", title: "riskiest states, %" },
        y: { field: "share", type: "quantitative", title: "share of risk, %" },
      },
    },
  };
}

function forks(responses) {
  const values = responses.flatMap((one) => (one?.fork == null ? [] : [{ fork: one.fork + 1 }]));
  return {
    id: "forks",
    title: "First forks",
    caption: "At which token the answers part for the first time.",
    spec: {
      data: { values },
      height: 220,
      mark: "bar",
      encoding: {
        x: { field: "fork", bin: { maxbins: 20 }, title: "token" },
        y: { aggregate: "count", title: "answers" },
      },
    },
  };
}

// Media

function picture(name, next) {
  const [width, height] = [320, 200];
  const rows = Buffer.alloc(height * (1 + 3 * width));
  const shapes = Array.from({ length: 5 }, () => [
    next() * width,
    next() * height,
    15 + next() * 35,
    next() * 255,
    next() * 255,
    next() * 200,
  ]);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const shape = shapes.find(([cx, cy, size]) => (x - cx) ** 2 + (y - cy) ** 2 < size ** 2);
      const [red, green, blue] = shape ? shape.slice(3) : [215 + (x >> 4), 225, 232 - (y >> 4)];
      rows.set([red, green, blue], y * (1 + 3 * width) + 1 + 3 * x);
    }
  }
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, 2, 0, 0, 0], 8);
  const parts = [chunk("IHDR", header), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))];
  const bytes = Buffer.concat([Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]), ...parts]);
  return {
    kind: "image",
    name,
    src: `data:image/png;base64,${bytes.toString("base64")}`,
    note: "reduced from 1280 x 800",
  };
}

function chunk(kind, body) {
  const named = Buffer.concat([Buffer.from(kind, "ascii"), body]);
  let sum = 0xffffffff;
  for (const byte of named) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = sum & 1 ? (sum >>> 1) ^ 0xedb88320 : sum >>> 1;
  }
  const ends = Buffer.alloc(8);
  ends.writeUInt32BE(body.length, 0);
  ends.writeUInt32BE((sum ^ 0xffffffff) >>> 0, 4);
  return Buffer.concat([ends.subarray(0, 4), named, ends.subarray(4)]);
}

function sound(name) {
  const rate = 8000;
  const samples = rate / 2;
  const bytes = Buffer.alloc(44 + 2 * samples);
  bytes.write("RIFF", 0);
  bytes.writeUInt32LE(36 + 2 * samples, 4);
  bytes.write("WAVEfmt ", 8);
  bytes.writeUInt32LE(16, 16);
  bytes.writeUInt16LE(1, 20);
  bytes.writeUInt16LE(1, 22);
  bytes.writeUInt32LE(rate, 24);
  bytes.writeUInt32LE(2 * rate, 28);
  bytes.writeUInt16LE(2, 32);
  bytes.writeUInt16LE(16, 34);
  bytes.write("data", 36);
  bytes.writeUInt32LE(2 * samples, 40);
  for (let at = 0; at < samples; at++)
    bytes.writeInt16LE(Math.round(8000 * Math.sin((at * 440 * 2 * Math.PI) / rate)), 44 + 2 * at);
  return {
    kind: "audio",
    name,
    src: `data:audio/wav;base64,${bytes.toString("base64")}`,
    note: "the first half second",
  };
}

function drawing(name) {
  const svg =
    '<svg xmlns="http://www.w3.org/2000/svg" width="240" height="160"><rect width="240" height="160" fill="#e8eef2"/>' +
    '<polygon points="120,20 200,140 40,140" fill="#c33"/><text x="120" y="118" font-size="34" text-anchor="middle" fill="#fff">STOP</text></svg>';
  return { kind: "image", name, src: `data:image/svg+xml;base64,${Buffer.from(svg).toString("base64")}`, note: "" };
}

function leftOut() {
  return { kind: "image", name: "panorama.tiff", src: null, note: "left out: larger than 2 MB" };
}
