/** The built asset: fresh, small, with its markers and licences, and closed to the network. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { ASSET, asset } from "../build.mjs";

const committed = readFileSync(ASSET, "utf8");

test("the committed asset is what the sources build", async () => {
  const fresh = await asset();
  assert.ok(fresh === committed, "src/onptq/page/page.html is not what `npm run build` writes");
  assert.ok(fresh === (await asset()), "two builds differ");
});

test("the asset is below 1.5 MB", () => {
  assert.ok(Buffer.byteLength(committed) < 1_500_000);
});

test("data and title have one marker each, where they belong", () => {
  assert.deepEqual(committed.match(/@@[A-Z-]+@@/g), ["@@PAGE-TITLE@@", "@@PAGE-DATA@@"]);
  assert.match(committed, /<title>@@PAGE-TITLE@@<\/title>/);
  assert.match(committed, /<script id="page-data" type="application\/octet-stream">@@PAGE-DATA@@<\/script>/);
});

test("the policy allows the one script by its hash and nothing from elsewhere", () => {
  const policy = /Content-Security-Policy" content="([^"]*)"/.exec(committed)[1];
  assert.match(
    policy,
    /^default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'sha256-/,
  );
  assert.doesNotMatch(policy, /connect-src|unsafe-eval|https?:/);
  const script = /script-src ([^;]*)/.exec(policy)[1];
  assert.doesNotMatch(script, /unsafe-inline/);
});

test("the licences of what is inside are inside", () => {
  const licences = /<script id="licences" type="text\/plain">([\s\S]*?)<\/script>/.exec(committed)[1];
  for (const name of ["preact", "vega", "vega-lite", "vega-interpreter", "d3-scale"]) {
    assert.match(licences, new RegExp(`\\b${name} \\d`), `${name} is missing`);
  }
  assert.match(licences, /Redistributions in binary form must reproduce/);
});

test("the asset names no outside script, style, image or font", () => {
  const markup = committed.replace(/<script[\s\S]*?<\/script>/g, "");
  assert.doesNotMatch(markup, /(?:src|href)="(?!data:)/);
  assert.doesNotMatch(markup, /@import|url\(/);
});
