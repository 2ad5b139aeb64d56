/** The decision explorer: a list of examples, and everything about the chosen one. */

import type { RefObject } from "preact";
import type { Candidate, Page } from "./contract";
import { Detail } from "./detail";
import type { Example, Filters, Sort } from "./examples";
import { FilterBar } from "./filters";
import { List } from "./list";

interface Given {
  area: RefObject<HTMLElement | null>;
  page: Page;
  candidate: Candidate;
  examples: Example[];
  list: Example[];
  current: Example | null;
  token: number | null;
  filters: Filters;
  sort: Sort;
  onFilter: (part: Partial<Filters>) => void;
  onSort: (sort: Sort) => void;
  onExample: (key: string) => void;
  onToken: (token: number) => void;
}

export function Explorer(given: Given) {
  const { area, page, candidate, examples, list, current } = given;
  if (examples.length === 0) return null;
  return (
    <section class="explorer" id="explorer" ref={area} tabIndex={-1} aria-labelledby="explorer-title">
      <div class="browse">
        <h2 id="explorer-title">Examples</h2>
        <FilterBar
          examples={examples}
          shown={list.length}
          filters={given.filters}
          sort={given.sort}
          onFilter={given.onFilter}
          onSort={given.onSort}
        />
        <List list={list} current={current} onExample={given.onExample} />
      </div>
      {current ? (
        <Detail page={page} candidate={candidate} one={current} token={given.token} onToken={given.onToken} />
      ) : (
        <p class="empty">No example fits. Take a filter away.</p>
      )}
    </section>
  );
}
