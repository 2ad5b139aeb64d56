/** Whatever a prompt, an answer or a name says, it is text; and nothing leaves the page. */

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { launch, show } from "./browser.mjs";
import { page, write } from "./fixture.mjs";

const SCRIPT = "<script>window.ran = 1</script>";
const IMAGE = '<img src=x onerror="window.ran = 2">';
const BREAK = `</script><script>window.ran = 3</script>`;
const ESCAPE = "\u001b[31mred\u001b[0m\u0007\u202e\u061c\u{e0041}evil\u0000";
const ALL = `${SCRIPT}${IMAGE}${BREAK}${ESCAPE}`;
const SHOWN = `${SCRIPT}${IMAGE}${BREAK}␛[31mred␛[0m␇⟨202E⟩⟨061C⟩⟨E0041⟩evil␀`;

const folder = mkdtempSync(join(tmpdir(), "onptq-safe-"));
let browser;

before(async () => {
  browser = await launch();
});
after(async () => {
  await browser.close();
  rmSync(folder, { recursive: true });
});

function hostile() {
  const made = page({ prompts: 3, items: 4, candidates: 2, tokens: 12 });
  made.title = ALL;
  made.dense = ALL;
  made.origin = ALL;
  made.notes = [ALL];
  made.media[0].name = ALL;
  made.media[2] = { kind: "image", name: ALL, src: `javascript:${ALL}`, note: ALL };
  made.plots[0].title = ALL;
  made.plots[0].caption = ALL;
  made.plots[0].spec.data.values[0].candidate = ALL;
  made.plots[0].spec.layer[0].encoding.href = { value: "javascript:window.ran = 4" };
  made.plots[0].spec.layer[0].encoding.tooltip = { value: ALL };
  for (const id of Object.keys(made.tokens)) made.tokens[id] = ALL;
  for (const one of Object.values(made.measures)) one.name = ALL;
  for (const one of [...made.prompts, ...made.items]) {
    one.id = `${one.id} ${ALL}`;
    one.task = ALL;
    one.turns[0].role = ALL;
    one.turns[0].parts[0].text = ALL;
    one.dense.text = ALL;
    one.reference = ALL;
  }
  for (const one of made.candidates) {
    one.name = `${one.name} ${ALL}`;
    one.title = `${one.title} ${ALL}`;
    one.how = ALL;
    one.verdict = ALL;
    one.scheme = ALL;
    one.served[0] = { server: ALL, gpu: ALL, computes: ALL, command: ALL };
    for (const answer of one.answers) if (!answer.right) answer.text = `no ${ALL}`;
  }
  return made;
}

test("injected markup and terminal escapes show as text and run nothing", async () => {
  const path = write(hostile(), join(folder, "<img src=x onerror=alert(1)>.html"));
  const shown = await show(browser, encodeURI(path), { width: 1440, height: 900, plots: true });
  const { tab } = shown;
  for (const place of [
    ".topbar h1",
    ".verdict h2",
    ".how",
    ".sentence",
    ".facts",
    ".served",
    ".row .line",
    ".detail h3",
    ".says",
    ".bars",
    ".answer.dense",
    "footer",
    ".comparison tbody",
    ".comparison thead",
    ".figures",
    ".plot figcaption",
  ]) {
    assert.ok(
      (await tab.locator(place).first().innerText())
        .replaceAll("\n", "")
        .includes(place === ".bars" ? SHOWN.replaceAll(" ", "·") : SHOWN),
      place,
    );
  }
  assert.ok((await tab.locator(".tokens .token").first().innerText()).includes("␛[31mred"), "token");
  assert.equal(await tab.title(), SHOWN);
  await tab.getByRole("button", { name: /^All \d+$/ }).click();
  for (let step = 0; step < 7; step++) await tab.keyboard.press("j");
  await tab.keyboard.press("]");
  await tab.locator(".plots").scrollIntoViewIfNeeded();
  const mark = await tab.locator(".overview .drawing svg path[transform]").first().boundingBox();
  if (mark) await tab.mouse.click(mark.x + mark.width / 2, mark.y + mark.height / 2);
  await tab.waitForTimeout(300);
  assert.equal(await tab.evaluate(() => window.ran), undefined);
  assert.equal(await tab.locator("img[src=x], main script, footer script").count(), 0);
  assert.deepEqual(shown.errors, []);
  assert.deepEqual(
    shown.requests.filter((url) => !/^(file|data):/.test(url)),
    [],
  );
  await shown.context.close();
});

test("a plot that wants data from elsewhere gets none", async () => {
  const made = page({ prompts: 2, items: 0, candidates: 1 });
  made.plots[0].spec.data = { url: "https://example.org/data.json" };
  const shown = await show(browser, write(made, join(folder, "fetching.html")));
  await shown.tab.waitForTimeout(500);
  assert.deepEqual(
    shown.requests.filter((url) => !/^(file|data):/.test(url)),
    [],
  );
  assert.deepEqual(shown.errors, []);
  await shown.context.close();
});

test("the policy stops scripts, requests and code from text", async () => {
  const shown = await show(browser, write(page({ prompts: 2, items: 0 }), join(folder, "policy.html")));
  const outcome = await shown.tab.evaluate(async () => {
    const script = document.createElement("script");
    script.textContent = "window.ran = 1";
    document.body.append(script);
    const frame = document.createElement("img");
    frame.src = "https://example.org/pixel.png";
    document.body.append(frame);
    const fetched = await fetch("https://example.org/").then(
      () => "fetched",
      () => "refused",
    );
    return { ran: window.ran, fetched };
  });
  assert.deepEqual(outcome, { ran: undefined, fetched: "refused" });
  assert.ok(shown.messages.length >= 2);
  await shown.context.close();
});

test("a whole visit asks for the file alone", async () => {
  const path = write(page(), join(folder, "visit.html"));
  const shown = await show(browser, path, { plots: true });
  const { tab } = shown;
  for (const key of ["j", "j", "n", "n", "ArrowRight", "]", "t", "f", "?", "Escape"]) await tab.keyboard.press(key);
  await tab.locator(".plots").scrollIntoViewIfNeeded();
  await tab.locator(".plots .drawing svg").first().waitFor();
  const outside = shown.requests.filter((url) => !url.startsWith("data:"));
  assert.deepEqual([...new Set(outside)], [`file://${path}`]);
  await shown.context.close();
});
