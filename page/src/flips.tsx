/** The flips as a table of two by two, each cell the way to its examples. */

import type { Flips } from "./contract";
import { CELL_WORDS, CELLS, type CellName } from "./examples";
import { interval, measured } from "./format";
import { NOT_MEASURED } from "./noise";
import { Word } from "./tooltip";

interface Given {
  flips: Flips;
  noise: string | null;
  items: number; // how many are graded
  chosen: CellName | "";
  onCell: (cell: CellName) => void;
}

export function FlipTable({ flips, noise, items, chosen, onCell }: Given) {
  const judged = CELLS.reduce((sum, name) => sum + flips[name].count, 0);
  const cell = (name: CellName) => {
    const { count, percent } = flips[name];
    const between = count > 0 ? interval(percent, "%") : "";
    return (
      <td>
        <button
          type="button"
          class={`cell ${name}`}
          aria-pressed={chosen === name}
          disabled={count === 0}
          onClick={() => onCell(name)}
        >
          <span class="count">{count}</span>
          <span class="what">{CELL_WORDS[name]}</span>
          <span class="share">
            {measured(percent.value, "%")} %{between && <small> {between}</small>}
          </span>
        </button>
      </td>
    );
  };
  return (
    <div class="flips">
      <h3>
        Graded answers: <Word term="flip">flips</Word>
      </h3>
      <table>
        <thead>
          <tr>
            <td />
            <th scope="col">quantized right</th>
            <th scope="col">quantized wrong</th>
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row">dense right</th>
            {cell("right_right")}
            {cell("right_wrong")}
          </tr>
          <tr>
            <th scope="row">dense wrong</th>
            {cell("wrong_right")}
            {cell("wrong_wrong")}
          </tr>
        </tbody>
      </table>
      <p class="hint">
        Choose a cell to see its examples. In brackets the <Word term="interval">interval</Word>.
        {noise !== null && (
          <>
            {" "}
            <Word term="noise floor">Noise floor</Word> of flips: {noise === NOT_MEASURED ? noise : `${noise} %`}.
          </>
        )}
        {judged < items &&
          ` Of ${items} graded items these ${judged} are right or wrong; the other ${items - judged} earn points in part.`}
      </p>
    </div>
  );
}
