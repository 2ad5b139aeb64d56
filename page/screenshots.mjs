/** Pictures of a page for the documentation: `npm run screenshots -- FILE [HASH]` writes them into docs/assets. */

import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, show } from "./tests/browser.mjs";

const ASSETS = join(dirname(fileURLToPath(import.meta.url)), "..", "docs", "assets");
const SHOTS = {
  "page-verdict": { width: 1280, height: 820, plots: true },
  "page-explorer": { width: 1280, height: 1060, part: ".explorer" },
  "page-plots": { width: 1280, height: 388, row: "Where the risk is" },
  "page-dark": { width: 1280, height: 1060, part: ".explorer", dark: true },
  "page-narrow": { width: 400, height: 800 },
};

const [file, hash = "", only] = process.argv.slice(2);
if (!file) throw new Error("which page? npm run screenshots -- FILE [HASH] [NAME]");
const browser = await launch();
for (const [name, { part, row, ...options }] of Object.entries(SHOTS)) {
  if (only && only !== name) continue;
  const { tab, context } = await show(browser, resolve(file), { ...options, hash });
  await tab.addStyleTag({ content: "html { scroll-behavior: auto !important }" });
  const place = row ? tab.locator(".plots figure", { hasText: row }).first() : part && tab.locator(part);
  for (let time = 0; place && time < 3; time++) {
    await place.evaluate((one) => {
      scrollBy(0, one.getBoundingClientRect().top - document.querySelector(".topbar").offsetHeight - 8);
    });
    await tab.waitForTimeout(1000); // plots are drawn when they come into sight, and may move what follows
  }
  await tab.waitForTimeout(500);
  await tab.evaluate(() => document.activeElement?.blur());
  await tab.screenshot({ path: join(ASSETS, `${name}.png`) });
  await context.close();
}
await browser.close();
