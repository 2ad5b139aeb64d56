/** The page in a browser, as a reader uses it. */

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { launch, show } from "./browser.mjs";
import { fill, page, write } from "./fixture.mjs";

const folder = mkdtempSync(join(tmpdir(), "onptq-page-"));
const data = page();
const file = write(data, join(folder, "page.html"));
let browser;

before(async () => {
  browser = await launch();
});
after(async () => {
  await browser.close();
  rmSync(folder, { recursive: true });
});

/** Opens a page for one test; afterwards nothing may have failed in it, and nothing been asked for outside it. */
async function read(path, options, use) {
  const shown = await show(browser, path, options);
  try {
    await use(shown.tab);
    await shown.tab.waitForTimeout(50);
    assert.deepEqual(shown.errors, []);
    assert.deepEqual(shown.messages, []);
    assert.deepEqual(
      shown.requests.filter((url) => !url.startsWith("file://") && !url.startsWith("data:")),
      [],
    );
  } finally {
    await shown.context.close();
  }
}

const rows = (tab) => tab.locator(".list .row");
const shownCount = async (tab) => Number(/^\d+/.exec(await tab.locator(".filters .count").innerText())[0]);
const chosenToken = (tab) => tab.locator(".tokens [aria-selected=true]").getAttribute("data-at").then(Number);
const hash = (tab) => tab.evaluate(() => location.hash);

describe("the first screen", () => {
  test("says what became of the answers, with figures, intervals and the noise floor", () =>
    read(file, { plots: true }, async (tab) => {
      const [first] = data.candidates;
      assert.equal(await tab.title(), data.title);
      const verdict = await tab.locator(".verdict").innerText();
      for (const said of [first.title, first.how, first.verdict, "5.6 GB", "16.6 GB"])
        assert.ok(verdict.includes(said), said);
      const mismatch = tab.locator(".figures tr", { hasText: "mismatch" }).first();
      assert.match(await mismatch.innerText(), /8\.8\s+\[8\.4, 9\.2\]\s+0\.08/);
      assert.match(await tab.locator(".served").innerText(), /vLLM 0\.19[\s\S]*vllm serve/);
      assert.equal(await tab.locator(".served .kernels ul").isVisible(), false);
      await tab.locator(".served .kernels summary").click();
      assert.match(await tab.locator(".served .kernels").innerText(), /vLLM 0\.19, H100, H200: the option names/);
      assert.match(await tab.locator(".overview .facts").innerText(), /Made in 120 s with 31\.5 GB of memory at most/);
      assert.equal(await tab.locator(".overview .drawing svg").count(), 1);
    }));

  test("the noise floor stands beside every rate, or that it was not measured", () =>
    read(file, {}, async (tab) => {
      const noise = async (name) => tab.locator(`.figures tr:has-text("${name}") .noise`).first().innerText();
      assert.equal(await noise("mismatch"), "0.08");
      assert.equal(await noise("flips"), "≤ 0.25");
      assert.equal(await noise("answers changed"), "not measured");
      assert.equal(await noise("KL"), "");
      assert.equal(await tab.locator(".figures tbody tr", { hasText: "noise floor" }).count(), 0);
      assert.match(await tab.locator(".flips .hint").innerText(), /Noise floor of flips: ≤ 0\.25 %/);
      assert.match(await tab.locator(".comparison tr.current").innerText(), /noise ≤ 0\.25[\s\S]*noise \?/);
    }));

  test("the cells of the flips are as high as their row", () =>
    read(file, { width: 900 }, async (tab) => {
      for (const row of await tab.locator(".flips tbody tr").all()) {
        const heights = await row.locator(".cell").evaluateAll((all) => all.map((one) => one.offsetHeight));
        assert.ok(Math.abs(heights[0] - heights[1]) <= 1, String(heights));
      }
    }));

  test("a link is copied, also where the browser has no clipboard for the page", () =>
    read(file, { width: 400 }, async (tab) => {
      await tab.evaluate(() => {
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => {
          window.copied = document.activeElement.value;
        });
      });
      await tab.getByRole("button", { name: "Copy link" }).click();
      await tab.locator(".said", { hasText: "Link copied." }).waitFor();
      assert.equal(await tab.evaluate(() => window.copied), await tab.evaluate(() => location.href));
    }));

  test("a cell of the flips leads to its examples", () =>
    read(file, {}, async (tab) => {
      const { right_wrong } = data.candidates[0].flips;
      const cell = tab.locator(".cell.right_wrong");
      assert.match(await cell.innerText(), new RegExp(`^${right_wrong.count}\\s`));
      await cell.click();
      assert.equal(await shownCount(tab), right_wrong.count);
      assert.equal(await rows(tab).locator(".badge.right_wrong").count(), right_wrong.count);
      assert.equal(await cell.getAttribute("aria-pressed"), "true");
      assert.equal(await tab.locator(".detail h3").innerText(), data.items[right_wrong.items[0]].id);
    }));

  test("plots are drawn once they come into sight", () =>
    read(file, { height: 700 }, async (tab) => {
      assert.equal(await tab.locator(".plots .drawing[data-drawn=true]").count(), 0);
      await tab.locator(".plots").scrollIntoViewIfNeeded();
      await tab.locator(".plots .drawing svg").nth(2).waitFor();
      assert.equal(
        await tab.locator(".plots .drawing svg").count(),
        data.plots.length - 1 + data.candidates[0].plots.length,
      );
    }));
});

