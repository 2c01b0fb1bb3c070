// The state and the life of a request in words.

export function nameOf(life) {
  if (!life) return "?";
  return life.request ? life.request.replace(/^req_/, "").slice(0, 10) : `sequence ${life.id}`;
}

export const span = (seconds) => (seconds < 0.0995 ? `${Math.max(0, Math.round(seconds * 1000))} ms` : seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`);
export const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

const REASONS = {
  step: () => "nothing in the way: the next step looks at it",
  places: (view) => `all ${view.max_num_seqs} places are taken`,
  blocks: (view) => `too few free KV blocks: ${view.stats.num_blocks - view.stats.num_used_blocks} of ${view.stats.num_blocks} are free`,
  tokens: () => "the step's share of tokens for prompts is spent",
  preemption: () => "a preemption in this step comes first",
  adapter: () => "as many adapters as may be are in use",
  encoder: () => "the encoder has no room",
  delay: () => "decodes have this step for themselves, as --prefill-delay-factor asks",
  grammar: () => "other grammars are compiled first",
  order: () => "it has all that it needs, but one before it waits",
};

// Why one in the waiting line waits.
export function reasonOf(report, view) {
  const why = (REASONS[report.wait_reason] || (() => report.wait_reason))(view);
  const place = report.place === 0 ? "first in line; " : `behind ${report.place}; `;
  const away = report.state === "swapped" ? "swapped out; " : report.num_preemptions ? "sent away before; " : "";
  return place + away + why;
}

export function preemptionWords(event, nameById) {
  const how = event.was_swapped ? "swapped out" : "to be computed again";
  const blocks = many(event.num_freed_blocks, "block");
  if (event.beneficiary === event.sequence_id) return `${nameById(event.sequence_id)} gave back ${blocks} (${how}): it needed more than there was, and stood last`;
  const why = event.cause === "displaced" ? "which is more urgent" : "which stood before it and needed room";
  return `${nameById(event.sequence_id)} gave ${blocks} (${how}) to ${nameById(event.beneficiary)}, ${why}`;
}

// The life of a request up to a moment, in sentences. `report` is its line in the view; undefined after its end.
export function lifeInWords(life, report, view, nameById) {
  const now = view.time_s;
  const parts = [];
  const terms = [`priority ${life.priority}`];
  if (life.tenant) terms.push(`tenant ${life.tenant}`);
  const came = life.arrived === null ? "before this page was opened" : `${span(now - life.arrived)} ago`;
  parts.push(`${life.request || `Sequence ${life.id}`} (${terms.join(", ")}) came ${came} with ${many(life.prompt, "prompt token")}.`);
  const spells = life.spells.filter((spell) => (spell.from ?? spell.to) <= now);
  if (spells.length && spells[0].from !== null && life.arrived !== null) parts.push(`It waited ${span(Math.max(0, spells[0].from - life.arrived))} for its first step.`);
  else if (!spells.length && report && report.state === "waiting") parts.push("It has not run yet.");
  spells.forEach((spell, place) => {
    if (spell.away && spell.to !== null && spell.to <= now) {
      const next = spells[place + 1];
      const ran = spell.from === null ? "" : `After ${span(spell.to - spell.from)} `;
      const by = spell.away.beneficiary === life.id ? "it gave its blocks back, since it stood last and needed more" : `it was sent away for ${nameById(spell.away.beneficiary)}${spell.away.cause === "displaced" ? ", which is more urgent" : ", which stood before it and needed room"}`;
      const back = next && next.from !== null ? `; ${span(next.from - spell.to)} later it ran again` : "";
      const lost = spell.away.was_swapped ? `its ${many(spell.away.num_freed_blocks, "block")} went to the host` : `${many(spell.away.num_computed_tokens, "computed token")} in ${many(spell.away.num_freed_blocks, "block")} were given up`;
      parts.push(`${ran}${ran ? by : by[0].toUpperCase() + by.slice(1)} (${lost})${back}.`);
    }
  });
  const isOver = life.ended !== null && life.ended <= now;
  if (isOver) parts.push(`It ${life.isAborted ? "was ended from outside" : "ended"} ${span(now - life.ended)} ago, after at least ${many(life.output, "token")} of reply${life.arrived === null ? "" : `, ${span(life.ended - life.arrived)} in all`}.`);
  else if (report && report.state === "running") {
    const left = report.num_prompt_tokens - report.num_computed_tokens;
    if (report.lost_to) parts.push(`Of its prompt ${many(report.num_cached_tokens, "token")} were found; ${report.num_lost_tokens.toLocaleString("en")} more were not, since ${report.lost_to} lacked what is read behind them.`);
    parts.push(left > 0 ? `Now its prompt is computed: ${many(report.num_computed_tokens, "token")} of ${report.num_prompt_tokens}.` : `Now it runs at place ${report.place + 1}, with ${many(report.num_output_tokens, "token")} of reply in ${many(report.num_blocks, "block")}.`);
  } else if (report) parts.push(`Now it waits: ${reasonOf(report, view)}.`);
  return parts.join(" ");
}
