/** Builds the page's one asset, src/onptq/page/page.html. `node build.mjs FILE` writes it elsewhere. */

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build, transform } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
export const ASSET = join(HERE, "..", "src", "onptq", "page", "page.html");
const LIMIT = 1_500_000;

/** The asset as text. The same sources give the same bytes. */
export async function asset() {
  const bundle = await build({
    absWorkingDir: HERE,
    entryPoints: ["src/main.tsx"],
    bundle: true,
    minify: true,
    write: false,
    metafile: true,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    legalComments: "none", // all licences are in the file, in full
    define: { "process.env.NODE_ENV": '"production"' },
  });
  const script = bundle.outputFiles[0].text.trim().replaceAll("<!--", "<\\!--").replaceAll("<script", "<\\script");
  const style = await transform(styles(), { loader: "css", minify: true });
  const hash = createHash("sha256").update(script).digest("base64");
  const policy = [
    "default-src 'none'",
    "img-src data:",
    "media-src data:",
    "style-src 'unsafe-inline'",
    `script-src 'sha256-${hash}'`,
    "base-uri 'none'",
    "form-action 'none'",
  ].join("; ");
  const filled = { POLICY: policy, STYLE: style.code.trim(), LICENCES: licences(bundle.metafile), SCRIPT: script };
  let page = readFileSync(join(HERE, "index.html"), "utf8");
  for (const [marker, text] of Object.entries(filled)) page = page.replace(`@@${marker}@@`, () => text);
  check(page);
  return page;
}

/** The style sheet, its dark colours a second time for systems that are dark. */
function styles() {
  const style = readFileSync(join(HERE, "src", "style.css"), "utf8");
  const dark = /:root\[data-theme="dark"\] (\{[^}]*\})/.exec(style)[1];
  return style.replace(
    "/* dark again */",
    `@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) ${dark} }`,
  );
}

/** The licences of all packages in the bundle, each text once, with the packages that have it. */
function licences(metafile) {
  const packages = new Set();
  for (const path of Object.keys(metafile.inputs)) {
    const found = /^(?:.*\/)?node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path);
    if (found) packages.add(found[1]);
  }
  const texts = new Map();
  for (const name of [...packages].sort()) {
    const folder = join(HERE, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const text = licenceText(folder) ?? `Licence: ${license}`;
    texts.set(text, [...(texts.get(text) ?? []), `${name} ${version}`]);
  }
  return [...texts].map(([text, names]) => `${names.join(", ")}\n\n${text}`).join("\n\n----\n\n");
}

function licenceText(folder) {
  for (const name of ["LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "license"]) {
    try {
      return readFileSync(join(folder, name), "utf8").replaceAll("\r\n", "\n").replaceAll("<", "(").trim();
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
  }
  return null;
}

function check(page) {
  for (const marker of ["@@PAGE-DATA@@", "@@PAGE-TITLE@@"]) {
    const times = page.split(marker).length - 1;
    if (times !== 1) throw new Error(`${marker} occurs ${times} times in the asset, expected once`);
  }
  const size = Buffer.byteLength(page);
  if (size > LIMIT) throw new Error(`the asset has ${size} bytes, at most ${LIMIT} are allowed`);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const file = process.argv[2] ?? ASSET;
  const page = await asset();
  writeFileSync(file, page);
  console.log(`${file}: ${Buffer.byteLength(page)} bytes`);
}