describe("the explorer", () => {
  test("lists prompts first, the worst first", () =>
    read(file, {}, async (tab) => {
      assert.equal(await shownCount(tab), data.prompts.length);
      const facts = await rows(tab).locator(".facts").allInnerTexts();
      assert.ok(facts.every((line) => /^p\d+( · |$)/.test(line)));
      const badges = await rows(tab).locator(".badge").allInnerTexts();
      assert.equal(badges[0], "says something else");
      const order = ["says something else", "clear change", "reworded", "same", "no answer"].map((one) =>
        badges.indexOf(one),
      );
      const there = order.filter((at) => at >= 0);
      assert.deepEqual(
        there,
        [...there].sort((a, b) => a - b),
      );
    }));

  test("filters by set, task, input, change, grade and tokens", () =>
    read(file, {}, async (tab) => {
      await tab.getByRole("button", { name: /^All \d+$/ }).click();
      assert.equal(await shownCount(tab), data.prompts.length + data.items.length);
      const filters = {
        Task: ["read", data.items.filter((one) => one.task === "read").length],
        Input: ["audio", data.prompts.filter((one) => one.kinds.includes("audio")).length],
        Change: ["clear", data.candidates[0].responses.filter((one) => one?.change === "clear").length],
        Graded: ["wrong_wrong", data.candidates[0].flips.wrong_wrong.count],
        Tokens: ["near miss", data.candidates[0].responses.filter((one) => one?.states.kind.includes(1)).length],
      };
      for (const [name, [value, expected]] of Object.entries(filters)) {
        assert.ok(expected > 0, name);
        await tab.getByLabel(name, { exact: true }).selectOption(value);
        assert.equal(await shownCount(tab), expected, name);
        if (name === "Task") {
          const chosen = tab.getByLabel(name, { exact: true }).locator("option:checked");
          assert.equal(await chosen.innerText(), "Task: read");
        }
        await tab.getByRole("button", { name: "show all" }).click();
      }
    }));

  test("searches questions, answers and names", () =>
    read(file, {}, async (tab) => {
      await tab.getByRole("searchbox").fill("SPEAKER asks");
      assert.equal(await shownCount(tab), 0);
      assert.match(await tab.locator(".empty").innerText(), /No example fits/);
      await tab.getByRole("searchbox").fill("SPEAKER for");
      assert.equal(await shownCount(tab), data.prompts.filter((one) => one.kinds.includes("audio")).length);
      await tab.getByRole("searchbox").fill("panorama.tiff");
      assert.equal(await shownCount(tab), 2);
      assert.match(await tab.locator(".left-out").innerText(), /larger than 2 MB/);
    }));

  test("filters by risk", () =>
    read(file, {}, async (tab) => {
      const least = tab.getByLabel("Risk", { exact: true });
      const bound = Number(await least.locator("option").nth(2).getAttribute("value"));
      await least.selectOption({ index: 2 });
      const all = data.candidates[0].responses.map((one) => Math.max(-1, ...(one?.states?.risk ?? [])));
      assert.equal(await shownCount(tab), all.filter((risk) => risk >= bound).length);
      await tab.waitForFunction((risk) => location.hash.includes(`risk=${risk}`), bound);
    }));

  test("sorts by risk, by kind, by fork, by task and as given", () =>
    read(file, {}, async (tab) => {
      const order = tab.getByLabel("Order", { exact: true });
      await order.selectOption("risk");
      const risks = (await rows(tab).locator(".risk").allInnerTexts()).map((text) => Number(text.split(" ")[1]));
      assert.ok(risks.length > 5);
      assert.deepEqual(
        risks,
        [...risks].sort((a, b) => b - a),
      );
      await order.selectOption("fork");
      const forks = (await rows(tab).locator(".facts").allInnerTexts()).map((text) =>
        Number(/fork (\d+)/.exec(text)?.[1] ?? Infinity),
      );
      assert.deepEqual(
        forks,
        [...forks].sort((a, b) => a - b || 0),
      );
      await order.selectOption("kind");
      const mismatches = (await rows(tab).locator(".facts").allInnerTexts()).map((text) =>
        Number(/(\d+) mismatch/.exec(text)?.[1] ?? 0),
      );
      assert.ok(mismatches[0] > mismatches.at(-1));
      assert.deepEqual(
        mismatches,
        [...mismatches].sort((a, b) => b - a),
      );
      await order.selectOption("task");
      assert.match(await rows(tab).first().locator(".facts").innerText(), /captions/);
      await order.selectOption("id");
      assert.equal(await tab.locator(".detail h3").innerText(), "p000");
    }));

  test("shows both answers with the first fork marked in each", () =>
    read(file, { hash: "#example=prompt:p001" }, async (tab) => {
      const response = data.candidates[0].responses[1];
      const word = (id) => data.tokens[id].trim();
      assert.equal(
        (await tab.locator(".answer.dense mark").innerText()).trim(),
        word(data.prompts[1].dense.tokens[response.fork]),
      );
      const fork = tab.locator(".tokens .fork");
      assert.equal(await fork.count(), 1);
      assert.equal(Number(await fork.getAttribute("data-at")), response.fork);
      assert.equal(await chosenToken(tab), response.fork);
      assert.equal(
        await tab.locator(".tokens .mismatch").count(),
        response.states.kind.filter((kind) => kind === 2).length,
      );
      assert.equal(
        await tab.locator(".tokens .near-miss").count(),
        response.states.kind.filter((kind) => kind === 1).length,
      );
      const look = (kind) =>
        tab
          .locator(`.tokens .${kind}`)
          .first()
          .evaluate((one) => getComputedStyle(one).textDecorationStyle);
      assert.equal(await look("mismatch"), "solid");
      assert.equal(await look("near-miss"), "dotted");
    }));

  test("a chosen token shows both models' probabilities, its numbers, futures and later rounds", () =>
    read(file, { hash: "#example=prompt:p001" }, async (tab) => {
      const { states } = data.candidates[0].responses[1];
      const at = states.futures.findIndex((one) => one !== null);
      await tab.locator(`.tokens [data-at="${at}"]`).click();
      const top = states.top[at];
      const ids = new Set([...top.dense, ...top.quantized].map(([id]) => id));
      assert.equal(await tab.locator(".bars tbody tr").count(), ids.size);
      const best = await tab.locator(".bars td.best.d").innerText();
      assert.equal(best, (100 * top.dense[0][1]).toFixed(1));
      const numbers = await tab.locator(".numbers").innerText();
      for (const name of ["margin, dense", "margin, quantized", "erosion", "consequence", "risk", "JS", "KL"]) {
        assert.ok(numbers.includes(name), name);
      }
      assert.equal(await tab.locator(".futures li").count(), states.futures[at].reference.length);
      assert.match(await tab.locator(".futures").innerText(), /continued by the (dense|quantized) model/);
      assert.match(await tab.locator(".became").innerText(), /one round later[\s\S]*2 rounds later/);
    }));

  test("spaces, line breaks and nothing can be seen in tokens", () =>
    read(file, {}, async (tab) => {
      await tab.getByLabel("Order", { exact: true }).selectOption("id");
      const labels = await tab.locator(".tokens .token").evaluateAll((all) => all.map((one) => one.ariaLabel));
      assert.ok(labels.some((text) => text.includes("·")));
      assert.ok((await tab.locator(".token .sign").allInnerTexts()).some((text) => text.includes("↵")));
      assert.ok(labels.some((text) => text.includes(": ∅,")));
    }));

  test("an image is enlarged by a click and closed by Escape", () =>
    read(file, { hash: "#example=prompt:p000" }, async (tab) => {
      const size = await tab.locator(".picture img").evaluate((one) => [one.naturalWidth, one.naturalHeight]);
      assert.deepEqual(size, [320, 200]);
      await tab.locator(".picture").click();
      assert.equal(await tab.locator("dialog[open] img").count(), 1);
      await tab.keyboard.press("Escape");
      await tab.locator("dialog").waitFor({ state: "detached" });
    }));

  test("audio can be played", () =>
    read(file, { hash: "#example=prompt:p006" }, async (tab) => {
      const audio = tab.locator("audio");
      await tab.waitForFunction(() => document.querySelector("audio").readyState > 0);
      assert.equal(await audio.evaluate((one) => one.duration), 0.5);
      assert.equal(await audio.evaluate((one) => one.controls), true);
      assert.match(await tab.locator(".media figcaption").innerText(), /the first half second/);
    }));

  test("an example without an answer says so", () =>
    read(file, { hash: "#example=prompt:p007" }, async (tab) => {
      assert.equal(await tab.locator(".detail .badge").first().innerText(), "no answer");
    }));
});

