/** What axe-core finds on the page: nothing. */

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { launch, show } from "./browser.mjs";
import { page, write } from "./fixture.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const folder = mkdtempSync(join(tmpdir(), "onptq-axe-"));
const file = write(page({ prompts: 12, items: 20 }), join(folder, "page.html"));
let browser;

before(async () => {
  browser = await launch();
});
after(async () => {
  await browser.close();
  rmSync(folder, { recursive: true });
});

const STATES = {
  "the page": async () => {},
  "a token with futures": async (tab) => {
    for (let step = 0; step < 30 && (await tab.locator(".futures").count()) === 0; step++)
      await tab.keyboard.press("n");
  },
  "a graded item": async (tab) => {
    await tab.locator(".cell.right_right").click();
    await tab.locator(".others summary").click();
  },
  help: (tab) => tab.keyboard.press("?"),
};

for (const dark of [false, true]) {
  for (const width of [400, 1440]) {
    for (const [name, act] of Object.entries(STATES)) {
      if (dark && width === 400 && name !== "the page") continue; // colours depend on the theme, order and size on the width
      test(`${name}, ${dark ? "dark" : "light"}, ${width} pixels wide`, async () => {
        const { tab, context } = await show(browser, file, { dark, width, plots: true });
        await act(tab);
        await tab.waitForTimeout(100);
        await tab.evaluate(AXE);
        const { violations } = await tab.evaluate(() => window.axe.run());
        const found = violations.map(
          ({ id, nodes }) =>
            `${id}: ${nodes
              .map((node) => `${node.html} ${node.failureSummary}`)
              .slice(0, 3)
              .join("\n")}`,
        );
        await context.close();
        assert.deepEqual(found, []);
      });
    }
  }
}
