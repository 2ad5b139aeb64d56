/** Opens the data and shows the page. */

import { render } from "preact";
import { App } from "./app";
import { open } from "./open";
import { visible } from "./text";

const root = document.getElementById("page") as HTMLElement;

open(document.getElementById("page-data"))
  .then((page) => {
    root.textContent = "";
    document.title = visible(page.title);
    render(<App page={page} />, root);
  })
  .catch((error: unknown) => {
    root.textContent = "";
    render(
      <main class="failed">
        <h1>This page cannot be shown</h1>
        <p>{error instanceof Error ? error.message : String(error)}</p>
      </main>,
      root,
    );
  });