describe("candidates", () => {
  test("choosing another one changes verdict, figures and answers, and keeps the example", () =>
    read(file, { hash: "#example=prompt:p002" }, async (tab) => {
      await tab.getByLabel("Candidate", { exact: true }).selectOption("onptq:W4A8");
      assert.equal(await tab.locator(".verdict h2").innerText(), "OnPTQ W4A8");
      assert.equal(await tab.locator(".detail h3").innerText(), "p002");
      const response = data.candidates[1].responses[2];
      assert.equal(
        await tab.locator(".tokens .mismatch").count(),
        response.states.kind.filter((kind) => kind === 2).length,
      );
    }));

  test("stand side by side, and one is chosen by its row", () =>
    read(file, {}, async (tab) => {
      assert.equal(await tab.locator(".comparison tbody tr").count(), 3);
      await tab.locator(".comparison").getByRole("button", { name: "AWQ" }).click();
      assert.equal(await tab.locator(".verdict h2").innerText(), "AWQ W4A8-g128");
      await tab.keyboard.press("[");
      assert.equal(await tab.locator(".verdict h2").innerText(), "OnPTQ W4A8");
    }));

  test("the others' answers to an example are a click away", () =>
    read(file, { hash: "#example=prompt:p003" }, async (tab) => {
      await tab.locator(".others summary").click();
      await tab.locator(".others dd").first().waitFor();
      const said = await tab.locator(".others dd").allInnerTexts();
      assert.equal(said.length, 2);
      const plain = (text) => text.replace(/\s+/g, " ").trim();
      assert.equal(plain(said[0]), plain(data.candidates[1].responses[3].answer.text));
    }));

  test("rounds of a calibration stand aside, with the states that they selected", async () => {
    const whole = page({ candidates: 2, prompts: 6, items: 5 });
    const [first, round] = whole.candidates;
    const asked = whole.prompts.map((one) => ({
      ...one,
      id: `${one.id} again`,
      dense: { ...one.dense, text: "", tokens: null },
    }));
    const none = asked.map(() => null);
    const candidates = [
      { ...first, responses: [...first.responses, ...none] },
      {
        ...round,
        name: "round 1",
        title: "round 1",
        aside: true,
        selects: true,
        flips: null,
        answers: [],
        responses: [...none, ...round.responses],
      },
    ];
    const shown = { ...whole, candidates, prompts: [...whole.prompts, ...asked] };
    await read(write(shown, join(folder, "rounds.html")), {}, async (tab) => {
      assert.equal(await tab.locator(".comparison").count(), 0);
      assert.equal(await shownCount(tab), 6);
      assert.equal(await tab.locator(".candidates optgroup option").innerText(), "round 1");
      await tab.getByLabel("Candidate", { exact: true }).selectOption("round 1");
      const answered = round.responses.filter((one) => one !== null).length;
      assert.equal(await shownCount(tab), answered);
      assert.match(await tab.locator(".answer.dense").innerText(), /has no answer of the dense model/);
      assert.match(await tab.locator(".inspector header").innerText(), /selected, weight 0\.\d|not selected/);
      assert.equal(await tab.locator(".others").count(), 0);
    });
  });

  test("an answer is shown whole where its states end at the first fork", async () => {
    const servers = page({ candidates: 1, prompts: 4, items: 0 });
    const [{ response, place }] = servers.candidates[0].responses
      .map((one, at) => ({ response: one, place: at }))
      .filter(({ response: one }) => one.fork !== null && one.fork < one.answer.tokens.length - 2);
    for (const name of Object.keys(response.states)) {
      response.states[name] = response.states[name].slice(0, response.fork + 1);
    }
    const hash = `#example=prompt:${servers.prompts[place].id}`;
    await read(write(servers, join(folder, "servers.html")), { hash }, async (tab) => {
      assert.equal(await tab.locator(".tokens .token").count(), response.fork + 1);
      const shown = await tab.locator(".tokens").evaluate((one) => one.textContent);
      assert.equal(shown.trim(), response.answer.text.trim());
      await tab.locator(".tokens").focus();
      for (const key of ["ArrowDown", "ArrowDown", "End"]) await tab.keyboard.press(key);
      assert.equal(await chosenToken(tab), response.fork);
    });
  });

  test("a page with one candidate and no states needs neither", async () => {
    const bare = page({ candidates: 1, prompts: 4, items: 0 });
    bare.candidates[0] = { ...bare.candidates[0], served: [], plots: [], size_bytes: null, scheme: null };
    for (const one of bare.candidates[0].responses) {
      one.states = null;
      one.answer.tokens = null;
    }
    bare.plots = [];
    await read(write(bare, join(folder, "bare.html")), {}, async (tab) => {
      assert.equal(await tab.locator(".comparison, .flips, .plots, .tokens, .served").count(), 0);
      assert.equal(await shownCount(tab), 4);
      assert.equal(await tab.locator(".answer.quantized .prose").count(), 1);
    });
  });
});

