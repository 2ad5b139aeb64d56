/** Pictures of a page for the documentation: `npm run screenshots -- FILE` writes them into docs/assets. */

import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, show } from "./tests/browser.mjs";

const ASSETS = join(dirname(fileURLToPath(import.meta.url)), "..", "docs", "assets");
const SHOTS = {
  "page-verdict": { width: 1280, height: 820 },
  "page-explorer": { width: 1280, height: 900, part: ".explorer" },
  "page-dark": { width: 1280, height: 900, part: ".explorer", dark: true },
  "page-narrow": { width: 400, height: 800 },
};

const file = process.argv[2];
if (!file) throw new Error("which page? npm run screenshots -- FILE");
const browser = await launch();
for (const [name, { part, ...options }] of Object.entries(SHOTS)) {
  const { tab, context } = await show(browser, resolve(file), { ...options, hash: process.argv[3] ?? "" });
  await tab.addStyleTag({ content: "html { scroll-behavior: auto }" });
  if (part) await tab.evaluate((selector) => document.querySelector(selector).scrollIntoView(), part);
  await tab.waitForTimeout(500);
  await tab.screenshot({ path: join(ASSETS, `${name}.png`) });
  await context.close();
}
await browser.close();
