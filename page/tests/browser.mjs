/** Debian's Chromium, with what has to be off for it to ask the network for nothing. */

import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const FOUND = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

export function launch() {
  return chromium.launch({
    executablePath: FOUND.find((path) => path && existsSync(path)),
    headless: true,
    args: [
      "--no-sandbox",
      "--disable-gpu",
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
    ],
  });
}

/** A tab with the file open; what it asked for, said and failed at is in `requests`, `messages` and `errors`. */
export async function show(browser, file, { width = 1280, height = 900, dark = false, hash = "", plots = false } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: dark ? "dark" : "light" });
  const tab = await context.newPage();
  const seen = { requests: [], messages: [], errors: [] };
  context.on("request", (request) => seen.requests.push(request.url()));
  tab.on("console", (message) => seen.messages.push(`${message.type()}: ${message.text()}`));
  tab.on("pageerror", (error) => seen.errors.push(String(error)));
  tab.on("dialog", (dialog) => {
    seen.errors.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  await tab.goto(`file://${file}${hash}`);
  await tab.waitForSelector("main");
  if (plots) await tab.waitForSelector(".drawing svg");
  return { tab, context, ...seen };
}