describe("the keyboard", () => {
  test("walks through examples and tokens", () =>
    read(file, {}, async (tab) => {
      const id = () => tab.locator(".detail h3").innerText();
      const first = await id();
      await tab.keyboard.press("j");
      assert.notEqual(await id(), first);
      await tab.keyboard.press("k");
      assert.equal(await id(), first);
      const start = await chosenToken(tab);
      await tab.keyboard.press("ArrowRight");
      assert.equal(await chosenToken(tab), start + 1);
      await tab.keyboard.press("ArrowLeft");
      assert.equal(await chosenToken(tab), start);
      await tab.keyboard.press("n");
      const marked = tab.locator(".tokens [aria-selected=true]");
      assert.match(await marked.getAttribute("class"), /mismatch|near-miss/);
      await tab.keyboard.press("r");
      const { states } = data.candidates[0].responses[data.prompts.findIndex((one) => one.id === first)];
      assert.equal(states.risk[await chosenToken(tab)], Math.max(...states.risk));
      await tab.keyboard.press("f");
      assert.equal(await chosenToken(tab), start);
    }));

  test("moves by lines in the answer, and by rows in the list", () =>
    read(file, {}, async (tab) => {
      await tab.locator(".tokens").focus();
      await tab.keyboard.press("Home");
      assert.equal(await chosenToken(tab), 0);
      const top = () => tab.locator(".tokens [aria-selected=true]").evaluate((one) => one.offsetTop);
      const before = await top();
      await tab.keyboard.press("ArrowDown");
      assert.ok((await top()) > before);
      await tab.locator(".list").focus();
      await tab.keyboard.press("End");
      const last = tab.locator(".list [aria-selected=true]");
      assert.equal(await last.getAttribute("aria-posinset"), String(data.prompts.length));
      assert.ok(await last.isVisible());
      assert.equal(await tab.locator(".list").getAttribute("aria-activedescendant"), await last.getAttribute("id"));
    }));

  test("opens search and help, and types into the search without side effects", () =>
    read(file, {}, async (tab) => {
      const first = await tab.locator(".detail h3").innerText();
      await tab.keyboard.press("/");
      await tab.keyboard.type("t?");
      assert.equal(await tab.getByRole("searchbox").inputValue(), "t?");
      assert.equal(await tab.locator("dialog").count(), 0);
      await tab.getByRole("searchbox").fill("");
      await tab.keyboard.press("Escape");
      await tab.keyboard.press("?");
      assert.match(await tab.locator("dialog[open]").innerText(), /next, previous example[\s\S]*near miss/);
      await tab.keyboard.press("j");
      await tab.keyboard.press("Escape");
      await tab.locator("dialog").waitFor({ state: "detached" });
      assert.equal(await tab.locator(".detail h3").innerText(), first);
    }));

  test("a word explains itself when it has the focus", () =>
    read(file, {}, async (tab) => {
      await tab.locator(".numbers [data-term=erosion]").focus();
      assert.match(await tab.locator(".tooltip").innerText(), /margin/);
      await tab.keyboard.press("Escape");
      assert.equal(await tab.locator(".tooltip").count(), 0);
    }));
});

