/** Vega-Lite in the page's own colours, without code made from text and without the network. */

import { type Config, Error as ERRORS, logger, parse, type Spec, View } from "vega";
import { expressionInterpreter } from "vega-interpreter";
import { compile, type Config as LiteConfig, type TopLevelSpec } from "vega-lite";
import { visible } from "./text";

/** Draws the specification into the element, with one candidate marked; the returned function erases it. */
export function draw(element: HTMLElement, spec: Record<string, unknown>, chosen: string): () => void {
  const params = (spec.params as { name: string }[] | undefined)?.map((one) =>
    one.name === "chosen" ? { ...one, value: chosen } : one,
  );
  const lite = {
    ...spec,
    ...(params && { params }),
    ...(single(spec) ? { width: "container" } : {}),
  } as unknown as TopLevelSpec;
  const config = colours(element);
  const { spec: full } = compile(lite, { config, logger: logger(ERRORS) });
  const tip = document.createElement("div");
  tip.className = "plot-tip";
  const view = new View(parse(full as Spec, config as Config, { ast: true }), {
    expr: expressionInterpreter,
    loader: OFFLINE as never,
    logger: logger(ERRORS),
    renderer: "svg",
    container: element,
    hover: true,
    tooltip: (_handler: unknown, event: MouseEvent, _item: unknown, value: unknown) => tell(tip, event, value),
  } as never);
  document.body.append(tip);
  view.runAsync().catch((error: unknown) => {
    element.textContent = `This plot cannot be drawn: ${String(error)}`;
  });
  return () => {
    view.finalize();
    tip.remove();
    element.textContent = "";
  };
}

function single(spec: Record<string, unknown>): boolean {
  const composed = ["facet", "hconcat", "vconcat", "concat", "repeat", "spec"].some((key) => key in spec);
  const encoding = spec.encoding as Record<string, unknown> | undefined;
  const faceted = encoding !== undefined && ["row", "column", "facet"].some((key) => key in encoding);
  const stepped = typeof spec.width === "object" && spec.width !== null;
  return !composed && !faceted && !stepped;
}

const refuse = () => Promise.reject(new Error("a page loads nothing"));
const OFFLINE = { load: refuse, sanitize: refuse, http: refuse, file: refuse };

/** The value of a mark beside the pointer, as text. */
function tell(tip: HTMLElement, event: MouseEvent, value: unknown): void {
  if (value === null || value === undefined || value === "") {
    tip.style.display = "none";
    return;
  }
  const pairs = typeof value === "object" ? Object.entries(value) : [["", value]];
  tip.replaceChildren(
    ...pairs.map(([name, one]) => {
      const line = document.createElement("div");
      line.textContent = visible(name === "" ? String(one) : `${name}: ${String(one)}`);
      return line;
    }),
  );
  tip.style.display = "block";
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px`;
}

function colours(element: HTMLElement): LiteConfig {
  const style = getComputedStyle(element);
  const of = (name: string) => style.getPropertyValue(name).trim();
  const text = { labelColor: of("--muted"), titleColor: of("--text"), labelFontSize: 11, titleFontSize: 12 };
  const font = style.fontFamily;
  return {
    background: "transparent",
    font,
    aria: false,
    padding: 4,
    view: { stroke: "transparent" },
    title: { color: of("--text"), fontSize: 13 },
    axis: {
      ...text,
      titleFontWeight: 500,
      gridColor: of("--line-soft"),
      domainColor: of("--line"),
      tickColor: of("--line"),
    },
    axisQuantitative: { tickCount: 6 },
    legend: { ...text, orient: "top", titleFontWeight: 500 },
    header: text,
    mark: { color: of("--series-1") },
    text: { color: of("--text") },
    rule: { color: of("--muted") },
    range: {
      category: [1, 2, 3, 4, 5, 6, 7, 8].map((at) => of(`--series-${at}`)),
      ramp: { scheme: "oranges" },
      heatmap: { scheme: "oranges" },
    },
  };
}
