/** The page's data, out of the file itself: base64, gzip, JSON. */

import { FORMAT, type Page } from "./contract";

/** The page that the element holds; an error in plain words where it holds none. */
export async function open(element: Element | null): Promise<Page> {
  const packed = element?.textContent?.trim() ?? "";
  if (packed === "" || packed.startsWith("@@")) {
    throw new Error("This file holds no data. `onptq report` and `onptq diff` write pages that do.");
  }
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot open the page. Firefox 113, Chrome 80, Safari 16.4 and later can.");
  }
  const page = JSON.parse(await unzip(packed)) as Page;
  if (page.format !== FORMAT) {
    throw new Error(`The data have format ${page.format}, this page reads format ${FORMAT}.`);
  }
  return page;
}

async function unzip(packed: string): Promise<string> {
  const binary = atob(packed);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
