/** A question: its turns, its pictures and its sound. */

import { useState } from "preact/hooks";
import type { Media, Page, Question } from "./contract";
import { Dialog } from "./dialog";
import { visible } from "./text";

export function QuestionView({ page, question }: { page: Page; question: Question }) {
  const plain = question.turns.length === 1;
  return (
    <div class="question">
      {question.turns.map((turn, at) => {
        const media = turn.parts.flatMap((part) => (part.media === null ? [] : [page.media[part.media]]));
        const text = turn.parts.filter((part) => part.text !== "");
        return (
          <div class={`turn ${media.length > 0 ? "with-media" : ""}`} key={at}>
            {media.length > 0 && (
              <div class="media">
                {media.map((one, nr) => (one ? <MediaView key={`${nr} ${one.name}`} media={one} /> : null))}
              </div>
            )}
            <div class="says">
              {!plain && <span class="role">{visible(turn.role)}</span>}
              {text.map((part, nr) => (
                <p key={nr} dir="auto">
                  {visible(part.text)}
                </p>
              ))}
            </div>
          </div>
        );
      })}
      {question.reference !== null && (
        <p class="reference">
          <span class="role">reference</span> {visible(question.reference)}
        </p>
      )}
    </div>
  );
}

function MediaView({ media }: { media: Media }) {
  const [large, setLarge] = useState(false);
  const name = visible(media.name);
  const src = media.src?.startsWith(`data:${media.kind}/`) ? media.src : null;
  if (src === null) {
    return (
      <p class="left-out">
        {media.kind}: {name}
        {media.note && <small>{visible(media.note)}</small>}
      </p>
    );
  }
  if (media.kind === "audio") {
    return (
      <figure>
        {/* biome-ignore lint/a11y/useMediaCaption: nobody has captions for these clips; the text stands beside them */}
        <audio controls preload="metadata" src={src} aria-label={name} />
        <figcaption>
          {name}
          {media.note && <small>{visible(media.note)}</small>}
        </figcaption>
      </figure>
    );
  }
  return (
    <figure>
      <button type="button" class="picture" aria-label={`Enlarge ${name}`} onClick={() => setLarge(true)}>
        <img src={src} alt={name} />
      </button>
      <figcaption>
        {name}
        {media.note && <small>{visible(media.note)}</small>}
      </figcaption>
      {large && (
        <Dialog title={name} wide onClose={() => setLarge(false)}>
          <img class="large" src={src} alt={name} />
        </Dialog>
      )}
    </figure>
  );
}