describe("links", () => {
  test("lead back to candidate, example, token, filters and order", async () => {
    let link = "";
    await read(file, {}, async (tab) => {
      await tab.getByLabel("Candidate", { exact: true }).selectOption("awq:W4A8-g128");
      await tab.getByLabel("Order", { exact: true }).selectOption("risk");
      await tab.getByLabel("Input", { exact: true }).selectOption("image");
      await rows(tab).nth(2).click();
      await tab.locator('.tokens [data-at="11"]').click();
      await tab.waitForTimeout(300);
      link = await hash(tab);
    });
    await read(file, { hash: link }, async (tab) => {
      assert.equal(await tab.locator(".verdict h2").innerText(), "AWQ W4A8-g128");
      assert.equal(await tab.getByLabel("Order", { exact: true }).inputValue(), "risk");
      assert.equal(await tab.getByLabel("Input", { exact: true }).inputValue(), "image");
      assert.equal(await rows(tab).nth(2).getAttribute("aria-selected"), "true");
      assert.equal(await chosenToken(tab), 11);
      await tab.evaluate(() => {
        location.hash = "#candidate=rtn:W4A8&example=item:read/1";
      });
      await tab.waitForFunction(() => document.querySelector(".detail h3").textContent === "read/1");
      assert.equal(await tab.locator(".verdict h2").innerText(), "RTN W4A8");
    });
  });

  test("that name nothing known show the page from its beginning", () =>
    read(
      file,
      { hash: "#candidate=none&example=prompt:none&token=-4&change=huge&sort=up&risk=high&set=%00" },
      async (tab) => {
        assert.equal(await tab.locator(".verdict h2").innerText(), "RTN W4A8");
        assert.equal(await shownCount(tab), data.prompts.length);
        assert.equal(await tab.locator(".tokens").count(), 1);
      },
    ));
});

describe("windows and themes", () => {
  for (const width of [400, 700, 1000, 1440, 2000]) {
    test(`nothing sticks out at ${width} pixels`, () =>
      read(file, { width, height: 900, plots: true }, async (tab) => {
        const wide = () => tab.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok((await wide()) <= 0);
        await tab.locator(".tokens .mismatch").first().click();
        await tab.locator(".plots").scrollIntoViewIfNeeded();
        await tab.locator(".plots .drawing svg").first().waitFor();
        assert.ok((await wide()) <= 0);
        const cut = await tab.evaluate(() =>
          [...document.querySelectorAll(".detail *, .overview *")]
            .filter(
              (one) =>
                !one.closest(".scrolls, .drawing, .hidden, th") && one.getBoundingClientRect().right > innerWidth + 1,
            )
            .map((one) => one.className),
        );
        assert.deepEqual(cut, []);
      }));
  }

  test("the theme follows the system until one is chosen, and the choice stays", async () => {
    const dark = (tab) => tab.evaluate(() => getComputedStyle(document.body).backgroundColor === "rgb(15, 19, 24)");
    await read(file, { dark: true }, async (tab) => {
      assert.equal(await dark(tab), true);
      await tab.keyboard.press("t");
      assert.equal(await dark(tab), false);
      await tab.reload();
      await tab.waitForSelector("main");
      assert.equal(await dark(tab), false);
      await tab.keyboard.press("t");
      assert.equal(await dark(tab), true);
    });
    await read(file, { dark: false }, async (tab) => assert.equal(await dark(tab), false));
  });

  test("paper gets the whole answer and no controls", () =>
    read(file, {}, async (tab) => {
      await tab.emulateMedia({ media: "print" });
      assert.equal(await tab.locator(".browse").isVisible(), false);
      assert.equal(await tab.locator(".topbar .tools").isVisible(), false);
      assert.equal(await tab.locator(".tokens").evaluate((one) => getComputedStyle(one).maxHeight), "none");
      await tab.pdf();
      assert.equal(await tab.locator(".plots .drawing svg").count(), await tab.locator(".plots figure").count());
    }));
});

test("a file without data says so", async () => {
  const path = join(folder, "broken.html");
  const filled = fill(data);
  const start = filled.indexOf('octet-stream">') + 'octet-stream">'.length;
  for (const [packed, said] of [
    ["", /holds no data/],
    ["AAAA", /cannot be shown/],
  ]) {
    writeFileSync(path, filled.slice(0, start) + packed + filled.slice(filled.indexOf("</script>", start)));
    await read(path, {}, async (tab) => assert.match(await tab.locator("main").innerText(), said));
  }
});
